"""DeepSpeed-Ulysses (https://github.com/deepspeedai/DeepSpeed): its attention alone, without its engine."""

import os

import torch.nn.functional as F
from torch import Tensor

from spbench.impls.peers.peer import UlyssesPeer, imported


class DeepSpeedUlysses(UlyssesPeer):
    """DeepSpeed's DistributedAttention around torch's attention."""

    name = "deepspeed_ulysses"
    summary = "Ulysses by the package deepspeed: DistributedAttention alone"
    source = "github.com/deepspeedai/DeepSpeed; arXiv 2309.14509"
    requires = ("deepspeed",)

    def load(self) -> None:
        assert self.place.mesh is not None
        backend = None
        if self.place.mesh.device_type != "cuda":
            backend = "gloo"
            os.environ.setdefault("DS_ACCELERATOR", "cpu")  # else DeepSpeed warns that no other is present
            # else DeepSpeed would compile for minutes an all-reduce by shared memory that nothing uses
            imported("deepspeed.ops:__compatible_ops__")["deepspeed_shm_comm"] = False
        imported("deepspeed.comm:init_distributed")(backend, auto_mpi_discovery=False, verbose=False)
        layer = imported("deepspeed.sequence.layer:DistributedAttention")
        self._layer = layer(_attend, self.group, scatter_idx=2, gather_idx=1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
        o: Tensor = self._layer(q, k, v, 0, causal=causal)  # the batch is dim 0
        return o


def _attend(q: Tensor, k: Tensor, v: Tensor, *, causal: bool) -> Tensor:
    """torch's attention of whole sequences: q [B, L, Z, A], k, v [B, L, G, A] -> [B, L, Z, A]."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    o = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=k.shape[1] < q.shape[1])
    return o.transpose(1, 2)
