"""Loops of which a few steps are run leave the traces that whole loops leave: for every strategy, at ranks on
which steps of all keys occur; and loops that are not alike are run in full."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.cell import Cell
from spbench.bench.engines import virtual
from spbench.bench.engines.plan import plan
from spbench.bench.engines.traces import Trace
from spbench.bench.meters import repeated_steps
from spbench.bench.meters.fast_recorder import FastRecorder
from spbench.impls import rings
from spbench.impls.collectives import Ring, exchange, ring
from spbench.impls.keyed_steps import Key, keyed_steps
from spbench.impls.models.model import model_preset, models
from spbench.impls.strategies import all_gather_kv, ring_attention
from spbench.impls.strategies.base import Unsupported
from spbench.impls.strategies.placements import PLACEMENTS, PlacedChunks
from spbench.impls.strategies.registry import strategies
from tests.bench.meters.same_traces import differences

N = 16
RANKS = (0, N // 2, N - 1)
#: options with which tiny models can be spread over N ranks, where they have them
WIDER = {"heads": N, "hidden": 6 * N, "temporal": N}
#: positions: two chunks a rank, and two places a frame
SEQ_LEN = 4 * N
TINY = [name for name in models() if "-tiny" in name]


def cell(strategy: str, model: str, options: dict[str, Any] | None = None, **changes: Any) -> Cell:
    fields = {field.name for field in dataclasses.fields(model_preset(model))}
    wider: dict[str, Any] = {name: value for name, value in WIDER.items() if name in fields}
    if "leading" in fields:
        wider["leading"] = (N, *model_preset(model).leading[1:])
    settings: dict[str, Any] = {
        "model": model,
        "model_options": wider | (options or {}),
        "strategy": strategy,
        "sizes": strategies()[strategy].sizes_for(N) if strategies()[strategy].axes else {},
        "batch": 4,
        "seq_len": SEQ_LEN,
        "precision": "bf16",
        "cluster": "dgx-a100",
    }
    return Cell.model_validate(settings | changes)


def supported(asked: Cell) -> bool:
    try:
        plan(asked)
    except Unsupported:
        return False
    return True


class Steps:
    """Counts the steps of loops, and those of them that are run; with ``whole`` all of them are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked = self.run = 0
        self.whole = False
        for module in (rings, all_gather_kv):
            monkeypatch.setattr(module, "keyed_steps", self)

    def __call__(self, size: int, key: Key, **how: Any) -> Iterator[int]:
        self.asked += size
        for step in range(size) if self.whole else keyed_steps(size, key, **how):
            self.run += 1
            yield step


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def differences_of_loops(trace: Callable[[], Trace], steps: Steps) -> Sequence[str]:
    """How a shortened trace differs from a whole one; the counts of ``steps`` are those of the former. One
    without loops is not shortened."""
    steps.asked = steps.run = 0
    shortened = trace()
    if not steps.asked:
        return []
    counts = steps.asked, steps.run
    steps.whole = True
    whole = trace()
    steps.whole, (steps.asked, steps.run) = False, counts
    assert len(whole.memory.events) > N
    return differences(shortened, whole)


def check_ranks(asked: Cell, steps: Steps, ranks: Sequence[int] = RANKS) -> None:
    """Compare the loops of these ranks of the first replica and stage: the first, a middle and the last."""
    for rank in ranks if asked.sizes.world > 1 else RANKS[:1]:
        assert differences_of_loops(partial(virtual.trace, asked, rank, events=True), steps) == [], rank
        if not steps.asked:
            return
        assert steps.run < steps.asked


#: in every run the middle rank, which has owners of lower and of higher ranks
of_ranks = pytest.mark.parametrize(
    "ranks", [RANKS[1:2], pytest.param(RANKS, marks=pytest.mark.slow)], ids=str
)


