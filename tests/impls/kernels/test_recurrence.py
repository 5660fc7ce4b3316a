"""Gated recurrences in blocks against the same position by position, and what stands around them."""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from spbench.impls.kernels import gated_delta_operators, state_space_operators
from spbench.impls.kernels.activations import silu_times
from spbench.impls.kernels.decay import feature_gate
from spbench.impls.kernels.gated_delta import GatedDelta, KimiDelta
from spbench.impls.kernels.gated_norm import gated_norm, l2_norm, plain_l2_norm
from spbench.impls.kernels.recurrence import Rule, StatePassing, gated_recurrence, sequential, timed
from spbench.impls.kernels.recurrence_blocks import block_sums
from spbench.impls.kernels.rms_norm import rms_norm
from spbench.impls.kernels.short_convolution import plain_short_convolution, short_convolution
from spbench.impls.kernels.state_space import StateSpace, on_processors
from tests.impls.kernels.made import assert_same, bytes_kept, made

#: the last divides a group's two heads into two shares
RULES: list[type[Rule]] = [GatedDelta, KimiDelta, StateSpace, on_processors(StateSpace, 1000)]


def inputs(length: int, rule: type[Rule] = GatedDelta) -> list[Tensor]:
    """q, k, v, g and b of 2 samples, 2 heads of keys, 4 of values."""
    gates = [3] if rule is KimiDelta else []
    q, k = (made(2, length, 2, 3, seed=seed) for seed in (0, 1))
    v, g, b = made(2, length, 4, 5, seed=2), made(2, length, 4, *gates, seed=3), made(2, length, 4, seed=4)
    made_of = (q, l2_norm(k), v, -g.abs(), b.sigmoid())
    return [x.detach().requires_grad_() for x in made_of]


@pytest.fixture(autouse=True)
def blocks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gated_delta_operators, state_space_operators):
        monkeypatch.setattr(module, "BLOCK", 4)


#: within a block, at its edge, two in one, longer than one; blocks are of four
STARTS = [(), (4,), (2, 3, 9), (1, 5, 12)]


@pytest.mark.parametrize("length", [3, 8, 13])
@pytest.mark.parametrize("rule", RULES)
def test_blocks_are_as_position_by_position(rule: type[Rule], length: int) -> None:
    assert_same(partial(gated_recurrence, rule), partial(sequential, rule), *inputs(length, rule))


