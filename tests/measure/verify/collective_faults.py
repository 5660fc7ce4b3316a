"""Faults in which ranks call different collectives."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import Tensor

from spbench.impls.collectives import all_reduce
from spbench.impls.strategies.ulysses import Ulysses


class GathersWhereOthersReduce(Ulysses):
    """Rank 0 gathers where the others reduce."""

    name = "gathers_where_others_reduce"

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        o = super().causal_attention(q, k, v, *args)
        group = self.place.group(*self.axes)
        total = o.detach().sum((1, 2, 3)).contiguous()
        if dist.get_rank(group) == 0:
            parts = [total.new_empty(total.shape) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, total, group)
        else:
            all_reduce(total, group)
        return o


class SkipsACollective(GathersWhereOthersReduce):
    """Rank 0 leaves out a reduction that the others wait in."""

    name = "skips_a_collective"

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor, *args: Any) -> Tensor:
        o = Ulysses.causal_attention(self, q, k, v, *args)
        group = self.place.group(*self.axes)
        if dist.get_rank(group):
            all_reduce(o.detach().sum().view(1), group)
        return o
