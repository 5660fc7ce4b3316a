"""What is checked of a verified step beside values: that all positions and all elements of weights are
compared, as each lies on equally many ranks, and what a rank sends beside the closed forms, exactly."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.bench.measure.engines.plan import Plan, RankClass
from spbench.bench.measure.processes.staged_group import STAGED
from spbench.bench.measure.trace.recorder import Recorder
from spbench.bench.measure.verify.discrepancy import Discrepancy
from spbench.impls.backends.backend import PlannedStep, planned_sums
from spbench.impls.collectives import all_reduce
from spbench.impls.composition import ONE_STAGE, composed_traffic
from spbench.impls.models.model import Model
from spbench.impls.strategies.base import Strategy

if TYPE_CHECKING:
    from spbench.bench.measure.verify.verified_run import Case, VerifiedRun


def check_positions(whole: VerifiedRun, checked: VerifiedRun) -> Iterator[tuple[str, Discrepancy]]:
    """Every position must lie on equally many ranks; else the shares prove nothing about the whole.

    A strategy that gave all ranks the same chunk would be compared with that chunk alone.
    """
    strategy, part = checked.strategy, checked.part
    tensors = [(x, part.sequence_dims[name]) for name, x in whole.inputs.items()]
    tensors += [(x, part.output_dims[name]) for name, x in whole.outputs.items()]
    several = [(x, dim if isinstance(dim, tuple) else (dim,)) for x, dim in tensors if dim is not None]
    grids = {tuple(x.shape[d] for d in dims) for x, dims in several}
    for sizes in sorted(grids):
        places = torch.arange(math.prod(sizes), device=checked.device).view(sizes)
        held = torch.zeros(places.numel(), dtype=torch.int64, device=checked.device)
        held[strategy.shard(places, tuple(range(len(sizes))) if len(sizes) > 1 else 0).flatten()] += 1
        all_reduce(held, _all_ranks(strategy))
        yield f"positions of {' x '.join(map(str, sizes))}", _evenness([held])


def _all_ranks(strategy: Strategy) -> dist.ProcessGroup | None:
    """The ranks over which a strategy and those within it spread one sample; None: one alone."""
    return strategy.place.group(*strategy.nested_axes)


def check_elements(checked: VerifiedRun) -> tuple[str, Discrepancy]:
    """Every element of a parameter must lie on equally many ranks, for the same reason."""
    kept = checked.backend.gradient_places()
    counts = []
    for name, shape in checked.shapes.items():
        count = torch.zeros(shape, dtype=torch.int64, device=checked.device)
        if name in kept:
            kept[name].of(count).add_(1)
        counts.append(count.flatten())
    if not counts:
        return "elements of the weights", Discrepancy.none()
    held = all_reduce(torch.cat(counts), _all_ranks(checked.strategy)).split([len(count) for count in counts])
    return "elements of the weights", _evenness(held)


def _evenness(held: Iterable[Tensor]) -> Discrepancy:
    """None where all of each tensor lies on equally many ranks, else one without a number.

    Args:
        held: on how many ranks each place of the tensors is.
    """
    even = all(bool(count.min() == count.max() > 0) for count in held)
    return Discrepancy.none() if even else Discrepancy.without_number("are on more ranks than others of them")


def check_bytes(
    recorder: Recorder, case: Case, model: Model, checked: VerifiedRun
) -> Iterator[tuple[str, Discrepancy]]:
    """Where the step was seen to send other bytes than the closed forms of its strategy and backend say, by
    phase and collective; and where a rank holds other parameters than the model's sites say. Of the whole
    model alone, as closed forms are of that; the optimizer's step is run for its messages. Not on the staged
    backend: torch calls a group that is written in Python without the operators that meters watch.

    Args:
        recorder: has seen the step.
    """
    if checked.part.build != model.build or (dist.is_initialized() and dist.get_backend() == STAGED):
        return
    backend, batch, seq_len = checked.backend, case.batch, case.seq_len
    with recorder, recorder.phase("optimizer"):
        backend.step()
    strategy, around, precision = backend.strategy, backend.around, backend.precision
    sizes = strategy.place.sizes
    sites = list(model.sites(batch, seq_len, strategy.vocabulary_parts))
    sums = planned_sums(sites, strategy, 1)
    width = precision.parameters.itemsize
    gradient_bytes = backend.gradient_dtype(precision, backend.options).itemsize

    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return model.build(strategy, seq_len)

    step = PlannedStep(sums, 1, precision, strategy, around, build, backend.options)
    entries = [
        *composed_traffic(sites, strategy, ONE_STAGE, 1, width, gradient_bytes),
        *backend.traffic(step),
    ]
    plan = Plan([RankClass(ONE_STAGE, {}, (0,))], [entries], sizes)
    for each in plan.difference(recorder.communication, 0):
        sent, formula = each["metered_bytes"], each["formula_bytes"]
        yield (
            f"{each['phase']} {each['collective']} over {each['axis']}",
            Discrepancy.without_number(f"sends {sent} bytes, {formula} by the closed form"),
        )
    # a backend may have taken the parameters over, in parts or padded
    held, counted = sum(p.numel() for p in build().parameters()), sum(each.elements for each in sums)
    if held != counted:
        yield "parameters", Discrepancy.without_number(f"are {held} elements, {counted} by the model's sites")
