"""Any loop of which a quick trace runs some steps leaves the trace of all; one that settles is shortened, and
no other."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.trace.recorder import FastRecorder
from spbench.impls import rings
from spbench.impls.collectives import Ring, exchange, ring
from spbench.impls.keyed_steps import Key, keyed_steps
from tests.measure.engines.cells import N, cell, differences


class Loop:
    """What the steps of a loop share, and what they leave until its end."""

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.total = torch.zeros(4, 4)
        self.few: deque[Tensor] = deque(maxlen=3)
        self.stock = [item.clone() for item in torch.ones(N, 2, 2).unbind()]
        self.buffers = deque([torch.empty(4, 4) for _ in range(3)], maxlen=3)
        self.works = [dist.all_reduce(self.total, group=group, async_op=True) for _ in range(N)]
        self.held: list[Any] = []
        self.stream = torch.cpu.Stream()


Step = Callable[[Loop, int, Tensor], object]


def on_another_stream(loop: Loop, owner: int, block: Tensor) -> None:
    stream, compute = loop.stream, torch.cpu.current_stream()
    stream.wait_stream(compute)
    with torch.cpu.stream(stream):
        block.exp()
    compute.wait_stream(stream)


def sums(loop: Loop, owner: int, block: Tensor) -> None:
    loop.total += block * 2


#: what a step may do that the next one does too
SETTLES: dict[str, Step] = {
    "sums": sums,
    "keeps the last three": lambda loop, owner, block: loop.few.append(block + 1),
    "fills a buffer": lambda loop, owner, block: exchange([], [(torch.empty(4, 4), 0)], loop.group),
    "reduces": lambda loop, owner, block: dist.all_reduce(block, group=loop.group),
    "branches as its key says": lambda loop, owner, block: block.exp() if owner == 3 else block.neg(),
    "copies": on_another_stream,
}


def another_order_of_deaths(loop: Loop, owner: int, block: Tensor) -> None:
    made = [torch.empty(4), torch.empty(4)]
    del made[owner % 2], made[0]


def other_buffers(loop: Loop, owner: int, block: Tensor) -> None:
    buffers = [torch.empty(4, 4), torch.empty(4, 4)]
    exchange([], [(buffers[owner % 2], 0)], loop.group)


def fills_buffers_later(loop: Loop, owner: int, block: Tensor) -> None:
    loop.buffers.append(torch.empty(4, 4))
    exchange([], [(loop.buffers[0], 0)], loop.group)


def other_messages(loop: Loop, owner: int, block: Tensor) -> None:
    if owner % 2:
        dist.all_reduce(block, group=loop.group)
    else:
        dist.broadcast(block, 0, group=loop.group)


def posts(loop: Loop, owner: int, block: Tensor) -> None:
    loop.held.append(dist.all_reduce(block, group=loop.group, async_op=True))


#: what it may do that makes each step another one, or leaves something
NEVER_SETTLES: dict[str, Step] = {
    "gathers": lambda loop, owner, block: loop.held.append(block),
    "gathers results": lambda loop, owner, block: loop.held.append(block.exp()),
    "frees what was there": lambda loop, owner, block: loop.stock.pop(0),
    "posts": posts,
    "never waits": lambda loop, owner, block: dist.all_reduce(block, group=loop.group, async_op=True),
    "waits for what was posted before": lambda loop, owner, block: loop.works.pop(0).wait(),
    "other sizes": lambda loop, owner, block: torch.empty(owner + 1, 512),
    "other operators": lambda loop, owner, block: block.neg_() if owner % 2 else block.exp_(),
    "another order of deaths": another_order_of_deaths,
    "other buffers": other_buffers,
    "fills buffers later": fills_buffers_later,
    "other messages": other_messages,
}
#: what memory and messages alone do not tell from what settles
ONLY_EVENTS_TELL = ("posts", "never waits", "waits for what was posted before", "other operators")
STEPS = SETTLES | NEVER_SETTLES
#: how a loop goes round
ROUNDS: dict[str, Callable[[Loop, Tensor], Iterator[tuple[int, Tensor]]]] = {
    "ring": lambda loop, x: ring(x, loop.group, depends_on=lambda owner: owner == 3),
    "two at once": lambda loop, x: (
        (owner, block.add_(other))
        for (owner, block), (_, (other,)) in zip(
            ring(x, loop.group), Ring(loop.group).round(x + 1), strict=True
        )
    ),
}


class Steps:
    """Counts the steps of loops, and those of them that are run; with ``whole`` all of them are."""

    def __init__(self) -> None:
        self.asked = self.run = 0
        self.whole = False

    def __call__(self, size: int, key: Key, **how: Any) -> Iterator[int]:
        self.asked += size
        for step in range(size) if self.whole else keyed_steps(size, key, **how):
            self.run += 1
            yield step


Body = Callable[[dist.ProcessGroup, Tensor], object]


def trace_of(body: Body, grad: bool, events: bool) -> Trace:
    """The trace of a function of a group of N ranks and a tensor [4, 4], run by rank N/2 in a phase."""
    with tracing.fake_mesh({"sp": N}, N // 2) as mesh:
        mode = FakeTensorMode()
        recorder = FastRecorder(mode, mesh, events=events)
        with mode, recorder, recorder.phase("forward"), torch.set_grad_enabled(grad):
            left = body(mesh.get_group("sp"), torch.ones(4, 4, requires_grad=grad))
            del left
        return Trace.of(cell("ring_attention"), N // 2, recorder)


def is_shortened(body: Body, grad: bool = False, events: bool = True) -> bool:
    """Whether some steps of a body's loops are not run, so that it leaves the trace of all."""
    steps, traces = Steps(), []
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(rings, "keyed_steps", steps)
        for steps.whole in (True, False):
            steps.asked = steps.run = 0
            traces.append(trace_of(body, grad, events))
    assert differences(*traces) == []
    assert steps.asked
    return steps.run < steps.asked


