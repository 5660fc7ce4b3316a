"""As the strategy gathered_attention, over an axis of its own: a mesh may have ranks along gp."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

import spbench

POSITIONS = 2  # of [B, Z, L, A]


class Gathered(torch.autograd.Function):
    """[B, G, L/N, A] of this rank -> [B, G, L, A]; the gradient is summed over the ranks."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(group.size())]
        dist.all_gather(parts, x.contiguous(), group)
        return torch.cat(parts, POSITIONS)

    @staticmethod
    def backward(ctx, gradient):
        parts = [part.contiguous() for part in gradient.chunk(ctx.group.size(), POSITIONS)]
        summed = torch.empty_like(parts[0])
        dist.reduce_scatter(summed, parts, group=ctx.group)
        return summed, None


class GatheredOverGp(spbench.SequenceChunks):
    """Causal attention of this rank's queries to keys and values that are gathered along gp."""

    name = "gathered_over_gp"
    summary = "sequence chunks along an axis of its own; keys and values are all-gathered"
    source = "a test plug-in"
    axes = ("gp",)
    meets = frozenset({"causal_attention"})

    def communication(self, sites, element_bytes):
        for site in sites:
            if site.kind in self.meets:
                d = site.dims
                payload = d["B"] * d.get("G", d["Z"]) * d["L"] * d["A"] * element_bytes
                for phase in ["forward", *["backward"] * site.recomputed]:
                    yield spbench.Traffic(phase, "keys and values", "all_gather", 2 * site.count, payload)
                yield spbench.Traffic(
                    "backward", "their gradients", "reduce_scatter", 2 * site.count, payload
                )

    def causal_attention(self, q, k: Tensor, v: Tensor):
        """q [B, Z, L/N, A], k, v [B, G, L/N, A] -> [B, Z, L/N, A]."""
        if self.size > 1:
            k, v = (Gathered.apply(x, self.group) for x in (k, v))
        keys = torch.arange(k.shape[POSITIONS], device=q.device)
        earlier = self.shard(keys, 0).unsqueeze(1) >= keys
        return F.scaled_dot_product_attention(q, k, v, attn_mask=earlier, enable_gqa=True)
