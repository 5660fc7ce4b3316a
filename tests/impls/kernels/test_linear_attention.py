"""The chunked form of linear attention against the quadratic one and the recurrence, in float64 and below."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from spbench.bench.measure.verify.judged import relative_errors
from spbench.impls.kernels import linear_attention as module
from spbench.impls.kernels.linear_attention import (
    BLOCK,
    TILE,
    chunked_linear_attention,
    linear_attention,
    quadratic_linear_attention,
    state_dtype,
)
from tests.grid import data
from tests.impls.kernels.made import bytes_kept
from tests.slow import mostly_slow, slow

B, Z, D, A = 2, 3, 4, 6
DECAYS = data(__file__)["DECAYS"]
#: of float64, relative: a sum of 100 products rounds by some 1e-16 each
EXACT = 1e-12

Attention = Callable[..., tuple[Tensor, Tensor]]


def made(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(length: int, dtype: torch.dtype = torch.float64, d: int = D, a: int = A) -> dict[str, Tensor]:
    """q, k, v and the state before position 0."""
    return {
        "q": made(B, Z, length, d, seed=1, dtype=dtype),
        "k": made(B, Z, length, d, seed=2, dtype=dtype),
        "v": made(B, Z, length, a, seed=3, dtype=dtype),
        "initial": made(B, Z, d, a, seed=4, dtype=state_dtype(dtype)),
    }


def rates(name: str) -> Tensor | None:
    values = DECAYS[name]
    return None if values is None else torch.tensor(values, dtype=torch.float64)


def recurrence(
    q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, initial: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The definition, a position at a time."""
    power = torch.exp(-(torch.zeros(Z) if decay is None else decay)).to(q.dtype).view(-1, 1, 1)
    state = q.new_zeros(*q.shape[:2], q.shape[-1], v.shape[-1]) if initial is None else initial
    outputs = []
    for t in range(q.shape[2]):
        state = power * state + k[:, :, t].unsqueeze(-1) * v[:, :, t].unsqueeze(-2)
        outputs.append((q[:, :, t].unsqueeze(-2) @ state).squeeze(-2))
    return torch.stack(outputs, 2), state


def results(attention: Attention, given: dict[str, Tensor], decay: Tensor | None) -> dict[str, Tensor]:
    """Outputs, final state, and the gradients of all inputs; the gradients that arrive are fixed."""
    given = {name: x.detach().clone().requires_grad_() for name, x in given.items()}
    o, final = attention(given["q"], given["k"], given["v"], decay, given.get("initial"))
    loss = (o * made(*o.shape, seed=5, dtype=o.dtype)).sum()
    loss = loss.to(final.dtype) + (final * made(*final.shape, seed=6, dtype=final.dtype)).sum()
    gradients = torch.autograd.grad(loss, list(given.values()))
    named = {f"gradient of {name}": x for name, x in zip(given, gradients, strict=True)}
    return {"o": o.detach(), "final": final.detach(), **named}


def chunked(block: int) -> Attention:
    return lambda q, k, v, decay, initial: chunked_linear_attention(q, k, v, decay, initial, block=block)


def in_two(cut: int, block: int) -> Attention:
    """The sequence in two chunks, the second beginning with the final state of the first."""
    halves = slice(0, cut), slice(cut, None)

    def attention(
        q: Tensor, k: Tensor, v: Tensor, decay: Tensor | None, state: Tensor
    ) -> tuple[Tensor, Tensor]:
        outputs = []
        for half in halves:
            o, state = chunked_linear_attention(
                *(x[:, :, half] for x in (q, k, v)), decay, state, block=block
            )
            outputs.append(o)
        return torch.cat(outputs, 2), state

    return attention


def worst(reference: dict[str, Tensor], got: dict[str, Tensor]) -> float:
    return max(relative_errors(reference, got).values())


# -- exactness -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 5, 24, 64, 100])
def test_chunked_is_the_recurrence(length: int, decay: str) -> None:
    given = inputs(length)
    expected = results(recurrence, given, rates(decay))
    for block in (1, 7, 16, 256):
        assert worst(expected, results(chunked(block), given, rates(decay))) < EXACT, block
    for cut in (1, 16, 50, 99) if length == 100 else ():
        assert worst(expected, results(in_two(cut, 16), given, rates(decay))) < EXACT, cut


