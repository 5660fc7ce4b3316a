"""A log taken apart: when it is largest, what holds it then, and the smallest card on which it fits."""

from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import virtual
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.memory.allocator import CachingAllocator, replay
from spbench.bench.measure.memory.allocator_settings import ExpandableSegments
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.tools.choose import look as module
from spbench.bench.tools.choose.anatomy import ANATOMY, Part, anatomy, fullest, least_usable, snapshot
from spbench.bench.tools.choose.fit_verdict import TABLES, Verdict, ranks_text
from spbench.bench.tools.choose.look import attempt, examine
from spbench.bench.units import card_gib
from tests.measure.engines.cells import write_cluster
from tests.measure.engines.test_repeating_runs import SHALLOW as MANY
from tests.measure.engines.test_repeating_runs import approximately
from tests.slow import slow

MIB, GIB = 2**20, 2**30

#: 100 MiB of weights in set-up; a step of two micro-batches, the second of which needs more
LOG = MemoryLog(
    sizes=[100 * MIB, 40 * MIB, 20 * MIB, 60 * MIB, 30 * MIB],
    events=[1, 2, 3, -3, -2, 4, 5, -5, -4],
    marks=[("forward", 1), ("backward", 2), ("forward", 5), ("backward", 6)],
    tags={0: "parameters"},
    ends=[9],
    places=[0, 1, 2, 1, 2],
    place_names=["", "blocks.*.mlp", "head"],
)


def test_the_largest_moment_is_named_and_taken_apart() -> None:
    found = anatomy(LOG)
    moment = found.moment
    assert (moment.step, moment.phase, moment.micro_batch, moment.micro_batches) == (1, "backward", 2, 2)
    assert moment.module == "head"
    assert str(moment) == "step 1, backward 2 of 2, in head"
    assert found.peak_memory_bytes == 190 * MIB == sum(found.held.values())
    assert found.held == {"parameters": 100 * MIB, "activations": 60 * MIB, "temporaries": 30 * MIB}
    assert found.parts == [
        Part("parameters", "", 100 * MIB, 1),
        Part("activations", "blocks.*.mlp", 60 * MIB, 1),
        Part("temporaries", "head", 30 * MIB, 1),
    ]
    assert found.phases == [("set-up", 0), ("forward", 1), ("backward", 2), ("forward", 5), ("backward", 6)]
    totals = [
        sum(values) for values in zip(*(v for k, v in found.curve.items() if k != "event"), strict=True)
    ]
    assert max(totals) == found.peak_memory_bytes


def test_what_backward_leaves_to_the_optimizer_are_gradients() -> None:
    """Of two micro-batches; what dies before is a temporary."""
    marks = [("forward", 0), ("backward", 0), ("forward", 4), ("backward", 4), ("optimizer", 7)]
    found = anatomy(MemoryLog([3 * MIB, MIB, 2 * MIB, MIB], [1, 2, -2, 3, 4, -4, -3, -1], marks, ends=[8]))
    assert found.held == {"gradients": 3 * MIB, "temporaries": 3 * MIB}


def test_the_smallest_card_may_need_more_than_is_given_out_at_once() -> None:
    # a hole of 60 MiB that 61 do not fit, so that a segment more is needed until the hole's is given back
    log = MemoryLog([40 * MIB, 60 * MIB, 5 * MIB, 61 * MIB], [1, 2, -1, 3, -2, 4], [("forward", 0)])
    least = least_usable(log, 101 * MIB, 200 * MIB)
    assert replay(log.sizes, log.events, least).out_of_memory is None
    assert replay(log.sizes, log.events, least - 4 * MIB).out_of_memory is not None


def test_a_snapshot_has_the_events_and_the_segments_at_the_end() -> None:
    log = MemoryLog([3 * MIB, 1000], [1, 2, -2], [("forward", 0)], {0: "parameters"})
    found = snapshot(log)
    (events,) = found["device_traces"]
    assert [event["action"] for event in events] == [
        *("segment_alloc", "alloc", "segment_alloc", "alloc", "free_requested", "free_completed")
    ]
    large, small = found["segments"]
    assert (large["total_size"], large["allocated_size"], large["segment_type"]) == (
        20 * MIB,
        3 * MIB,
        "large",
    )
    assert [block["state"] for block in large["blocks"]] == ["active_allocated", "inactive"]
    assert (small["total_size"], small["allocated_size"], small["segment_type"]) == (2 * MIB, 0, "small")
    assert [frame["name"] for frame in events[1]["frames"]] == ["parameters", "forward of step 1"]


@pytest.mark.parametrize(
    ("kind", "of_first_stream"),
    [(CachingAllocator, [("small", 2 * MIB)] * 2), (ExpandableSegments, [("small", 4 * MIB)])],
)
def test_segments_of_a_snapshot_are_of_their_stream_and_pool(
    kind: type[CachingAllocator], of_first_stream: list[tuple[str, int]]
) -> None:
    """An expandable one of small blocks may be larger than others of these are."""
    log = MemoryLog([MIB] * 4, [1, 2, 3, 4], [("forward", 0)], streams=[0, 0, 0, 7])
    found = snapshot(log, kind)["segments"]
    by_stream = [(s["stream"], (s["segment_type"], s["total_size"])) for s in found]
    assert by_stream == [*((0, each) for each in of_first_stream), (7, ("small", 2 * MIB))]


