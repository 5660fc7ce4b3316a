"""Parameters laid out one after another in one flat tensor that is cut into equal shards."""

import heapq
import math
from collections import Counter
from collections.abc import Hashable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from spbench.impls.backends.backend import HeldPart
from spbench.impls.backends.optimizer import Precision
from spbench.impls.kernels.host_copies import host_empty_like, to_host_
from spbench.impls.rings import wait_for_device


def padded(elements: int, size: int) -> int:
    """The length to which a flat tensor is padded, so that ``size`` ranks can share it evenly."""
    return math.ceil(elements / size) * size


def covered(starts: Sequence[int], ends: Sequence[int], start: int, end: int) -> tuple[Hashable, ...]:
    """For each piece of a flat tensor that overlaps the part from ``start`` to ``end``: its number, and
    whether the part has the piece's first and last element."""
    pieces = enumerate(zip(starts, ends, strict=True))
    return tuple((i, a >= start, b <= end) for i, (a, b) in pieces if max(a, start) < min(b, end))


def owners_of(sizes: Sequence[int], ranks: int) -> list[int]:
    """The rank that updates each parameter, if ranks update whole parameters: the largest first, each to the
    first rank with the fewest elements, as in InternEvo (internlm/solver/optimizer/hybrid_zero_optim.py,
    _partition_param_list)."""
    owners, least = [0] * len(sizes), [(0, rank) for rank in range(ranks)]
    for number in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        elements, owners[number] = least[0]
        heapq.heapreplace(least, (elements + sizes[number], owners[number]))
    return owners


def whole_lengths(sizes: Sequence[int], ranks: int) -> Counter[int]:
    """The elements of each rank's parameters, if ranks update whole parameters (:func:`owners_of`)."""
    lengths = Counter[int]()
    for owner, size in zip(owners_of(sizes, ranks), sizes, strict=True):
        lengths[owner] += size
    return lengths


class FlatShard:
    """A rank's shard of some parameters, flat and in the optimizer's precision.

    Args:
        parameters: the parameters by name.
        group: the ranks that share the parameters; None: this rank has all of them.
        on_host: hold the shard in the host's pinned memory.
        align: a number of elements to whose multiple each shard is padded.
        whole: each shard has whole parameters (:func:`owners_of`), which lie in the order of their ranks;
            else shards have equal lengths.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        group: dist.ProcessGroup | None,
        precision: Precision,
        *,
        on_host: bool = False,
        align: int = 1,
        whole: bool = False,
    ):
        self.group = group
        self.size, self.rank = (1, 0) if group is None else (group.size(), group.rank())
        if whole:
            sizes = [p.numel() for p in parameters.values()]
            owners, lengths = owners_of(sizes, self.size), whole_lengths(sizes, self.size)
            by_owner = sorted(zip(owners, parameters.items(), strict=True), key=lambda each: each[0])
            parameters = dict(named for _, named in by_owner)
        self.names, tensors = list(parameters), list(parameters.values())
        self.shapes, self.sizes = [p.shape for p in tensors], [p.numel() for p in tensors]
        self.padding = 0 if whole else padded(sum(self.sizes), align * self.size) - sum(self.sizes)
        flat = self.flattened(tensors)
        #: elements of each rank's shard
        self.lengths = [len(flat) // self.size] * self.size
        if whole:
            self.lengths = [lengths[rank] for rank in range(self.size)]
        self.start = sum(self.lengths[: self.rank])
        held = torch.float32 if precision.master else precision.parameters
        self.weights = self.shards(flat)[self.rank].to(held, copy=True)
        if on_host:
            there = host_empty_like(self.weights)
            to_host_(there, self.weights)
            wait_for_device(self.weights)
            self.weights = there
        #: the gradient of this shard; None from a step's beginning until its backward
        self.gradient: Tensor | None = None

    def shards(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The shards of all ranks, as views of the whole flat tensor."""
        return flat.split(self.lengths)

    def flattened(self, parameters: Iterable[nn.Parameter]) -> Tensor:
        """A copy of whole parameters as one flat, padded tensor."""
        pieces = [p.detach().flatten() for p in parameters]
        return torch.cat([*pieces, pieces[0].new_zeros(self.padding)])

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Views of the whole flat tensor in the shapes of the parameters, by name."""
        pieces = flat.split([*self.sizes, self.padding])
        return {n: x.view(shape) for n, x, shape in zip(self.names, pieces, self.shapes, strict=False)}

    def parts(self, shard: Tensor) -> dict[str, HeldPart]:
        """The part of each parameter that lies in this rank's shard, by name."""
        parts, first = {}, 0
        for name, size in zip(self.names, self.sizes, strict=True):
            start, end = max(first, self.start), min(first + size, self.start + len(shard))
            if start < end:
                parts[name] = HeldPart(shard[start - self.start : end - self.start], start - first)
            first += size
        return parts
