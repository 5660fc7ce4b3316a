"""Recomputation in backward: gradients, bytes sent, what runs again and what is held. It is of all but some
operators, ends at the last tensor that backward needs, or is as torch's reentrant checkpoint has it."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.checkpoint import CheckpointPolicy, SelectiveCheckpointContext, checkpoint

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.collectives import reduce_from_group
from spbench.impls.kernels.dropout import DropoutRandom
from spbench.impls.models.blocks import recomputation
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import default_dtype, initialize

GROUPED = "causal-transformer-tiny-gqa"
SEPARATE = {"separate_projections": True}
OPERATORS = SEPARATE | {"recompute": "operators"}
FULL = {"recompute": "full", "recompute_layers": 1}
EARLY = {"recompute": "full", "recompute_early_stop": True}


def gradients(**options: Any) -> dict[str, torch.Tensor]:
    """Gradients of gpt3-tiny with dropout, by parameter."""
    model = model_preset("gpt3-tiny", {"dropout": 0.2, "attention_dropout": 0.3, **options})
    with default_dtype(torch.float64):
        module = model.build(Strategy(seed=5), 16)
        initialize(module, 0, deviation=0.3)
        batch = model.inputs(2, 16, torch.Generator().manual_seed(1))
        module(batch)["loss"].backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


#: options of a model, and recomputation
CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    *product(
        [{"library": "megatron-local", "attention": attention} for attention in ("flash", "unfused")],
        [{"recompute": "selective"}, {"recompute": "full"}, {"recompute": "full", "recompute_layers": 2}],
    ),
    *product([{"dropout": 0.0}, {"dropout": 0.2}], [EARLY, FULL | {"recompute_reentrant": True}]),
    *product([SEPARATE, SEPARATE | {"qkv_bias": True, "biases": False, "mlp": "swiglu"}], [OPERATORS]),
]


@pytest.mark.parametrize(("options", "recompute"), CASES)
def test_gradients_are_those_without_recomputation(
    options: dict[str, Any], recompute: dict[str, Any]
) -> None:
    plain, again = gradients(**options), gradients(**options | recompute)
    assert plain.keys() == again.keys()
    for name, gradient in plain.items():
        torch.testing.assert_close(again[name], gradient, rtol=1e-11, atol=1e-14)


def test_dropout_changes_gradients() -> None:
    """Else the test above could not fail."""
    dropped, whole = gradients(), gradients(dropout=0.0, attention_dropout=0.0)
    assert any(not torch.allclose(dropped[name], gradient) for name, gradient in whole.items())


def trace(**changes: Any) -> Trace:
    """A step of two layers."""
    asked: dict[str, Any] = {
        "model": "causal-transformer-tiny",
        "strategy": "single",
        "batch": 1,
        "seq_len": 16,
        "model_options": {"layers": 2},
    }
    return tracing.trace(Cell.model_validate(asked | changes), events=True)


def kernels(of: Trace) -> Counter[str]:
    program = of.program
    return Counter(program.names[program.name[i]] for i in range(len(program)) if program.kind[i] == 0)


# -- what runs again -----------------------------------------------------------------------------------------


def test_each_second_product_and_what_is_cheap_run_again() -> None:
    """3 of the 7 products of each of two layers."""
    plain = kernels(trace(model=GROUPED, model_options=SEPARATE))
    again = kernels(trace(model=GROUPED, model_options=OPERATORS)) - plain
    assert again["mm"] == 2 * 3
    assert again["flash_attention"] == 0
    assert again["silu"] == 2


@pytest.mark.parametrize(("layers", "every", "recomputed"), [(4, 2, 2), (3, 2, 1), (4, 3, 1)])
def test_one_layer_of_each_interval_runs_again(layers: int, every: int, recomputed: int) -> None:
    full = {"recompute": "full", "recompute_method": "interval", "recompute_layers": every}
    plain = kernels(trace(model_options={"layers": layers}))
    again = kernels(trace(model_options=full | {"layers": layers})) - plain
    assert again == Counter({name: n for name, n in again.items() if n % recomputed == 0})
    assert again["flash_attention"] == recomputed


def test_the_second_run_keeps_the_products_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch 2.12 asks the policy in both runs, later ones in the first; an odd number must not shift it."""
    asked: list[Any] = []
    monkeypatch.setattr(
        recomputation,
        "create_selective_checkpoint_contexts",
        lambda policy: (asked.append(policy), (nullcontext(), nullcontext()))[1],
    )
    first, again = recomputation._keeping()
    (policy,) = asked
    kept = {}
    for context, run in ((first, False), (again, True)):
        with context:
            of_run = SelectiveCheckpointContext(is_recompute=run)
            kept[run] = [policy(of_run, torch.ops.aten.mm.default) for _ in range(7)]
    assert kept[False] == kept[True]
    assert kept[True].count(CheckpointPolicy.MUST_SAVE) == 4