@pytest.mark.parametrize(
    ("statuses", "words"),
    [(("oom", "ok", "ok"), "the steps fit, set-up does not: "), (("oom", "oom", "oom"), "")],
)
def test_a_setup_that_alone_does_not_fit_is_said(statuses: tuple[str, ...], words: str) -> None:
    taken_apart = {**asdict(anatomy(LOG)), "least_usable_bytes": 2**30}
    measured = {
        "by_class": [{"step": step, "status": status} for step, status in enumerate(statuses)],
        "usable_memory_bytes": 2**29,
        "status": "oom",
        "meters": {ANATOMY: taken_apart},
    }
    cell = Cell(model="gpt3-tiny", strategy="single", batch=1, seq_len=8)
    verdict = Verdict(cell, measured)
    first, second = str(verdict), TABLES.text("peak", verdict, program="")
    assert first == "fits: no, 0.5 GiB are missing (needs 1.00 of 0.5 GiB)"
    assert second.startswith(f"{words}on the fullest, rank 0 (")


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        ([3], "rank 3"),
        ([0, 1, 2, 3], "ranks 0-3"),
        ([4, 5, 0, 1], "ranks 0-1, 4-5"),
        ([*range(0, 64, 8)], "ranks 0, 8, ..., 56"),
    ],
)
def test_ranks_in_words(ranks: list[int], text: str) -> None:
    assert ranks_text(ranks) == text


def test_gib_have_as_many_digits_as_are_read() -> None:
    assert [card_gib(n * 2**30) for n in (79.65, 7.654, 0.5, 0.0977)] == ["79.7", "7.65", "0.5", "0.0977"]


@pytest.mark.parametrize(
    ("layers", "options", "card_mib"),
    [
        (10, {}, 30),
        slow(10, {"recompute": "full", "recompute_layers": 2}, 10),
        slow(10, {"recompute": "full"}, 8),
        slow(12, {"recompute": "full", "recompute_method": "block", "recompute_layers": 6}, 20),
    ],
)
def test_a_guess_beyond_the_card_is_not_traced_whole(
    layers: int, options: dict[str, Any], card_mib: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = {"layers": layers, **options}
    asked: dict[str, Any] = {"model": "causal-transformer-tiny", "strategy": "single", "batch": 2}
    cell = Cell(seq_len=512, model_options=model, cluster=write_cluster(tmp_path, card_mib), **asked)
    monkeypatch.setattr(module, "examine", lambda cell: pytest.fail("traced whole"))
    found = attempt(cell)
    assert found.status == "oom"
    assert found.peak_memory_bytes == trace(cell, effort="whole").memory.peak().nbytes
    assert found.reason == f"needs about {found.peak_memory_bytes / GIB:.0f} GiB"


def test_very_many_micro_batches_are_examined_by_few(monkeypatch: pytest.MonkeyPatch) -> None:
    by_few = examine(MANY).model_dump()
    monkeypatch.setattr(virtual, "counts_on_line", lambda cell: None)
    by_all = examine(MANY).model_dump()
    assert by_few == approximately(by_all)
    assert by_few["meters"][ANATOMY] == by_all["meters"][ANATOMY]
    assert by_few["meters"][ANATOMY]["moment"]["micro_batches"] == MANY.training.micro_batches


def test_of_answers_that_are_not_monotone_the_card_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    """A card of 5 GiB serves it, cards of 5 to 7 do not, larger ones do."""

    def made_up(sizes: object, events: object, capacity: int, *more: object) -> object:
        fails = capacity < 4 * GIB or 5 * GIB < capacity < 7 * GIB
        return SimpleNamespace(out_of_memory="none left" if fails else None)

    monkeypatch.setattr("spbench.bench.measure.replay", made_up)
    assert least_usable(LOG, 3 * GIB, 8 * GIB) > 5 * GIB  # the middle fails, and what is below is not tried
    assert least_usable(LOG, 3 * GIB, 8 * GIB, usable=5 * GIB) <= 5 * GIB
    assert least_usable(LOG, 3 * GIB, 8 * GIB, usable=6 * GIB) > 6 * GIB


def test_the_fullest_class_is_found_with_a_replay_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """Classes that give out 3, 2 and 1 GiB at once and reserve 8 need cards of 6, 5 and 4."""
    logs, asked = [[1], [2], [3]], list[int]()
    needs = {id(log): n for log, n in zip(logs, (6, 5, 4), strict=True)}

    def made_up(sizes: object, events: object, capacity: int, *more: object) -> object:
        asked.append(id(sizes))
        return SimpleNamespace(out_of_memory=None if capacity >= needs[id(sizes)] * GIB else "none left")

    monkeypatch.setattr("spbench.bench.measure.replay", made_up)
    monkeypatch.setattr("spbench.bench.measure.allocator_of", lambda cell: CachingAllocator)
    monkeypatch.setattr("spbench.bench.measure.usable_memory_bytes", lambda cell: None)
    kept = [{"peak_memory_bytes": n * GIB, "reserved_memory_bytes": 8 * GIB} for n in (3, 2, 1)]
    traces = SimpleNamespace(
        cell=None,
        by_class=[SimpleNamespace(status="ok", by_class=[each]) for each in kept],
        traces=[SimpleNamespace(memory=SimpleNamespace(sizes=log, events=[], streams={})) for log in logs],
    )
    found = fullest(traces)  # type: ignore[arg-type]
    assert found.place == 0
    assert 6 * GIB <= found.usable_bytes <= 6.01 * GIB
    assert [asked.count(id(log)) for log in logs[1:]] == [1, 1]
    needs[id(logs[2])] = 7
    assert fullest(traces).place == 2  # type: ignore[arg-type]
