"""The command that writes a trace: which cell it takes, what it says, and its one line for each mistake."""

import json
import re
import shutil
from functools import partial
from pathlib import Path

import pytest

from spbench.bench.units import shown_time
from tests.tools.commands.conftest import Run


@pytest.fixture
def trace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> Run:
    """Run `spbench trace` in an empty folder; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("traced.yaml"), "cells.yaml")
    return partial(command_line, "trace", "--scenario", "cells.yaml")


def processes(path: str) -> set[int]:
    return {event["pid"] for event in json.loads(Path(path).read_text())["traceEvents"]}


def test_the_cell_that_is_left_is_written(trace: Run) -> None:
    code, out, err = trace("--strategy", "ring_self_attention", "--batch", "6", "--output", "new/ring.json")
    assert (code, err.splitlines()[0].split("/")[1:5]) == (0, ["ring_self_attention", "sp2", "b6", "L24"])
    content = json.loads(Path("new/ring.json").read_text())
    names = {(event["name"], event["cat"]) for event in content["traceEvents"] if event["ph"] == "X"}
    assert {("bmm", "compute"), ("send", "communication"), ("all_reduce", "communication")} <= names
    assert {("forward", "phase"), ("optimizer", "phase")} <= names
    assert content["otherData"]["world_size"] == 2
    breakdown, parts, rests, where, _, title, *table = out.splitlines()
    assert rests.startswith("priced by something else, with shares of the step: ")
    assert "all_reduce inter-node" in rests
    assert ": the bandwidth of a send" in rests
    step = shown_time(content["otherData"]["step_time_s"])
    assert re.match(rf"step time {step} \S+.*, most of it [a-z -]+; mean over ranks: ", breakdown)
    assert all(f"{part} " in parts for part in ("matmul", "attention", "memory-bound", "inter-node links"))
    assert all(part in breakdown for part in ("compute", "exposed communication", "bubble", "overhead"))
    assert where == "new/ring.json: open it in https://ui.perfetto.dev"
    assert title == "Memory of each rank class at each step, of 15.07 GiB"
    assert [cell.strip() for cell in table[2].split("|")[1:5]] == ["0", "2", "0", "yes"]  # set-up


def test_ranks_are_those_asked_for_or_the_first_of_each_stage(trace: Run) -> None:
    chosen = ("--strategy", "tensor_parallel")
    assert trace(*chosen)[0] == 0
    assert processes("trace.json") == {0, 2}
    assert trace(*chosen, "--ranks", "1,0")[0] == 0
    assert processes("trace.json") == {0, 1}


def test_settings_choose_between_cells_that_are_otherwise_alike(trace: Run) -> None:
    groups = "groups:\n  - {strategy: single, training: {backend: zero1}, model_options: {dropout: 0.0}}\n"
    groups += "  - {strategy: single, training: {backend: ddp}}\n"
    Path("cells.yaml").write_text(Path("cells.yaml").read_text().replace("groups:\n", groups))
    chosen = ("--strategy", "single", "--format", "json")
    code, _, err = trace(*chosen)
    assert code == 2
    assert err.endswith(
        "they differ in model_options.dropout (0.0, unset), training.backend (zero1, ddp): "
        "choose with --where SETTING=VALUE\n"
    )
    records = [
        json.loads(trace(*chosen, "--where", where)[1])
        for where in ("training.backend=zero1", "training.backend=ddp", "model_options.dropout=unset")
    ]
    keys = [record["cell"] for record in records]
    assert keys[0] != keys[1] == keys[2]
    assert records[0]["file"] == "trace.json"


def test_a_search_is_traced_at_the_value_given(trace: Run) -> None:
    chosen = ("--variant", "searched", "--strategy", "tensor_parallel")
    code, _, err = trace(*chosen)
    assert code == 2
    assert "searches for its seq_len: give one, --seq-len N" in err
    code, _, err = trace(*chosen, "--seq-len", "48")
    assert code == 0
    assert "/L48/" in err


def test_a_step_that_does_not_fit_is_timed_with_a_warning(trace: Run) -> None:
    code, out, err = trace("--variant", "huge", "--strategy", "tensor_parallel")
    assert code == 0
    assert "warning: timed as if it fitted the card, which has no room for " in err
    fits = [line.split("|")[5].strip() for line in out.splitlines()[-4:]]
    assert fits == ["yes", "no"] * 2  # set-up and step of two stages
    assert out.startswith("step time ")


def test_only_the_first_cells_are_named(trace: Run) -> None:
    assert trace("--variant", "all")[2].count("bert-tiny/") == 3
