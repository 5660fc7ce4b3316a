"""Gated recurrences in blocks against the same position by position, and what stands around them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from spbench.impls.kernels import gated_delta_operators, state_space
from spbench.impls.kernels.gated_delta import GatedDelta
from spbench.impls.kernels.gated_norm import gated_norm
from spbench.impls.kernels.l2_norm import l2_norm, plain_l2_norm
from spbench.impls.kernels.recurrence import Rule, StatePassing, gated_recurrence, sequential
from spbench.impls.kernels.short_convolution import plain_short_convolution, short_convolution
from spbench.impls.kernels.state_space import StateSpace
from tests.impls.kernels.made import assert_same, made

RULES = [GatedDelta, StateSpace]


def inputs(length: int) -> list[Tensor]:
    """q, k, v, g and b of 2 samples, 2 heads of keys, 4 of values."""
    q, k = (made(2, length, 2, 3, seed=seed) for seed in (0, 1))
    v, g, b = made(2, length, 4, 5, seed=2), made(2, length, 4, seed=3), made(2, length, 4, seed=4)
    made_of = (q, l2_norm(k), v, -g.abs(), b.sigmoid())
    return [x.detach().requires_grad_() for x in made_of]


@pytest.fixture(autouse=True)
def blocks_of_four(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (gated_delta_operators, state_space):
        monkeypatch.setattr(module, "BLOCK", 4)


@pytest.mark.parametrize("length", [3, 8, 13])
@pytest.mark.parametrize("rule", RULES)
def test_blocks_are_as_position_by_position(rule: type[Rule], length: int) -> None:
    assert_same(partial(gated_recurrence, rule), partial(sequential, rule), *inputs(length))


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
    whole, cut = inputs(13), 7
    state = made(2, 4, 3, 5, seed=6)
    parts = [[x[:, :cut] for x in whole], [x[:, cut:] for x in whole]]
    after = state
    for i in range(cut):
        k = parts[0][1][:, i].repeat_interleave(2, 1)
        after = rule.step(after, k, *(x[:, i] for x in parts[0][2:]))
    passing = _Noted(state.detach(), (d_after := made(2, 4, 3, 5, seed=7).detach()))
    o = gated_recurrence(rule, *parts[0], passing)
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


@pytest.mark.parametrize("rule", RULES)
def test_maps_one_after_another(rule: type[Rule]) -> None:
    """Chunks that are each given what the maps of those before make of zero are the whole."""
    whole, edges = inputs(13), (0, 4, 9, 13)
    expected = gated_recurrence(rule, *whole)
    empty, carries = made(2, 4, 3, 5).detach(), []
    for first, last in pairwise(edges):
        gathered = torch.stack(carries) if carries else empty.new_empty(0, 2, 4, 1)
        passing = _Noted(rule.merged(gathered, (3, 5), range(len(carries))), empty)
        o = gated_recurrence(rule, *(x[:, first:last] for x in whole), passing)
        torch.testing.assert_close(o, expected[:, first:last])
        carries.append(passing.carries[1])


@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("weight", [(5,), (4, 5)])
def test_norm_and_gate(weight: tuple[int, ...], gate_first: bool) -> None:
    ours = partial(gated_norm, eps=1e-3, gate_first=gate_first)
    x, z = made(2, 3, 4, 5), made(2, 3, 4, 5, seed=1)
    assert_same(ours, partial(ours, way="plain"), x, z, made(*weight, seed=2))


def test_length_one() -> None:
    assert_same(l2_norm, plain_l2_norm, made(2, 3, 5))
    torch.testing.assert_close(l2_norm(made(7, 5)).norm(dim=-1), torch.ones(7, dtype=torch.float64))


@pytest.mark.parametrize("more", [False, True])
def test_a_short_convolution(more: bool) -> None:
    others = [made(8, seed=2), made(2, 3, 8, seed=3)] if more else []
    padding = () if more else (None, None)
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
