"""Traces that are read from disk are those that were made, field by field, and stand for no other cell."""

import hashlib
import os
import random
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.engines import traces, tracing
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.engines.traces import DamagedTrace, Trace, from_bytes, to_bytes, trace_key
from tests.measure.engines.cells import SMALL, cell, differences

RSA = cell("ring_self_attention")


#: what a warning says of a kept trace
DAMAGED = "a kept trace is damaged, so the step is traced again"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a cache that this process uses."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))
    monkeypatch.setattr(traces, "_cache", None)
    traces.use()
    return tmp_path / "traces"


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Cell]:
    """The cells that are traced, a list that grows; without those of single devices, for FLOPs of models."""
    cells: list[Cell] = []
    traced = tracing._traced

    def counted(asked: Cell, *others: Any) -> Trace:
        if asked.strategy != "single":
            cells.append(asked)
        return traced(asked, *others)

    monkeypatch.setattr(tracing, "_traced", counted)
    return cells


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "name",
    [
        "ring_self_attention",
        "lasp under zero1",
        "pipeline",
        "two steps",
        "inference",
        "checkpoints on the host",
    ],
)
def test_a_trace_comes_back_as_it_was(name: str) -> None:
    trace = tracing.trace(SMALL[name], 1, events=True)
    again = from_bytes(to_bytes(trace), SMALL[name])
    assert differences(again, trace) == []
    assert (again.cell, again.rank, again.found) == (trace.cell, trace.rank, trace.found)
    assert again.communication.axes == trace.communication.axes
    assert again.measurement(10**9) == trace.measurement(10**9)
    without = tracing.trace(SMALL[name], 1)
    assert from_bytes(to_bytes(without), SMALL[name]).program is None


def test_the_comparison_sees_a_fault_in_a_file() -> None:
    trace = tracing.trace(RSA, events=True)
    again = from_bytes(to_bytes(trace), RSA)
    again.program.nbytes[7] += 1
    assert differences(again, trace) == ["nbytes"]


def test_cells_that_differ_in_the_cluster_are_timed_from_one_trace(folder: Path, made: list[Cell]) -> None:
    asked = cell("ring_self_attention", precision="fp32")  # in which no card's attention has buffers
    on_a100, on_p100 = asked, asked.model_copy(update={"cluster": "piz-daint-p100", "variant": "other"})
    first, second = run_cell(on_a100), run_cell(on_p100)
    assert made == [on_a100]
    assert first.communication == second.communication
    assert None not in (first.step_time_s, second.step_time_s)
    assert first.step_time_s != second.step_time_s
    traces._cache = None
    assert run_cell(on_p100) == second
    assert run_cell(on_a100) == first
    assert made == [on_a100, on_p100, on_a100]


CHANGES: dict[str, Any] = {
    "model_options": {"layers": 1},
    "strategy_options": {"softmax": "other"},
    "batch": 12,
    "seq_len": 96,
    "precision": "fp32",
    "model": "bert-base",
    "model_config_json": {
        "model_type": "bert",
        "vocab_size": 128,
        "hidden_size": 24,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "max_position_embeddings": 128,
    },
    "strategy": "tensor_parallel",
    "sizes": {"sp": 4},
    "mesh": ["sp", "dp"],
    "training": {"micro_batches": 2},
}


@pytest.mark.parametrize("field", CHANGES)
def test_another_cell_is_another_trace(field: str) -> None:
    changed = Cell.model_validate({**RSA.model_dump(), field: CHANGES[field]})
    assert trace_key(changed, 0, True) != trace_key(RSA, 0, True)


def test_every_field_of_a_cell_is_part_of_a_trace_or_is_known_not_to_be() -> None:
    """A field that is new changes traces until it is said not to."""
    assert {*CHANGES} | traces._NOT_TRACED | {"timeout_s"} == {*Cell.model_fields}


def test_what_else_makes_another_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    key = trace_key(RSA, 0, True)
    assert len({key, trace_key(RSA, 1, True), trace_key(RSA, 0, False)}) == 3
    for name, other in (("code_digest", lambda: "other"), ("torch.__version__", "99")):
        with monkeypatch.context() as patched:
            patched.setattr(f"spbench.bench.measure.engines.traces.{name}", other)
            assert trace_key(RSA, 0, True) != key


def test_a_damaged_file_is_made_again_and_said_once(
    folder: Path, made: list[Cell], caplog: pytest.LogCaptureFixture
) -> None:
    before = tracing.trace(RSA, events=True)
    (file,) = folder.glob("??/*")
    whole = file.read_bytes()
    for content in (b"", whole[: len(whole) // 2], b"x" * 100):
        file.write_bytes(content)
        caplog.clear()
        for _ in range(2):
            assert differences(tracing.trace(RSA, events=True), before) == []
        assert file.read_bytes() == whole
        assert [text.split(":")[0] for text in caplog.messages] == [DAMAGED]
    assert made == [RSA] * 4


def damaged(whole: bytes, draw: random.Random) -> bytes:
    """The bytes cut off, or with one to four of them changed."""
    if draw.random() < 0.2:
        return whole[: draw.randrange(len(whole))]
    content = bytearray(whole)
    for place in draw.sample(range(len(content)), draw.randint(1, 4)):
        content[place] ^= draw.randint(1, 255)
    return bytes(content)


def sealed(archive: bytes) -> bytes:
    """As if it had been written so, with the digest of the damaged content."""
    return hashlib.sha256(archive).digest() + archive


@pytest.mark.parametrize("seal", [bytes, sealed])
def test_no_damage_is_read_as_a_trace_or_ends_a_run(seal: Callable[[bytes], bytes]) -> None:
    """500 damaged files: refused; with a digest made anew refused or read, never another error."""
    whole = to_bytes(tracing.trace(RSA, events=True))[32 if seal is sealed else 0 :]
    draw = random.Random(20)
    read = 0
    for _ in range(int(os.environ.get("SPBENCH_FUZZ", "500"))):
        with suppress(DamagedTrace):
            from_bytes(seal(damaged(whole, draw)), RSA)
            read += 1
    assert not read or seal is sealed


def test_plain_traces_and_meters_of_others_read_nothing(
    folder: Path, made: list[Cell], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1")
    tracing.trace(RSA)
    tracing.trace(RSA)
    assert len(made) == 2
    assert not folder.exists()


def test_only_who_asks_keeps_traces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv(CACHE_FOLDER, raising=False)
    monkeypatch.setattr(traces, "_cache", None)
    tracing.trace(RSA)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(CACHE_FOLDER, "off")
    traces.use()
    tracing.trace(RSA)
    assert not list(tmp_path.iterdir())
    monkeypatch.delenv(CACHE_FOLDER)
    traces.use()
    tracing.trace(RSA)
    assert len(list((tmp_path / "spbench" / "traces").glob("??/*"))) == 1