@of_ranks
@pytest.mark.parametrize("strategy", strategies())
def test_every_strategy_leaves_the_traces_of_whole_loops(
    strategy: str, steps: Steps, ranks: Sequence[int]
) -> None:
    check_ranks(next(c for c in (cell(strategy, model) for model in TINY) if supported(c)), steps, ranks)


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
    "zero1": ring_cell(
        "causal-transformer-tiny",
        sizes={"dp": 2, "sp": N},
        training={"backend": "zero1", "micro_batches": 2},
    ),
    "pipeline": cell(
        "ring_self_attention", "bert-tiny", sizes={"pp": 2, "sp": N}, training={"micro_batches": 2}
    ),
}


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
    honest = ring_attention.meeting

    def but_for_the_fourth(placement: str, rank: int, owner: int, length: int) -> Any:
        return None if owner == 3 else honest(placement, rank, owner, length)

    monkeypatch.setattr(ring_attention, "meeting", but_for_the_fourth)
    with pytest.raises(AssertionError, match="'sizes'"):
        check_ranks(RINGS["striped"], steps)


def drop_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = repeated_steps._EventRecord.repeat

    def repeat(self: Any, times: int) -> None:
        honest(self, times)
        del self.rows[-len(self.rows) // 50]

    monkeypatch.setattr(repeated_steps._EventRecord, "repeat", repeat)


def drop_a_count(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = repeated_steps._MessageRecord.repeat
    monkeypatch.setattr(
        repeated_steps._MessageRecord, "repeat", lambda self, times: honest(self, max(0, times - 1))
    )


def drop_tags(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        repeated_steps._StorageRecord, "_tags", lambda self, start, end: [None] * (end.births - start.births)
    )
    monkeypatch.setattr(repeated_steps._StorageRecord, "_tagged_at_once", lambda *ends: True)


def keep_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_steps.MemoryMeter, "renumber", lambda *arguments: None)


def keep_posts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(repeated_steps.EventLog, "renumber_posts", lambda *arguments: None)


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
    assert field in differences_of_loops(partial(virtual.trace, asked, N - 1, events=True), steps)


Body = Callable[[dist.ProcessGroup, Tensor], object]


def trace_of(body: Body, grad: bool = False, events: bool = True) -> Trace:
    """The trace of a function of a group of N ranks and a tensor [4, 4], run by rank N/2 in a phase."""
    with virtual.fake_mesh({"sp": N}, N // 2) as mesh:
        mode = FakeTensorMode()
        recorder = FastRecorder(mode, mesh, events=events)
        with mode, recorder, recorder.phase("forward"), torch.set_grad_enabled(grad):
            left = body(mesh.get_group("sp"), torch.ones(4, 4, requires_grad=grad))
            del left
        return Trace.of(cell("ring_attention", "bert-tiny"), N // 2, recorder)


def check_loops(body: Body, steps: Steps, **how: bool) -> None:
    assert differences_of_loops(partial(trace_of, body, **how), steps) == []
    assert steps.asked


def sums(group: dist.ProcessGroup, x: Tensor) -> None:
    total = torch.zeros_like(x)
    for _, block in ring(x, group):
        total += block * 2


def sums_while_it_sends(group: dist.ProcessGroup, x: Tensor) -> None:
    total = torch.zeros_like(x)
    for _, (block,) in Ring(group).round(x):
        total += block * 2


def branches(group: dist.ProcessGroup, x: Tensor) -> None:
    for owner, block in ring(x, group, depends_on=lambda owner: owner == 3):
        block.exp() if owner == 3 else block.neg()


def rings_in_a_ring(group: dist.ProcessGroup, x: Tensor) -> None:
    for _, block in ring(x, group):
        sums_while_it_sends(group, block)


def keeps_the_last_three(group: dist.ProcessGroup, x: Tensor) -> None:
    kept: list[Tensor] = []
    for _, block in ring(x, group):
        kept = [*kept[-2:], block + 1]


def keeps_results(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    kept = [x + 1]
    for _ in rings.keyed_steps(N, lambda step: step == 0, kept=kept):
        y = (x * 2)[1:]
        kept += [y.detach(), x.exp()]
    return torch.cat(kept)


@pytest.mark.parametrize(
    "body", [sums, sums_while_it_sends, branches, rings_in_a_ring, keeps_the_last_three, keeps_results]
)
def test_a_loop_that_settles_is_shortened(body: Body, steps: Steps) -> None:
    check_loops(body, steps)
    assert steps.run < steps.asked


def gathers(group: dist.ProcessGroup, x: Tensor) -> list[Tensor]:
    return [block for _, block in ring(x, group)]


def gathers_results(group: dist.ProcessGroup, x: Tensor) -> Tensor:
    return torch.cat([block.exp() for _, block in ring(x, group)])


def frees_what_was_there(group: dist.ProcessGroup, x: Tensor) -> None:
    stock = list(torch.ones(N, 2, 2).unbind())
    stock = [item.clone() for item in stock]
    for _, block in ring(x, group):
        stock.pop(0)
        block.neg_()


def waits_after_the_loop(group: dist.ProcessGroup, x: Tensor) -> None:
    works = []
    for _, block in ring(x, group):
        works.append(dist.all_reduce(block, group=group, async_op=True))
    for work in works:
        work.wait()


def never_waits(group: dist.ProcessGroup, x: Tensor) -> None:
    for _, block in ring(x, group):
        dist.all_reduce(block, group=group, async_op=True)


def waits_for_what_was_posted_before(group: dist.ProcessGroup, x: Tensor) -> None:
    works = []
    for _ in range(N):  # at the distance of the steps, which have six rows
        works.append(dist.all_reduce(x, group=group, async_op=True))
        for _ in range(5):
            x.neg_()
    for _, block in ring(x, group):
        works.pop(0).wait()
        block.neg_()


def two_at_once(group: dist.ProcessGroup, x: Tensor) -> None:
    for (_, block), (_, (other,)) in zip(ring(x, group), Ring(group).round(x + 1), strict=True):
        block.add_(other)


def other_sizes(group: dist.ProcessGroup, x: Tensor) -> None:
    for owner, _ in ring(x, group):
        torch.empty(owner + 1, 512)


def other_operators(group: dist.ProcessGroup, x: Tensor) -> None:
    for owner, block in ring(x, group):
        block.neg_() if owner % 2 else block.exp_()


def another_order_of_deaths(group: dist.ProcessGroup, x: Tensor) -> None:
    for owner, _ in ring(x, group):
        made = [torch.empty(4), torch.empty(4)]
        del made[owner % 2], made[0]


def other_buffers(group: dist.ProcessGroup, x: Tensor) -> None:
    for owner, _ in ring(x, group):
        buffers = [torch.empty(4, 4), torch.empty(4, 4)]
        exchange([], [(buffers[owner % 2], 0)], group)


def fills_buffers_later(group: dist.ProcessGroup, x: Tensor) -> None:
    buffers = [torch.empty(4, 4) for _ in range(3)]
    for _ in ring(x, group):
        buffers = [*buffers[1:], torch.empty(4, 4)]
        exchange([], [(buffers[0], 0)], group)


def keeps_and_uses_again(group: dist.ProcessGroup, x: Tensor) -> list[Tensor]:
    kept: list[Tensor] = []
    last: list[Tensor] = []
    for _ in rings.keyed_steps(N, lambda step: 0, kept=kept):
        kept.append(x + 1)
        last = [*last[-2:], kept[-1][1:]]
    kept.clear()
    return last


def keeps_what_the_step_before_made(group: dist.ProcessGroup, x: Tensor) -> None:
    kept: list[Tensor] = []
    for _ in rings.keyed_steps(N, lambda step: 0, kept=kept):
        kept.append(x)
        x = x + 1


def keeps_the_last_in_its_list(group: dist.ProcessGroup, x: Tensor) -> None:
    kept: list[Tensor] = []
    for _ in rings.keyed_steps(N, lambda step: 0, kept=kept):
        kept[:] = [x + 1]


def keeps_more_and_more(group: dist.ProcessGroup, x: Tensor) -> None:
    kept: list[Tensor] = []
    for step in rings.keyed_steps(N, lambda step: 0, kept=kept):
        made = [x + 1 for _ in range(N)]
        kept += made[:step]


def keeps_other_parts(group: dist.ProcessGroup, x: Tensor) -> None:
    kept: list[Tensor] = []
    for step in rings.keyed_steps(N, lambda step: 0, kept=kept):
        made = x + 1, x * 2
        kept += made if step % 2 else made[::-1]


@pytest.mark.parametrize(
    "body",
    [
        keeps_and_uses_again,
        keeps_what_the_step_before_made,
        keeps_the_last_in_its_list,
        keeps_more_and_more,
        keeps_other_parts,
        gathers,
        gathers_results,
        frees_what_was_there,
        waits_after_the_loop,
        never_waits,
        waits_for_what_was_posted_before,
        two_at_once,
        other_sizes,
        other_operators,
        another_order_of_deaths,
        other_buffers,
        fills_buffers_later,
    ],
)
def test_a_loop_that_does_not_settle_is_run_in_full(body: Body, steps: Steps) -> None:
    check_loops(body, steps)
    assert steps.run == steps.asked > 0


def other_messages(group: dist.ProcessGroup, x: Tensor) -> None:
    for owner, block in ring(x, group):
        if owner % 2:
            dist.all_reduce(block, group=group)
        else:
            dist.broadcast(block, 0, group=group)


@pytest.mark.parametrize("events", [False, True])
def test_a_loop_with_other_messages_is_run_in_full(events: bool, steps: Steps) -> None:
    check_loops(other_messages, steps, events=events)
    assert steps.run == steps.asked > 0


def test_a_loop_is_shortened_without_events_too(steps: Steps) -> None:
    check_loops(sums_while_it_sends, steps, events=False)
    assert steps.run < steps.asked


def saves_blocks(group: dist.ProcessGroup, x: Tensor) -> None:
    total = torch.zeros_like(x)
    for _, block in ring(x.detach(), group):
        total = total + x * block
    total.sum().backward()


def saves_nothing(group: dist.ProcessGroup, x: Tensor) -> None:
    total = x
    for _, block in ring(x.detach(), group):
        block.neg_()
        total = -total
    total.sum().backward()


@pytest.mark.parametrize("body", [saves_blocks, saves_nothing])
def test_a_loop_under_autograd_is_run_in_full(body: Body, steps: Steps) -> None:
    check_loops(body, steps, grad=True)
    assert steps.run == steps.asked > 0


def test_a_phase_that_begins_in_each_step_is_written_down_for_all(steps: Steps) -> None:
    def loop() -> list[tuple[str, int]]:
        with virtual.fake_mesh({"sp": N}, 0) as mesh:
            mode = FakeTensorMode()
            recorder = FastRecorder(mode, mesh, events=True)
            with mode, recorder, torch.no_grad():
                for _, block in ring(torch.ones(2), mesh.get_group("sp")):
                    with recorder.phase("forward"):
                        block.neg_()
            return recorder.memory.log.marks

    steps.whole = False
    shortened = loop()
    assert steps.run < N
    steps.whole = True
    assert shortened == loop()
    assert len(shortened) == N


@pytest.mark.parametrize("name", ["striped", "RSA"])
def test_a_shortened_trace_is_that_of_the_plain_path(
    name: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    shortened = virtual.trace(RINGS[name], N // 2, events=True)
    assert steps.run < steps.asked
    monkeypatch.setenv(virtual.PLAIN_TRACE, "1")
    assert differences(shortened, virtual.trace(RINGS[name], N // 2, events=True)) == []


def test_real_ranks_and_plain_traces_run_every_step(steps: Steps, monkeypatch: pytest.MonkeyPatch) -> None:
    assert list(keyed_steps(N, lambda step: 0)) == list(range(N))
    monkeypatch.setenv(virtual.PLAIN_TRACE, "1")
    virtual.trace(RINGS["contiguous"], events=True)
    assert steps.run == steps.asked > 0


def test_after_a_trace_loops_are_whole_again() -> None:
    virtual.trace(RINGS["contiguous"])
    assert list(keyed_steps(N, lambda step: 0)) == list(range(N))