@pytest.mark.parametrize("decay", DECAYS)
@pytest.mark.parametrize("length", [1, 5, 100])
def test_without_an_initial_state_it_is_the_quadratic_form(length: int, decay: str) -> None:
    given = inputs(length)
    del given["initial"]

    def attend(attention: Callable[..., Tensor]) -> dict[str, Tensor]:
        # the quadratic form has no state to compare
        return results(lambda q, k, v, s, _: (attention(q, k, v, s), q[0, 0, 0]), given, rates(decay))

    expected = attend(quadratic_linear_attention)
    for block in (1, 7, 16, BLOCK):
        got = attend(lambda q, k, v, s, block=block: linear_attention(q, k, v, s, block=block))
        assert worst(expected, got) < EXACT, block
    without = results(chunked(16), given, rates(decay))
    assert worst(results(recurrence, given, rates(decay)), without) < EXACT


def test_either_output_may_be_unused() -> None:
    given = {name: x.requires_grad_() for name, x in inputs(20).items()}
    for chosen in (0, 1):
        gradients = []
        for attention in (recurrence, chunked(7)):
            loss = attention(*[given[n] for n in "qkv"], rates("mixed"), given["initial"])[chosen].sum()
            made_by = torch.autograd.grad(loss, list(given.values()), allow_unused=True)
            pairs = zip(given.items(), made_by, strict=True)
            gradients.append({name: torch.zeros_like(x) if g is None else g for (name, x), g in pairs})
        assert worst(*gradients) < EXACT


def test_decay_gets_no_gradient() -> None:
    given, decay = inputs(5), torch.ones(Z, dtype=torch.float64, requires_grad=True)
    o, _ = chunked_linear_attention(given["q"].requires_grad_(), given["k"], given["v"], decay)
    assert torch.autograd.grad(o.sum(), decay, allow_unused=True) == (None,)


def test_states_are_those_at_the_boundaries() -> None:
    given, decay = inputs(20), rates("mixed")
    states = module.linear_attention_states(given["k"], given["v"], decay, 8)
    assert states.shape == (B, Z, 4, D, A)
    for c, position in enumerate((0, 8, 16, 20)):
        part = [given[n][:, :, :position] for n in "qkv"]
        expected = recurrence(*part, decay)[1] if position else torch.zeros(B, Z, D, A).double()
        assert worst({"state": expected}, {"state": states[:, :, c]}) < EXACT
    q, d_o = given["q"], made(B, Z, 20, A, seed=5)
    gradients = module.linear_attention_state_gradients(q, d_o, decay, 8)
    assert gradients.shape == states.shape
    for c, position in enumerate((0, 8, 16, 20)):
        state = states[:, :, c].clone().requires_grad_()
        later = [x[:, :, position:] for x in (q, given["k"], given["v"])]
        if position < 20:
            o, _ = recurrence(*later, decay, state)
            (expected,) = torch.autograd.grad((o * d_o[:, :, position:]).sum(), state)
        else:
            expected = torch.zeros_like(state)
        assert worst({"gradient": expected}, {"gradient": gradients[:, :, c]}) < EXACT


# -- planted faults ------------------------------------------------------------------------------------


POWERS = module.decay_powers
INPUT_GRADIENTS = module.linear_attention_input_gradients
#: of the module, a function and what is planted in its place
FAULTS: list[tuple[str, Callable[..., Any]]] = [
    # the initial state does not decay
    ("final_state", lambda states, initial, _, n: module._carried(states[:, :, -1], initial, None, n)),
    # the gradient of the final state does not reach the initial one
    ("initial_gradient", lambda d_states, *_: d_states[:, :, 0].clone()),
    # one position less
    ("decay_powers", lambda decay, distance: POWERS(decay, (distance - 1).clamp(min=0))),
    # the initial state is dropped
    ("_with_initial", lambda states, *_: states[:, :, :-1]),
    # the gradient of the final state is dropped
    ("linear_attention_input_gradients", lambda *given: INPUT_GRADIENTS(*given[:-2], None, given[-1])),
]


