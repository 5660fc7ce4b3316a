"""`spbench verify step.py:train`: a training step of the user's own on several ranks, against one rank.

The step runs on real ranks in float64, with weights that depend only on their names. Its loss, and the
gradient of every weight when the optimizer gets it, must equal those of one rank. So the global batch must be
the same for every number of ranks. A weight is compared on each rank that has it: a DTensor as a whole, any
other tensor as it is.
"""

import gc
import math
import os
import random
import tempfile
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from spbench.bench import units
from spbench.bench.measure.processes.rank_pool import Ranks
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.processes.torchrun import ranks_for
from spbench.bench.measure.steps.fake_world import rank_of_world
from spbench.bench.measure.steps.step_file import OwnStep, named_lines
from spbench.bench.measure.steps.step_recorder import living
from spbench.bench.measure.trace.torch_internals import TorchDispatchMode, replaced, tree_map_only
from spbench.bench.measure.verify.cases import IDLE_S, failed_row, judged_row
from spbench.bench.measure.verify.explanation import failed_calls, logging_calls
from spbench.bench.measure.verify.judged import (
    FLOAT64_LIMIT,
    Discrepancy,
    Finding,
    Judged,
    discrepancies,
    judged,
)
from spbench.bench.verdicts import VerifyRow
from spbench.impls import Unsupported, default_dtype

#: the numbers of ranks on which a step is verified by default
WORLD_SIZES = (1, 2, 4)
LOSS = "output loss"
#: of how many wrong tensors a rank sends the values, from which their sum and mean over ranks are told
_SENT = 4
_WIDE = dict.fromkeys((torch.float16, torch.bfloat16, torch.float32), torch.float64)
_WIDE[torch.complex64] = torch.complex128
#: the most bytes of a step's weights in float64: a rank holds them several times
_MOST_BYTES = 4 * 2**30


@dataclass(frozen=True)
class StepValues:
    """What a step computes on a rank.

    Attributes:
        loss: the number that the step returns; None if it returns none.
        gradients: by the name of the weight, whole; after a comparison some of the wrong ones.
        draws: whether the step draws random numbers, for example for dropout.
        compared: each gradient's discrepancy from that of one rank, by the name of the weight.
    """

    loss: float | None
    gradients: Mapping[str, Tensor]
    draws: bool
    compared: Mapping[str, Discrepancy] = field(default_factory=dict)


