"""Loops of which a few steps are run leave the traces that whole loops leave: for every strategy, at ranks on
which steps of all keys occur."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.trace import step_records
from spbench.impls.keyed_steps import keyed_steps
from spbench.impls.models.model import model_preset, models
from spbench.impls.registries import strategies
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.placements import PLACEMENTS
from tests.measure.engines.cells import supported
from tests.measure.trace.same_traces import differences
from tests.measure.trace.shortened_loops import N, Steps, cell, differences_of_loops
from tests.slow import slow

RANKS = (0, N // 2, N - 1)
TINY = [name for name in models() if "-tiny" in name]


def check_ranks(asked: Cell, steps: Steps, ranks: Sequence[int] = RANKS, *, shortened: bool = True) -> None:
    """Compare the loops of these ranks of the first replica and stage: the first, a middle and the last.
    ``shortened``: loops are so long that some of their steps are not run."""
    for rank in ranks if asked.sizes.world > 1 else RANKS[:1]:
        assert differences_of_loops(partial(tracing.trace, asked, rank, events=True), steps) == [], rank
        if not steps.asked:
            return
        assert steps.run < steps.asked if shortened else steps.run <= steps.asked


#: in every run the middle rank, which has owners of lower and of higher ranks
of_ranks = pytest.mark.parametrize("ranks", [RANKS[1:2], slow(RANKS)], ids=str)


@of_ranks
@pytest.mark.parametrize("strategy", strategies())
def test_every_strategy_leaves_the_traces_of_whole_loops(
    strategy: str, steps: Steps, ranks: Sequence[int]
) -> None:
    asked = next(c for c in (cell(strategy, model) for model in TINY) if supported(c))
    # a head a rank is one round, and by default there are two chunks; "rounds" and "chunks" below have more
    check_ranks(asked, steps, ranks, shortened=strategy not in ("upipe", "fpdt"))


def ring_cell(model: str, placement: str = "contiguous", **changes: Any) -> Cell:
    return cell("ring_attention", model, strategy_options={"placement": placement}, **changes)


RINGS = {
    "contiguous": ring_cell("causal-transformer-tiny"),
    "striped": ring_cell("causal-transformer-tiny", "striped"),
    "zigzag": ring_cell("causal-transformer-tiny", "zigzag"),
    "full attention": ring_cell("transformer-2d-tiny"),
    "linear attention": ring_cell("tnl-tiny"),
    "gathered, striped": cell(
        "all_gather_kv", "causal-transformer-tiny", strategy_options={"placement": "striped"}
    ),
    "RSA": cell("ring_self_attention", "bert-tiny"),
    "RSA, square masks": cell("ring_self_attention", "bert-tiny", {"mask_shape": "square"}),
    "RSA, Linformer": cell("ring_self_attention", "bert-tiny-linformer"),
    "checkpointing": cell("ring_self_attention", "bert-tiny", {"checkpointing": True, "dropout": 0.1}),
    "inference": ring_cell("causal-transformer-tiny", training={"step": "inference"}),
    "tiles": ring_cell(
        "causal-transformer-tiny",
        batch=16,
        model_options={"hidden": 6 * N, "heads": N, "recompute": "full", "mlp_tile": 7, "loss_tile": 5},
        training={"backend": "zero3"},
    ),
    "tiles, inference": ring_cell(
        "causal-transformer-tiny",
        batch=16,
        model_options={"hidden": 6 * N, "heads": N, "mlp_tile": 7, "loss_tile": 5},
        training={"step": "inference"},
    ),
    "zero1": ring_cell(
        "causal-transformer-tiny",
        sizes={"dp": 2, "sp": N},
        training={"backend": "zero1", "micro_batches": 2},
    ),
    "pipeline": cell(
        "ring_self_attention", "bert-tiny", sizes={"pp": 2, "sp": N}, training={"micro_batches": 2}
    ),
}


#: loops over rounds of heads and chunks of positions, also around rings
LOOPS = {
    "rounds": cell("upipe", "causal-transformer-tiny", sizes={"sp": 2}),
    "rounds of groups": cell("upipe", "causal-transformer-tiny-gqa", {"kv_heads": 2}, sizes={"sp": 2}),
    "rounds of rings": cell("upipe+ring_attention", "causal-transformer-tiny", sizes={"sp": 2, "cp": N}),
    "chunks": cell("fpdt", "causal-transformer-tiny", sizes={"sp": 4}, strategy_options={"chunk": 4}),
    "chunks of layers that run again": cell(
        "fpdt",
        "causal-transformer-tiny-gqa",
        {"kv_heads": 2, "recompute": "full"},
        sizes={"sp": 4},
        strategy_options={"chunk": 4},
    ),
    "chunks on the device": cell(
        "fpdt",
        "causal-transformer-tiny",
        sizes={"sp": 4},
        strategy_options={"chunk": 4, "offload": False},
    ),
    "chunks of windows": cell(
        "fpdt",
        "causal-transformer-tiny",
        {"window": 40, "sinks": True, "documents": (51, 13)},
        sizes={"sp": 4},
        strategy_options={"chunk": 4},
    ),
    "rounds with sinks": cell("upipe", "causal-transformer-tiny", {"sinks": True}, sizes={"sp": 2}),
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", [*LOOPS][:4])
def test_rounds_and_chunks_leave_the_traces_of_whole_loops(name: str, steps: Steps) -> None:
    check_ranks(LOOPS[name], steps, [0])
    assert steps.asked


@pytest.mark.slow
@pytest.mark.parametrize("name", [*LOOPS][4:])
def test_more_chunks_leave_the_traces_of_whole_loops(name: str, steps: Steps) -> None:
    check_ranks(LOOPS[name], steps, [0])
    assert steps.asked


@pytest.mark.one_in(2)
@of_ranks
@pytest.mark.parametrize("name", RINGS)
def test_rings_leave_the_traces_of_whole_ones(name: str, steps: Steps, ranks: Sequence[int]) -> None:
    check_ranks(RINGS[name], steps, ranks)
    # Linformer's projections are summed over the ranks; there is no ring
    assert (steps.asked > 0) == (name != "RSA, Linformer")


def all_cells(strategy: str) -> Iterator[Cell]:
    """A strategy on all tiny models and their variants, and the kinds of step."""
    trainings: list[dict[str, Any]] = [{}, {"step": "inference"}, {"micro_batches": 2}]
    placed = issubclass(strategies()[strategy], PlacedChunks)
    chosen: list[dict[str, Any]] = [{"placement": placement} for placement in PLACEMENTS if placed] or [{}]
    variants = [(model, {**options}) for model in TINY for options in [{}, *model_preset(model).variants()]]
    for (model, options), training, strategy_options in product(variants, trainings, chosen):
        yield cell(strategy, model, options, training=training, strategy_options=strategy_options)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", strategies())
def test_all_models_and_steps_leave_the_traces_of_whole_loops(strategy: str, steps: Steps) -> None:
    cells = [asked for asked in all_cells(strategy) if supported(asked)]
    assert len(cells) > 3
    for asked in cells:
        check_ranks(asked, steps)


def test_a_body_that_depends_on_more_than_the_key_is_seen(
    monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    honest = Meetings.of

    def but_for_the_fourth(self: Meetings, owner: int) -> Any:
        return None if owner == 3 else honest(self, owner)

    monkeypatch.setattr(Meetings, "of", but_for_the_fourth)
    with pytest.raises(AssertionError, match="'sizes'"):
        check_ranks(RINGS["striped"], steps)


def drop_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step_records.EventRecord.repeat

    def repeat(self: Any, times: int) -> None:
        honest(self, times)
        del self.rows[-len(self.rows) // 50]

    monkeypatch.setattr(step_records.EventRecord, "repeat", repeat)


def drop_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = step_records.MessageRecord.repeat
    monkeypatch.setattr(
        step_records.MessageRecord, "repeat", lambda self, times: honest(self, max(0, times - 1))
    )


def drop_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        step_records.StorageRecord, "_tags", lambda self, start, end: [None] * (end.births - start.births)
    )
    monkeypatch.setattr(step_records.StorageRecord, "_tagged_at_once", lambda *ends: True)


def keep_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_records.MemoryMeter, "renumber", lambda *arguments: None)


def keep_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_records.EventLog, "renumber_posts", lambda *arguments: None)


@pytest.mark.parametrize(
    ("fault", "field"),
    [
        (drop_a_row, "kind"),
        (drop_a_count, "counts"),
        (drop_tags, "tags"),
        (keep_numbers, "events"),
        (keep_posts, "partner"),
    ],
)
def test_a_fault_in_what_is_written_is_seen(
    fault: Callable[[pytest.MonkeyPatch], None], field: str, monkeypatch: pytest.MonkeyPatch, steps: Steps
) -> None:
    fault(monkeypatch)
    asked = RINGS["contiguous"]
    assert field in differences_of_loops(partial(tracing.trace, asked, N - 1, events=True), steps)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", ["striped", "RSA"])
def test_a_shortened_trace_is_that_of_the_plain_path(
    name: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortened = tracing.trace(RINGS[name], N // 2, events=True)
    assert steps.run < steps.asked
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1")
    assert differences(shortened, tracing.trace(RINGS[name], N // 2, events=True)) == []


def test_real_ranks_and_plain_traces_run_every_step(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(keyed_steps(N, lambda step: 0)) == list(range(N))
    monkeypatch.setenv(tracing.PLAIN_TRACE, "1")
    tracing.trace(RINGS["contiguous"], events=True)
    assert steps.run == steps.asked > 0


def test_after_a_trace_loops_are_whole_again() -> None:
    tracing.trace(RINGS["contiguous"])
    assert list(keyed_steps(N, lambda step: 0)) == list(range(N))