@pytest.mark.parametrize(("name", "fault"), FAULTS, ids=[name for name, _ in FAULTS])
def test_planted_faults_are_seen(name: str, fault: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given, decay = inputs(24), torch.tensor([0.01, 0.1, 0.2], dtype=torch.float64)
    expected = results(recurrence, given, decay)
    monkeypatch.setattr(module, name, fault)
    assert worst(expected, results(chunked(7), given, decay)) > 1e-3


# -- numerics ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("strength", mostly_slow((0.0, 1e-4, 0.02, 20.0, 1e4), 1e-4, 20.0))
def test_long_sequences_stay_finite(strength: float) -> None:
    length = 100_000
    given = {name: x[:1, :1] for name, x in inputs(length, torch.float32, d=2, a=3).items()}
    got = results(chunked(BLOCK), given, torch.tensor([strength]))
    assert all(x.isfinite().all() for x in got.values())
    if strength > 1:  # e^-20 is below float32's rounding: only the last position is left
        last = given["k"].mT[..., -1:] @ given["v"][:, :, -1:]
        assert worst({"state": last}, {"state": got["final"]}) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("block", [16, BLOCK])
def test_lower_precision_is_no_worse_than_the_quadratic_form(dtype: torch.dtype, block: int) -> None:
    given, decay = inputs(300, dtype, d=32, a=32), torch.tensor([0.0, 0.01, 2.0])
    del given["initial"]

    def attend(attention: Callable[..., Tensor], given: dict[str, Tensor]) -> dict[str, Tensor]:
        everything = results(lambda q, k, v, s, _: (attention(q, k, v, s), q[0, 0, 0]), given, decay)
        return {name: x for name, x in everything.items() if name != "final"}

    exact = attend(quadratic_linear_attention, {name: x.double() for name, x in given.items()})
    plain = relative_errors(exact, attend(quadratic_linear_attention, given))
    ours = relative_errors(exact, attend(lambda *x: linear_attention(*x, block=block), given))
    for name, error in ours.items():
        assert error < 3 * plain[name], name


def test_results_are_of_the_inputs_precision_and_states_of_float32() -> None:
    got = results(chunked(8), inputs(20, torch.bfloat16), rates("mixed"))
    half = {name for name, x in got.items() if x.dtype is torch.bfloat16}
    assert half == {"o", "gradient of q", "gradient of k", "gradient of v"}
    assert got["final"].dtype is got["gradient of initial"].dtype is torch.float32


# -- operators -----------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("length", "dtype"), [slow(1, torch.float64), (20, torch.bfloat16)])
def test_fakes_are_like_the_operators(length: int, dtype: torch.dtype) -> None:
    q, k, v, initial = inputs(length, dtype).values()
    d_o, decay = made(B, Z, length, A, seed=5, dtype=dtype), torch.tensor([0.0, 0.1, 20.0])
    states = module.linear_attention_states(k, v, decay, 8)
    d_states = module.linear_attention_state_gradients(q, d_o, decay, 8)
    gradient_inputs = (q, k, v, d_o, decay, states, initial, d_states, initial, 8)
    for operator, arguments in {
        module.OPS.linear_attention_states: (k, v, decay, 8),
        module.OPS.linear_attention_output: (q, k, v, decay, states, initial, 8),
        module.OPS.linear_attention_state_gradients: (q, d_o, decay, 8),
        module.OPS.linear_attention_input_gradients: gradient_inputs,
    }.items():
        for absent in (False, True):
            given = [None if absent and (x is initial or x is decay) else x for x in arguments]
            torch.library.opcheck(operator.default, given)


def flops(length: int, block: int) -> dict[str, int]:
    given = [x.requires_grad_() for x in inputs(length).values()]
    with FlopCounterMode(display=False) as counter:
        o, final = chunked_linear_attention(*given[:3], rates("mixed"), given[3], block=block)
        (o.sum() + final.sum()).backward()
    counted = counter.get_flop_counts()["Global"]
    return {str(operator).partition("linear_attention_")[2]: n for operator, n in counted.items()}


def test_flops_counted_by_hand() -> None:
    # blocks of 8, 8 and 4 positions: 64 + 64 + 16 pairs of positions
    pairs, each = 64 + 64 + 16, 2 * B * Z
    assert flops(20, 8) == {
        "states": each * 20 * D * A,
        "output": each * (pairs * D + pairs * A + 20 * D * A),
        "state_gradients": each * 20 * D * A,
        "input_gradients": each * (pairs * (D + A) + pairs * (D + D + A) + 3 * 20 * D * A),
    }
    # tiles above the diagonal are not counted: three rows of tiles, the last of 10 positions
    pairs = TILE * TILE + TILE * 2 * TILE + 10 * (2 * TILE + 10)
    assert flops(2 * TILE + 10, BLOCK)["output"] == each * (pairs * (D + A) + (2 * TILE + 10) * D * A)


def test_kept_for_backward() -> None:
    """q, k, v, the initial state, the rates, and a state at each boundary; nothing else."""
    given, decay = inputs(20, torch.bfloat16), torch.zeros(Z)
    parts = [given[n].requires_grad_() for n in "qkv"]
    kept = bytes_kept(lambda: chunked_linear_attention(*parts, decay, given["initial"], block=8))
    assert kept == B * Z * (2 * 20 * (D + D + A) + 4 * D * A + 4 * (3 + 1) * D * A) + 4 * Z
    # the final state must not be a view that keeps all states alive
    _, final = chunked_linear_attention(given["q"], given["k"], given["v"], None)
    assert final.untyped_storage().nbytes() == final.nbytes