class InFloat64(TorchDispatchMode):
    """While entered, tensors are made in float64 where the code says float32, bfloat16 or float16."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.lift_fresh.default:  # of torch.tensor
            return func(args[0].to(_WIDE.get(args[0].dtype, args[0].dtype)))
        if func is torch.ops.aten.view.dtype:  # the same bytes
            return func(*args)
        widened = partial(tree_map_only, torch.dtype, lambda each: _WIDE.get(each, each))
        return func(*widened(args), **widened(kwargs or {}))


def verify_step(
    name: str,
    world_sizes: Sequence[int] = (),
    *,
    expect: Callable[[int], None] = lambda cases: None,
    pool: Ranks | None = None,
) -> Iterator[VerifyRow]:
    """Verify the step ``name`` ("step.py:train") on each number of ranks; yields a row as soon as it is done,
    or a single row if the step fails on one rank. On one rank it runs twice, and both runs must be equal.

    Args:
        world_sizes: numbers of ranks; empty: :data:`WORLD_SIZES`.
        expect: called with the number of rows before the first.
        pool: the ranks to use; None: a pool that is closed when the iterator ends.

    Raises:
        UserError: the file cannot be read, or the name is not of the form FILE.py:FUNCTION.
    """
    title, sizes = OwnStep.of(name).name, world_sizes or WORLD_SIZES
    row = VerifyRow(strategy=title, model="", part="step", size=1, dtype="fp64", status="green")
    with ranks_for(max(sizes)) if pool is None else nullcontext(pool) as ranks:
        run = partial(_run, ranks, os.path.abspath(name))
        (one, *_), alone = run(row, None)
        expect(len(sizes) if one else 1)
        rows = (run(replace(row, size=n, mesh=f"world{n}"), one)[1] for n in sizes)
        yield from rows if one else [alone]


def _run(
    ranks: Ranks, path: str, row: VerifyRow, one: StepValues | None
) -> tuple[Sequence[StepValues | None], VerifyRow]:
    """(the values of each rank, the judged row) of a run on ``row.size`` ranks; [None] if the run failed."""
    with tempfile.TemporaryDirectory(prefix="spbench-calls-") as calls:
        try:
            by_rank = ranks.run({"dp": row.size}, compared, path, one, calls, idle_s=IDLE_S)
        except RankError as failed:
            red = failed_row(row, failed)
            return [None], replace(red, explanation=failed_calls(Path(calls)) if red.error else "")
    return by_rank, row if one is None else _judged(row, one, by_rank)


def compared(mesh: DeviceMesh, path: str, one: StepValues | None, calls: str) -> StepValues:
    """Run the step on this rank, and compare its gradients with those of ``one`` rank, if there is one.

    Args:
        calls: the folder for :func:`logging_calls`.

    Raises:
        Unsupported: the step cannot be verified; UserError: it raises. Both name the user's line.
    """
    world = mesh.size()
    with (
        logging_calls(calls),
        rank_of_world(dist.get_rank(), world, world),
        default_dtype(torch.float64),
        replaced(torch, {"set_default_dtype": lambda _: None}),  # the user's code keeps float64
        InFloat64(),
    ):
        values = step_values(path)
    if one is None:
        return values
    reference = {name: x for name, x in one.gradients.items() if name in values.gradients}
    each = discrepancies(reference, values.gradients)
    for name, x in reference.items():
        if x.shape != values.gradients[name].shape:
            raise Unsupported(f"weight {name} {each[name].problem} as on one rank", "make it a DTensor")
    wrong = [name for name, discrepancy in each.items() if discrepancy.error > FLOAT64_LIMIT]
    sent = {name: values.gradients[name] for name in wrong[:_SENT]}
    return replace(values, gradients=sent, compared=each)


def step_values(path: str) -> StepValues:
    """The loss and the gradients of the first step on this rank, with weights set by their names.

    Raises:
        UserError: the step has no weights, too many, or weights in another dtype; or it raises.
    """
    own = OwnStep.of(path)
    gc.collect()
    earlier = living(nn.Module)
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with named_lines(own.name):
        step = own.built(own.load())
        weights = weights_by_name([each for each in living(nn.Module) if each not in earlier])
        if not weights:
            raise Unsupported(f"{own.name} builds no torch.nn.Module with weights", "put its weights in one")
        _set_weights(weights)
        caught: dict[int, Tensor] = {}
        hook = register_optimizer_step_pre_hook(partial(_catch, caught))
        state = torch.get_rng_state()
        try:
            loss = step()
        finally:
            hook.remove()
        draws = not torch.equal(state, torch.get_rng_state())
    gradients = {name: caught.get(id(weight), weight.grad) for name, weight in weights.items()}
    there = {name: _whole(x.detach()) for name, x in gradients.items() if x is not None}
    is_number = isinstance(loss, int | float) or (isinstance(loss, Tensor) and loss.numel() == 1)
    return StepValues(float(_whole(torch.as_tensor(loss).detach())) if is_number else None, there, draws)


def weights_by_name(modules: Sequence[nn.Module]) -> dict[str, Tensor]:
    """The weights of modules, in the order of their names; a name that two modules have begins with the
    module's number."""
    inner = {id(child) for each in modules for child in each.children()}
    tops = [dict(each.named_parameters()) for each in modules if id(each) not in inner]
    named = Counter(name for top in tops for name in top)
    numbered = {
        f"{n}." * (named[name] > 1) + name: x for n, top in enumerate(tops) for name, x in top.items()
    }
    return {name: numbered[name] for name in sorted(numbered)}


