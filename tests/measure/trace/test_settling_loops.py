"""Loops that settle are shortened; loops that are not alike are run in full."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.trace.fast_recorder import FastRecorder
from spbench.impls import rings
from spbench.impls.collectives import Ring, exchange, ring
from tests.measure.trace.shortened_loops import N, Steps, cell, differences_of_loops

Body = Callable[[dist.ProcessGroup, Tensor], object]


def trace_of(body: Body, grad: bool = False, events: bool = True) -> Trace:
    """The trace of a function of a group of N ranks and a tensor [4, 4], run by rank N/2 in a phase."""
    with tracing.fake_mesh({"sp": N}, N // 2) as mesh:
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
        with tracing.fake_mesh({"sp": N}, 0) as mesh:
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