def gradient_of_summed_product(mesh: DeviceMesh, keep: bool) -> list[float]:
    """The gradient of a weight, in a block whose backward needs its first product summed over the ranks."""
    group = mesh.get_group("tp")
    weight = torch.ones(2, 2, dtype=torch.float64).requires_grad_()

    def block(x: torch.Tensor) -> torch.Tensor:
        return reduce_from_group(x @ weight, group) ** 2

    x = torch.full((1, 2), 1.0 + mesh.get_local_rank("tp"), dtype=torch.float64)
    y = recomputed(block, DropoutRandom(0), x, keep=True) if keep else block(x)
    y.sum().backward()
    return weight.grad.flatten().tolist()


def test_a_kept_product_is_summed_over_ranks_once(pool: RankPool) -> None:
    """In place, it would be summed again when the block runs again, which torch does not allow."""
    assert pool.run({"tp": 2}, gradient_of_summed_product, False) == [[12.0] * 4, [24.0] * 4]
    assert pool.run({"tp": 2}, gradient_of_summed_product, True) == [[12.0] * 4, [24.0] * 4]


@pytest.mark.parametrize(("layers_a_run", "runs"), [(1, 2), (2, 1)])
def test_the_last_product_of_a_run_and_what_follows_do_not_run_again(layers_a_run: int, runs: int) -> None:
    """The product that closes the MLP, and the sum with the hidden state."""
    full = {"layers": 2, "recompute": "full", "recompute_layers": layers_a_run}
    whole = kernels(trace(model_options=full))
    stopped = kernels(trace(model_options=full | {"recompute_early_stop": True}))
    assert whole - stopped == Counter({"mm": runs, "add": runs})
    assert not stopped - whole


# -- what is held, as by torch's reentrant checkpoint -------------------------------------------------------


def peak_bytes(**options: Any) -> int:
    """The peak of a step on one device, which is in backward."""
    options = {"layers": 4, "loss_tile": 16, **FULL, **options}
    peak = trace(batch=2, seq_len=128, model_options=options).memory.peak()
    assert peak.phase == "backward"
    return peak.nbytes


def by_torch(run: Callable[..., Any], *inputs: Any, **_: Any) -> Any:
    return checkpoint(run, *inputs, use_reentrant=True, preserve_rng_state=False)


@pytest.mark.parametrize(
    "options",
    [{}, {"mlp_tile": 8, "attention": "flash_attention_2", "kv_heads": 1}],
    ids=["mlp", "attention"],
)
def test_the_peak_is_that_of_the_reentrant_checkpoint(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    without, held = peak_bytes(**options), peak_bytes(**options, recompute_reentrant=True)
    assert held > without
    monkeypatch.setattr(recomputation, "checkpoint", by_torch)
    assert held == peak_bytes(**options)


# -- what is refused -----------------------------------------------------------------------------------------