@pytest.mark.parametrize("starts", STARTS[1:], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_each_document_begins_anew(rule: type[Rule], starts: tuple[int, ...]) -> None:
    def one_by_one(*whole: Tensor) -> Tensor:
        documents = pairwise((0, *starts, 13))
        return torch.cat([sequential(rule, *(x[:, a:b] for x in whole)) for a, b in documents], 1)

    packed = partial(gated_recurrence, rule, starts=starts)
    assert_same(packed, one_by_one, *inputs(13, rule))
    assert_same(packed, partial(sequential, rule, starts=starts), *inputs(13, rule))


def test_blocks_begin_at_documents_or_go_on() -> None:
    """fla's begin anew at each document, mamba_ssm's do not."""
    k, v, _, _, b = (x.detach() for x in inputs(13)[1:] + inputs(13)[4:])
    sums, starts = block_sums(-b, 4, False, []), [2, 3, 9]
    states = torch.ops.spbench.state_space_block_states(k, v, sums, b, starts)
    assert states.shape[2] == 4  # ceil(13 / 4)
    assert gated_delta_operators.room_for_states(k, v, starts).shape[2] == 1 + 1 + 2 + 1  # of 2, 1, 6, 4


class _Noted(StatePassing):
    """Notes the maps that it is given, and hands out states of its own."""

    def __init__(self, state: Tensor, d_state: Tensor):
        self.states, self.carries = {1: state, -1: d_state}, {}

    def state(
        self, rule: type[Rule], carry: Callable[[], Tensor], empty: Callable[[], Tensor], step: int
    ) -> Tensor:
        self.carries[step] = carry()
        assert empty().shape == self.states[step].shape
        return self.states[step]


@pytest.mark.parametrize("rule", RULES)
def test_maps_of_states_and_of_their_gradients(rule: type[Rule]) -> None:
    """A chunk's map gives the state after it, and its map of gradients that of the state before it."""
    whole, cut = inputs(13, rule), 7
    state = made(2, 4, 3, 5, seed=6)
    parts = [[x[:, :cut] for x in whole], [x[:, cut:] for x in whole]]
    after = state
    for i in range(cut):
        k = parts[0][1][:, i].repeat_interleave(2, 1)
        after = rule.step(after, k, *(x[:, i] for x in parts[0][2:]))
    passing = _Noted(state.detach(), (d_after := made(2, 4, 3, 5, seed=7).detach()))
    o = gated_recurrence(rule, *parts[0], passing=passing)
    weight = made(*o.shape, seed=8).detach()
    torch.autograd.grad((o * weight).sum(), whole)
    torch.testing.assert_close(
        rule.merged(passing.carries[1].unsqueeze(0), (3, 5), [0], state.detach()), after
    )

    outputs, now = [], state
    for i in range(cut):
        q, k = (x[:, i].repeat_interleave(2, 1) for x in parts[0][:2])
        now = rule.step(now, k, *(x[:, i] for x in parts[0][2:]))
        outputs.append(rule.scale(3) * (q.unsqueeze(-2) @ now).squeeze(-2))
    loss = (torch.stack(outputs, 1) * weight).sum() + (now * d_after).sum()
    (expected,) = torch.autograd.grad(loss, [state])
    torch.testing.assert_close(rule.merged(passing.carries[-1].unsqueeze(0), (3, 5), [0], d_after), expected)


@pytest.mark.parametrize("starts", [*STARTS, (9,), (5, 6, 10)], ids=str)
@pytest.mark.parametrize("rule", RULES)
def test_maps_one_after_another(rule: type[Rule], starts: tuple[int, ...]) -> None:
    """Chunks that are each given what the maps of those before make of zero are the whole; a map of a chunk
    in which a document begins forgets the state."""
    whole, edges = inputs(13, rule), (0, 4, 9, 13)
    expected = gated_recurrence(rule, *whole, starts=starts)
    empty, carries = made(2, 4, 3, 5).detach(), []
    for first, last in pairwise(edges):
        gathered = torch.stack(carries) if carries else empty.new_empty(0, 2, 4, 1)
        passing = _Noted(rule.merged(gathered, (3, 5), range(len(carries))), empty)
        begin = [start - first for start in starts if start < last]
        o = gated_recurrence(rule, *(x[:, first:last] for x in whole), passing=passing, starts=begin)
        torch.testing.assert_close(o, expected[:, first:last])
        carries.append(passing.carries[1])
        transition = carries[-1].unflatten(-1, (3, -1))[..., 5:] if not rule.scalar else carries[-1][..., 15:]
        assert bool(transition.any()) == all(start < 0 for start in begin)


@pytest.mark.parametrize("rule", RULES)
def test_what_backward_makes_again_is_not_kept(rule: type[Rule]) -> None:
    """What is made of each input is as large as it; d v is added."""
    sources, d = inputs(13, rule), made(4, seed=5)

    def make(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor, *more: Tensor) -> list[Tensor]:
        return [2 * q, k.sin(), 3 * v, 2 * g, b.square(), *(2 * x for x in more)]

    ours = partial(gated_recurrence, rule, make=make)
    assert_same(ours, partial(sequential, rule, make=make), *sources, d)
    assert_same(ours, partial(sequential, rule, make=make), *sources)
    made_again = bytes_kept(partial(ours, *sources))
    assert made_again == bytes_kept(partial(gated_recurrence, rule, *sources))
    assert made_again < bytes_kept(lambda: gated_recurrence(rule, *make(*sources)))


def test_shares_of_heads_fill_a_cards_multiprocessors() -> None:
    """Of 4 sequences of 1024 positions in blocks of 128, as Megatron-Core's MambaMixer has them: nsplits."""
    of_card = partial(state_space_operators.shares, blocks=4 * 8)
    assert of_card(4, 1, processors=132) == 4  # ceil(128 / 132) = 1 head at a time
    assert of_card(4, 1, processors=108) == 2
    assert of_card(16, 4, processors=132) == 1  # ceil(512 / 132) = 4, the whole group
    assert of_card(6, 1, processors=96) == 3
    assert of_card(4, 1, processors=0) == 1


def test_backward_holds_the_sums_of_each_share() -> None:
    """Of keys, a gradient [B, L, G, D] in the states' dtype for each share, and their sum."""
    shapes: list[tuple[int, ...]] = []

    class Sums(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.spbench.state_space_key_gradients.default:
                shapes.append(tuple(result[0].shape))
            return result

    for rule in RULES[2:]:
        with Sums():
            gated_recurrence(rule, *inputs(8)).sum().backward()
    assert shapes == [(2, 1, 2, 2, 4, 3), (2, 2, 2, 2, 4, 3)]


def test_kernels_are_timed_before_their_first_call() -> None:
    """A second layer, and a second step, find them timed."""
    rule, buffers = timed(StateSpace, 1 << 20), []

    class Allocations(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and result.dtype == torch.uint8 and result.numel():
                buffers.append(result.nbytes)
            return result

    for layers, expected in ((2, 2), (1, 2)):
        with Allocations():
            o = torch.stack([gated_recurrence(rule, *inputs(8)) for _ in range(layers)])
            o.sum().backward()
        assert buffers == [1 << 20] * expected


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weight", [(5,), (4, 5)])
def test_norm_and_gate(weight: tuple[int, ...], gate_first: bool) -> None:
    by_sigmoid = partial(gated_norm, eps=1e-3, gate_first=gate_first, sigmoid=True)
    inputs = made(2, 3, 4, 5), made(2, 3, 4, 5, seed=1), made(*weight, seed=2)
    assert_same(by_sigmoid, partial(by_sigmoid, way="plain"), *inputs)
    ours = partial(gated_norm, eps=1e-3, gate_first=gate_first)
    x, z = made(2, 3, 4, 5), made(2, 3, 4, 5, seed=1)
    assert_same(ours, partial(ours, way="plain"), x, z, made(*weight, seed=2))
    if gate_first:  # the gate within the kernel of the recurrence, as Megatron-Core has it

        def apart(x: Tensor, z: Tensor, weight: Tensor) -> Tensor:
            return rms_norm(silu_times(z, x), weight, 1e-3)

        assert_same(apart, partial(ours, way="plain"), x, z, made(*weight, seed=2))


def test_a_gate_of_each_feature() -> None:
    inputs = made(2, 3, 4, 5), made(4, seed=1), made(4, 5, seed=2)
    assert_same(feature_gate, partial(feature_gate, way="plain"), *inputs)
    assert bytes_kept(lambda: feature_gate(*inputs)) == sum(x.nbytes for x in inputs)


@pytest.mark.skipif(not find_spec("fla"), reason="fla is not installed")
def test_kda_is_as_flas_reference() -> None:
    from fla.ops.kda.naive import naive_recurrent_kda

    q, k, v, g, b = (x.detach().float() for x in inputs(13, KimiDelta))
    expected, _ = naive_recurrent_kda(q, k, v, g, b)
    torch.testing.assert_close(gated_recurrence(KimiDelta, q, k, v, g, b), expected)


def test_length_one() -> None:
    assert_same(l2_norm, plain_l2_norm, made(2, 3, 5))
    torch.testing.assert_close(l2_norm(made(7, 5)).norm(dim=-1), torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("starts", [(), (0,), (-1, 2, 3), (-2, 5), (1,)], ids=str)
@pytest.mark.parametrize("more", [False, True])
def test_a_short_convolution(more: bool, starts: tuple[int, ...]) -> None:
    others = [made(8, seed=2), made(2, 3, 8, seed=3)] if more else []
    padding = (starts,) if more else (None, None, starts)
    assert_same(
        lambda *x: short_convolution(*x, *padding),
        lambda *x: plain_short_convolution(*x, *padding),
        made(2, 6, 8),
        made(8, 4, seed=1),
        *others,
    )
    x, weight = made(1, 2, 1), torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=torch.float64)
    y = torch.nn.functional.silu(torch.stack((8 * x[:, 0], 4 * x[:, 0] + 8 * x[:, 1]), 1))
    torch.testing.assert_close(short_convolution(x, weight), y)


@pytest.mark.parametrize("scalar", [True, False])
def test_flops_of_merged_states(scalar: bool) -> None:
    """2 samples of 3 heads: each of four states is multiplied by a number, or by a matrix [4, 4]."""
    size, order = [4, 5], [0, 2, 1, 0]
    carries = torch.zeros(3, 2, 3, 4 * 5 + 1 if scalar else 4 * (5 + 4))
    with FlopCounterMode(display=False) as counted:
        torch.ops.spbench.recurrence_merged(carries, size, order, scalar, None)
    assert counted.get_total_flops() == 2 * 3 * len(order) * (1 if scalar else 4) * 2 * 4 * 5