def _set_weights(weights: Mapping[str, Tensor]) -> None:
    """Give each weight values that depend only on its name and its whole shape, whatever its sharding."""
    if sum(8 * weight.numel() for weight in weights.values()) > _MOST_BYTES:
        most = units.shown_bytes(_MOST_BYTES)
        raise Unsupported(f"the weights have more than {most} in float64", "verify a smaller model")
    for name, weight in weights.items():
        if weight.dtype is not torch.float64:
            raise Unsupported(f"weight {name} is {weight.dtype}", "make it by functions of torch")
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        values = torch.randn(weight.shape, dtype=torch.float64, generator=generator)
        is_scale = weight.ndim == 1 and name.endswith("weight")
        values = is_scale + values * (weight.shape[-1] ** -0.5 if weight.ndim > 1 else 0.2)
        with torch.no_grad():
            if isinstance(weight, DTensor):
                mine = distribute_tensor(values, weight.device_mesh, weight.placements, src_data_rank=None)
                values, weight = mine.to_local(), weight.to_local()
            weight.copy_(values)


def _catch(caught: dict[int, Tensor], optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Keep the gradients that the optimizer's first step gets."""
    for weight in (each for group in optimizer.param_groups for each in group["params"]):
        if weight.grad is not None:
            caught.setdefault(id(weight), weight.grad.detach().clone())


def _whole(x: Tensor) -> Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def _judged(row: VerifyRow, one: StepValues, by_rank: Sequence[StepValues]) -> VerifyRow:
    """The row with the verdict on the values of ranks 0, 1, ..."""
    of_ranks = [dict(each.compared) for each in by_rank]
    lost = set(one.gradients).difference(*of_ranks)
    of_ranks[0] |= dict.fromkeys(lost, Discrepancy.without_number("is on no rank"))
    findings = [[Finding(f"gradient of {name}", x, 0.0) for name, x in each.items()] for each in of_ranks]
    losses = [each.loss for each in by_rank if each.loss is not None]
    if one.loss is not None and losses:
        # each rank has the loss, a mean over its own tokens, or a share of the sum
        either = ({LOSS: torch.tensor(sum(losses) / n)} for n in (len(losses), 1))
        nearest = min((discrepancies({LOSS: torch.tensor(one.loss)}, x)[LOSS] for x in either), key=_error)
        nearest = replace(nearest, residual=math.inf)  # any number is some multiple of another
        findings[0].append(Finding(LOSS, nearest, 0.0))
    row = judged_row(row, None, findings)
    wrong = [each for each in judged(torch.float64, findings) if each.excess > 1]
    why = "\n".join(_causes(wrong, one, [each.gradients for each in by_rank])) if wrong else ""
    return replace(row, explanation=why)


def _causes(wrong: Sequence[Judged], one: StepValues, sent: Sequence[Mapping[str, Tensor]]) -> Iterator[str]:
    """Lines on what the wrong gradients have in common: a factor, or what they are over ranks."""
    ranks, gradients = len(sent), [each for each in wrong if each.finding.tensor != LOSS]
    factors = {each.factor and round(each.factor, 6) for each in gradients}
    kinds = {
        float(ranks): "a sum where one rank has a mean",
        round(1 / ranks, 6): "divided by the ranks once more",
    }
    if len(factors) == 1 and (factor := factors.pop()) in kinds:
        whole = len({each.finding.tensor for each in gradients}) == len(one.gradients)
        which = "every gradient" if whole else "each wrong gradient"
        yield f"{which} is {factor:.4g} times the one-rank gradient: {kinds[factor]}"
    for name, values in ((name, [each[name] for each in sent if name in each]) for name in sent[0]):
        if len(values) == ranks and not all(torch.equal(values[0], each) for each in values):
            total, said = torch.stack(values).sum(0), f"the gradient of {name} differs between ranks"
            for kind, x in (("mean", total / ranks), ("sum", total)):
                if _error(discrepancies({name: one.gradients[name]}, {name: x})[name]) <= FLOAT64_LIMIT:
                    said += f", and their {kind} is the one-rank gradient, so an all-reduce is missing"
            yield said
            break
    if one.draws:
        yield "the step draws random numbers (dropout?), which must be the same on any number of ranks"


def _error(discrepancy: Discrepancy) -> float:
    return discrepancy.error
