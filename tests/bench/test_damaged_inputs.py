"""Damaged scenarios, clusters, config.json and published CSV files: one line each, and no traceback.

SPBENCH_FUZZ is how many of each kind are tried; a few by default, so that the default tests stay quick.
"""

from __future__ import annotations

import copy
import io
import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spbench.bench.command_line.cli import exit_code
from tests.measure.scenarios.test_model_files import TINY

EXAMPLES = int(os.environ.get("SPBENCH_FUZZ", "25"))
LONGEST_S = 30

NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, -(2**63), 10**15, 10**40),
    *(0.0, -0.5, 0.5, 1e308, 1e-308, float("nan"), float("inf"), -float("inf")),
    *("", "two", "128K", "1M", "-1K", "9999999999999G", "NaN", "../..", "a/b.json", "\x00", "ä\n", "=1+1"),
    *([], {}, [[]], [0], ["sp", "dp"], [1, "x"], {"": 1}, {"a": {"b": []}}, [None], [float("nan")]),
]
SCENARIO: dict[str, Any] = yaml.safe_load("""
title: Damaged
defaults: {model: bert-tiny, batch: 4, seq_len: 512, cluster: mine.yaml, precision: bf16}
groups:
  - {strategy: tensor_parallel, sizes: {tp: [1, 4], dp: 1}, model_options: {layers: 2}}
  - {strategy: ring_self_attention, sizes: {sp: 4}, mesh: [sp, dp], timeout_s: 60.0}
  - {model: config.json, strategy: single, training: {backend: zero1, micro_batches: 2}}
  - {strategy: single, seq_len: null, search: {quantity: seq_len, step: 4, limit: 4096}}
variants: {a: {}, b: {training: {moments: later}}}
tables:
  - table: t
    published: {file: t.csv}
    cells: {batch: 4, strategy: tensor_parallel}
    match: {ranks: parallel}
    where: {ranks: [1, 4]}
    status: status
    quantities: {memory: {field: peak_memory_bytes, unit: 1048576, rank: last}}
values:
  - claim: c
    published: {file: c.csv}
    cells:
      numerator: {strategy: tensor_parallel, world: 4}
      denominator: {strategy: tensor_parallel, sizes: {tp: 1}}
    ours: numerator / denominator
    quantity: tokens_per_s
inferred_from: [{setting: s, answers: [t], rows: [{ranks: 4}], reason: r}]
""")
CLUSTER: dict[str, Any] = yaml.safe_load("""
extends: dgx-a100
about: ours
devices_per_node: 8
device: {memory_total_bytes: {value: 68719476736, source: "-"}, overlap_loss: {value: 0.1, source: "-"}}
network: {latency_s: {value: 1.0e-06, source: "-"}, nics_per_node: 8}
calibration: {bf16: {compute_efficiency: 0.5, fitted_on: []}}
""")
CONFIG: dict[str, Any] = {**TINY, "rope_theta": 10000.0}
TEXTS: dict[str, str] = {
    "s.yaml": yaml.safe_dump(SCENARIO, sort_keys=False),
    "mine.yaml": yaml.safe_dump(CLUSTER, sort_keys=False),
    "config.json": json.dumps(CONFIG, indent=1),
    "t.csv": "ranks,memory,status\n1,2,ok\n4,,oom\n",
    "c.csv": "claim,published\nc,3.5\n",
}
DUMPS: dict[str, tuple[Any, Callable[[Any], str]]] = {
    "s.yaml": (SCENARIO, lambda content: yaml.safe_dump(content, sort_keys=False, allow_unicode=True)),
    "mine.yaml": (CLUSTER, lambda content: yaml.safe_dump(content, sort_keys=False, allow_unicode=True)),
    "config.json": (CONFIG, json.dumps),
}


def places(content: Any) -> Iterator[tuple[Any, ...]]:
    """The paths of all keys and entries below a content."""
    for key in (
        content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    ):
        yield (key,)
        yield from ((key, *below) for below in places(content[key]))


@st.composite
def damaged_values(draw: st.DrawFn) -> dict[str, str]:
    """One file with a value replaced, a key renamed or an entry left out."""
    name = draw(st.sampled_from([*DUMPS]))
    content, dump = DUMPS[name]
    content = copy.deepcopy(content)
    for _ in range(draw(st.integers(1, 2))):
        *above, last = draw(st.sampled_from([*places(content)]))
        at = content
        for key in above:
            at = at[key]
        value, how = draw(st.sampled_from(NASTY)), draw(st.sampled_from(["value"] * 6 + ["key", "gone"]))
        if how == "value" or isinstance(at, list):
            at[last] = copy.deepcopy(value)
        else:
            moved = at.pop(last)
            if how == "key" and isinstance(value, str):
                at[value] = moved
    return {name: dump(content)}


@st.composite
def damaged_texts(draw: st.DrawFn) -> dict[str, str | bytes]:
    """One file with some of its text cut out, or something put in."""
    name = draw(st.sampled_from([*TEXTS]))
    text = TEXTS[name]
    start = draw(st.integers(0, len(text)))
    end = draw(st.integers(start, min(len(text), start + 12)))
    put_in = draw(st.sampled_from([*',":[}\t\n\x00\ufeffé', "", "nan", "inf", "-1", "&a *a"]))
    damaged = text[:start] + put_in + text[end:]
    return {name: damaged.encode("latin-1", "replace") if draw(st.booleans()) else damaged}


@contextmanager
def at_most(seconds: int) -> Iterator[None]:
    """Inside, a hang is a failure."""

    def give_up(*_: Any) -> None:
        raise AssertionError(f"a hang of more than {seconds} s")

    before = signal.signal(signal.SIGALRM, give_up)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def assert_one_line(folder: Path, files: dict[str, Any]) -> None:
    """A dry run of the scenario lists cells, or says in one line what is wrong."""
    for name, text in {**TEXTS, **files}.items():
        data = text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")
        (folder / name).write_bytes(data)
    out, err = io.StringIO(), io.StringIO()
    arguments = ["run", "--scenario", "s.yaml", "--dry-run", "--variant", "a", "--output", "none"]
    with at_most(LONGEST_S), redirect_stdout(out), redirect_stderr(err):
        code = exit_code(arguments)
    text = err.getvalue()
    assert code in (0, 2), (code, text)
    assert "Traceback" not in text
    assert "internal error" not in text
    if code == 2:
        assert text.startswith("spbench: ")
        assert text.count("\n") == 1
        assert out.getvalue() == ""


many = settings(
    max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_files_as_they_are_are_right(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in TEXTS.items():
        (folder / name).write_text(text)
    assert exit_code(["run", "--scenario", "s.yaml", "--dry-run", "--variant", "a"]) == 0
    assert capsys.readouterr().out.count("would run") == 5


@given(damaged_values())
@many
def test_wrong_values(folder: Path, files: dict[str, Any]) -> None:
    assert_one_line(folder, files)


@given(damaged_texts())
@many
def test_wrong_texts(folder: Path, files: dict[str, Any]) -> None:
    assert_one_line(folder, files)
