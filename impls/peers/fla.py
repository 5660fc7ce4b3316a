"""Context parallelism of flash-linear-attention (https://github.com/fla-org/flash-linear-attention).

fla has context parallelism for delta rules. The rule whose transition is diagonal plus low rank has only the
diagonal if a = b = 0: S_t = diag(exp(g_t)) S_(t-1) + k_t v_t^T. This is linear attention with decay, where g
is minus the decay rate. Each rank computes the state of its chunk and the D x D matrix that carries an
earlier state past the chunk, gathers both from all ranks, and composes those of the chunks before its own.
"""

from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from spbench.impls.kernels.decay import DecayMask
from spbench.impls.layout import Site, Unsupported
from spbench.impls.peers.peer import Peer, imported
from spbench.impls.strategies.sequence_chunks import SequenceChunks
from spbench.impls.traffic import Traffic

#: compute capability of the first GPUs for which fla has these kernels
AMPERE = (8, 0)


class FlaContextParallel(Peer, SequenceChunks):
    """fla's chunk_dplr_delta_rule with its context of ranks, as linear attention."""

    name = "fla_context_parallel"
    summary = "linear attention by the package fla-core: its context parallel delta rule; NVIDIA GPUs alone"
    source = "github.com/fla-org/flash-linear-attention"
    requires = ("fla-core",)
    meets = frozenset({"linear_attention"})

    def load(self) -> None:
        self._context = imported("fla.ops.cp:build_cp_context")
        self._delta_rule = imported("fla.ops.generalized_delta_rule:chunk_dplr_delta_rule")

    def check_sizes(self, sites: Sequence[Site]) -> None:
        if not torch.cuda.is_available() or torch.cuda.get_device_capability() < AMPERE:
            raise Unsupported(
                f"{self.name} has Triton kernels only for NVIDIA GPUs of compute capability 8.0 or more, and "
                "none is here",
                "use lasp or lasp2",
            )

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in sites:
            if site.kind not in self.meets or self.size == 1:
                continue
            d = site.dims
            # in float32; each sample is a call of its own
            summaries = self.size * d["Z"] * d["D"] * (d["A"] + d["D"]) * 4
            for phase in ["forward", *(["backward"] if site.recomputed else []), "backward"]:
                yield Traffic(phase, "states and their carries", "all_gather", site.count * d["B"], summaries)

    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        if self.size == 1:
            return super().linear_attention(q, k, v, mask)
        whole = torch.tensor([0, q.shape[2] * self.size], dtype=torch.int32, device=q.device)
        context = self._context(cu_seqlens=whole, group=self.group)
        rates = q.new_zeros(q.shape[1]) if mask.rates is None else mask.rates.to(q)
        # in fla's context each rank has one run of one sequence, so samples go one by one
        samples = [
            self._of_sample([x.transpose(1, 2).contiguous() for x in sample], rates, context)
            for sample in zip(q.split(1), k.split(1), v.split(1), strict=True)
        ]
        return torch.cat(samples).transpose(1, 2)

    def _of_sample(self, sample: Sequence[Tensor], rates: Tensor, context: object) -> Tensor:
        """Linear attention of one sample: q, k [1, L/N, Z, D], v [1, L/N, Z, A], rates [Z] -> v's shape."""
        q, k, v = sample
        nothing, logarithms = torch.zeros_like(k), -rates.view(1, 1, -1, 1).expand_as(k).contiguous()
        arguments = (q, k, v, nothing, nothing, logarithms)
        o: Tensor
        o, _ = self._delta_rule(*arguments, scale=1.0, cp_context=context)
        return o