def loop_of(names: Sequence[str], round_: str = "ring") -> Body:
    def body(group: dist.ProcessGroup, x: Tensor) -> object:
        loop = Loop(group)
        for owner, block in ROUNDS[round_](loop, x):
            for name in names:
                STEPS[name](loop, owner, block)
        return loop

    return body


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.parametrize("events", [False, True])
def test_a_loop_that_settles_is_shortened_and_no_other(name: str, events: bool) -> None:
    shortened = is_shortened(loop_of([name]), events=events)
    if events or name not in ONLY_EVENTS_TELL:
        assert shortened == (name in SETTLES)


@given(
    st.lists(st.sampled_from([*SETTLES]), min_size=1, max_size=4),
    st.lists(st.sampled_from([*NEVER_SETTLES]), max_size=1),
    st.sampled_from([*ROUNDS]),
)
@settings(max_examples=25, deadline=None, derandomize=True, database=None)
def test_any_loop_leaves_the_trace_of_all_steps(settling: list[str], others: list[str], round_: str) -> None:
    names = [*settling, *others]
    assert is_shortened(loop_of(names, round_)) == (not others and round_ == "ring")


def kept_by(step: Callable[[int, list[Tensor], Tensor], object]) -> Body:
    def body(group: dist.ProcessGroup, x: Tensor) -> object:
        kept, state = [x + 1], [x]
        for number in rings.keyed_steps(N, lambda step: step == 0, kept=kept):
            state.append(step(number, kept, state[-1]))  # type: ignore[arg-type]
            del state[:-2]
        return torch.cat(kept) if all(each.dim() == 2 for each in kept) else kept

    return body


def keeps_results(number: int, kept: list[Tensor], x: Tensor) -> Tensor:
    y = (x * 2)[1:]
    kept += [y.detach(), x.exp()]
    return x


def keeps_what_the_step_before_made(number: int, kept: list[Tensor], x: Tensor) -> Tensor:
    kept.append(x)
    return x + 1


def keeps_the_last_in_its_list(number: int, kept: list[Tensor], x: Tensor) -> Tensor:
    kept[:] = [x + 1]
    return x


def keeps_more_and_more(number: int, kept: list[Tensor], x: Tensor) -> Tensor:
    made = [x + 1 for _ in range(N)]
    kept += made[:number]
    return x


def keeps_other_parts(number: int, kept: list[Tensor], x: Tensor) -> Tensor:
    made = x + 1, x * 2
    kept += made if number % 2 else made[::-1]
    return x


def keeps_and_uses_again(number: int, kept: list[Tensor], x: Tensor) -> Tensor:
    kept.append(x + 1)
    return kept[-1].view(4, 4)


@pytest.mark.parametrize(
    "step",
    [
        keeps_results,
        keeps_what_the_step_before_made,
        keeps_the_last_in_its_list,
        keeps_more_and_more,
        keeps_other_parts,
        keeps_and_uses_again,
    ],
)
def test_what_steps_append_to_the_list_that_they_name(step: Any) -> None:
    assert is_shortened(kept_by(step)) == (step is keeps_results)


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
def test_a_loop_under_autograd_is_run_in_full(body: Body) -> None:
    assert not is_shortened(body, grad=True)


def rings_in_a_ring(group: dist.ProcessGroup, x: Tensor) -> None:
    for _, block in ring(x, group):
        total = torch.zeros_like(block)
        for _, (each,) in Ring(group).round(block):
            total += each


def test_a_loop_in_a_loop_is_shortened() -> None:
    assert is_shortened(rings_in_a_ring)


def test_a_phase_that_begins_in_each_step_is_written_down_for_all() -> None:
    with tracing.fake_mesh({"sp": N}, 0) as mesh:
        mode = FakeTensorMode()
        recorder = FastRecorder(mode, mesh, events=True)
        with mode, recorder, torch.no_grad():
            for _, block in ring(torch.ones(2), mesh.get_group("sp")):
                with recorder.phase("forward"):
                    block.neg_()
        assert len(recorder.memory.log.marks) == N
