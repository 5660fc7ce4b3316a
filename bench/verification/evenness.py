"""Whether all positions and all elements of weights are compared: each lies on equally many ranks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from spbench.bench.verification.discrepancy import Discrepancy
from spbench.impls.collectives import all_reduce
from spbench.impls.strategies.base import Strategy

if TYPE_CHECKING:
    from spbench.bench.verification.oracle import VerifiedRun


def check_positions(whole: VerifiedRun, checked: VerifiedRun) -> Iterator[tuple[str, Discrepancy]]:
    """Every position must lie on equally many ranks; else the shares prove nothing about the whole.

    A strategy that gave all ranks the same chunk would be compared with that chunk alone.
    """
    strategy, part = checked.strategy, checked.part
    tensors = [(n, x, part.sequence_dims[n]) for n, x in whole.inputs.items()]
    tensors += [(n, x, part.output_dims[n]) for n, x in whole.outputs.items()]
    grids = {tuple(x.shape[d] for d in _several(dim)) for _, x, dim in tensors if dim is not None}
    for sizes in sorted(grids):
        places = torch.arange(math.prod(sizes), device=checked.device).view(sizes)
        held = torch.zeros(places.numel(), dtype=torch.int64, device=checked.device)
        held[strategy.shard(places, tuple(range(len(sizes))) if len(sizes) > 1 else 0).flatten()] += 1
        all_reduce(held, _all_ranks(strategy))
        even = bool(held.min() == held.max() > 0)
        yield (f"positions of {' x '.join(map(str, sizes))}", _evenness(even))


def _all_ranks(strategy: Strategy) -> dist.ProcessGroup | None:
    """The ranks over which a strategy and those within it spread one sample; None: one alone."""
    return strategy.place.group(*strategy.nested_axes)


def _several(dim: int | tuple[int, ...]) -> tuple[int, ...]:
    return dim if isinstance(dim, tuple) else (dim,)


def check_elements(checked: VerifiedRun) -> tuple[str, Discrepancy]:
    """Every element of a parameter must lie on equally many ranks, for the same reason."""
    kept = checked.backend.weight_parts()
    counts = []
    for name, shape in checked.shapes.items():
        count = torch.zeros(shape, dtype=torch.int64, device=checked.device)
        if name in kept:
            kept[name].of(count).add_(1)
        counts.append(count.flatten())
    held = all_reduce(torch.cat(counts), _all_ranks(checked.strategy)).split([len(count) for count in counts])
    even = all(bool(count.min() == count.max() > 0) for count in held)
    return ("elements of the weights", _evenness(even))


def _evenness(even: bool) -> Discrepancy:
    """None where everything lies on equally many ranks, else one without a number."""
    return Discrepancy.none() if even else Discrepancy.without_number("are on more ranks than others of them")
