"""Exported traces: what Perfetto needs to find in them."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.timeline import Timeline
from spbench.bench.measure.simulator.trace_export import export_trace
from tests.bench.disk import files_of_at_most
from tests.measure.simulator.step_programs import chain, everyone, one_f_one_b, ring, timed


def exported(timeline: Timeline, path: Path, ranks: list[int]) -> dict[str, Any]:
    export_trace(timeline, path / "trace.json", ranks)
    return json.loads((path / "trace.json").read_text())


def slices(trace: dict[str, Any], rank: int, row: str) -> list[dict[str, Any]]:
    """The slices of a row of a rank, in order of time."""
    threads = {
        e["args"]["name"]: e["tid"]
        for e in trace["traceEvents"]
        if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] == rank
    }
    found = [
        e for e in trace["traceEvents"] if e["ph"] == "X" and (e["pid"], e["tid"]) == (rank, threads[row])
    ]
    return sorted(found, key=lambda e: e["ts"])


def test_one_process_a_rank_with_named_rows(tmp_path: Path) -> None:
    trace = exported(timed([ring(4, 3, 2, overlap=True)], [range(4)]), tmp_path, [0, 2])
    named = {(e["pid"], e["args"].get("name")) for e in trace["traceEvents"] if e["ph"] == "M"}
    for rank in (0, 2):
        assert {(rank, f"rank {rank}"), (rank, "compute"), (rank, "communication")} <= named
    assert {e["pid"] for e in trace["traceEvents"]} == {0, 2}
    assert trace["otherData"] == {"step_time_s": 12.0, "world_size": 4}


def test_slices_carry_times_in_microseconds_and_details(tmp_path: Path) -> None:
    b = ProgramBuilder((1, 1, 1, 2))
    b.phase("forward")
    b.kernel("mm", flops=3, nbytes=7)
    b.wait(b.collective("all_reduce", 4, everyone(2)))
    trace = exported(timed([b.program()], [[0, 1]]), tmp_path, [1])
    kernel, waiting = slices(trace, 1, "compute")
    assert (kernel["name"], kernel["ts"], kernel["dur"]) == ("mm", 0, 3e6)
    assert kernel["args"] == {
        "phase": "forward", "bytes": 7, "flops": 3, "class": "memory-bound", "dtype": "fp32",
    }  # fmt: skip
    assert (waiting["name"], waiting["ts"], waiting["dur"]) == ("wait for all_reduce", 3e6, 4e6)
    (reduce,) = slices(trace, 1, "communication")
    assert (reduce["name"], reduce["ts"], reduce["dur"]) == ("all_reduce", 3e6, 4e6)
    assert reduce["args"] == {"phase": "forward", "bytes": 4, "posted_s": 3.0, "ranks": [0, 1]}


def test_transfers_name_their_ends(tmp_path: Path) -> None:
    trace = exported(timed(*chain(4, 3, 2)), tmp_path, [2])
    received, sent = slices(trace, 2, "communication")
    assert (received["args"]["source"], received["args"]["destination"]) == (1, 2)
    assert (sent["args"]["source"], sent["args"]["destination"]) == (2, 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_slices_of_a_row_do_not_overlap(tmp_path: Path, overlap: bool) -> None:
    worlds = [([ring(4, 1, 2, overlap=overlap)], [range(4)]), one_f_one_b(4, 6, 1.0, 2.0, nbytes=0.5)]
    for programs, ranks in worlds:
        timeline = timed(programs, ranks)
        trace = exported(timeline, tmp_path, [0, 1])
        rows = {(e["pid"], e["tid"]) for e in trace["traceEvents"] if e["ph"] == "X"}
        for pid, tid in rows:
            row = sorted(
                (e["ts"], e["ts"] + e["dur"])
                for e in trace["traceEvents"]
                if e["ph"] == "X" and (e["pid"], e["tid"]) == (pid, tid)
            )
            assert all(after[0] >= before[1] - 1e-3 for before, after in pairwise(row))
            assert row[-1][1] <= timeline.step_time_s * 1e6 + 1e-3


def test_phases_have_a_row_of_their_own(tmp_path: Path) -> None:
    trace = exported(timed(*one_f_one_b(2, 2, 1.0, 2.0)), tmp_path, [1])
    assert [e["name"] for e in slices(trace, 1, "phases")] == ["forward", "backward"] * 2


def test_a_trace_that_cannot_be_written_leaves_the_earlier_one(tmp_path: Path) -> None:
    timeline, path = timed([ring(4, 3, 2, overlap=True)], [range(4)]), tmp_path / "trace.json"
    export_trace(timeline, path)
    earlier = path.read_bytes()
    with (
        files_of_at_most(100),
        pytest.raises(UserError, match=r"^cannot write .*trace\.json: File too large$"),
    ):
        export_trace(timeline, path, [0, 1, 2, 3])
    assert path.read_bytes() == earlier
    assert list(tmp_path.iterdir()) == [path]
