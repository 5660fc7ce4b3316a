"""Sequence chunks of which every rank gathers the keys and values of all, by DTensors."""

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Shard

import spbench

POSITIONS = 2  # of [B, Z, L, A]


class GatheredAttention(spbench.SequenceChunks):
    """Attention of this rank's queries to keys and values that are gathered from all ranks."""

    name = "gathered_attention"
    summary = "sequence chunks; keys and values are all-gathered, as DTensors"
    source = "a test plug-in"
    meets = frozenset({"attention", "causal_attention"})

    def communication(self, sites, element_bytes):
        """Keys and values are gathered forward, and again if recomputed; their gradients are summed."""
        for site in sites:
            if site.kind in self.meets:
                d = site.dims
                payload = d["B"] * d.get("G", d["Z"]) * d["L"] * d["A"] * element_bytes
                for phase in ["forward", *["backward"] * site.recomputed]:
                    yield spbench.Traffic(phase, "keys and values", "all_gather", 2 * site.count, payload)
                yield spbench.Traffic(
                    "backward", "their gradients", "reduce_scatter", 2 * site.count, payload
                )

    def whole(self, x: Tensor) -> Tensor:
        """[B, G, L/N, A] of this rank -> [B, G, L, A]; its gradient is summed over the ranks."""
        if self.size == 1:
            return x
        mesh = self.place.submesh(*self.axes)
        chunks = DTensor.from_local(x, mesh, [Shard(POSITIONS)], run_check=False)
        return chunks.full_tensor(grad_placements=[Partial()])

    def attention(self, q, k, v, mask, *, dropout, softmax):
        """q, k, v [B, Z, L/N, A] -> [B, Z, L/N, A]."""
        return self.local_attention(q, self.whole(k), self.whole(v), mask, dropout=dropout, softmax=softmax)

    def causal_attention(self, q, k, v):
        """q [B, Z, L/N, A], k, v [B, G, L/N, A] -> [B, Z, L/N, A]."""
        keys = torch.arange(q.shape[POSITIONS] * self.size, device=q.device)
        earlier = self.shard(keys, 0).unsqueeze(1) >= keys
        k, v = self.whole(k), self.whole(v)
        return F.scaled_dot_product_attention(q, k, v, attn_mask=earlier, enable_gqa=True)
