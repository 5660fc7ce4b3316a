"""Gated DeltaNet (Yang et al., arXiv 2412.06464) as what mixes the tokens in a decoder's layer.

As fla's GatedDeltaNet and the layers of Qwen3-Next: queries, keys and values are convolved without biases,
queries and keys made of length one; a head keeps exp(-exp(A_log) softplus(a + dt_bias)) of its state and
writes with the strength sigmoid(b), a and b projected from the input; its output is normalised, with a weight
that all heads share, and multiplied by silu(z). Each part has a projection of its own, as in fla.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.kernels.gated_delta import GatedDelta
from spbench.impls.kernels.gated_norm import gated_norm, l2_norm
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.recurrent_mixer import RecurrentLayer, RecurrentMixer
from spbench.impls.strategies.base import Site, Strategy


@dataclass(frozen=True)
class GatedDeltaNet(RecurrentLayer):
    """A layer of Gated DeltaNet."""

    rule = GatedDelta
    gates: ClassVar[int] = 2
    biased: ClassVar[bool] = False

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return GatedDeltaNetMixer(self, model, strategy)

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        return {"split": self.split_parameters(model), "whole": self.value_size}

    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        norm = Site("shared_by_heads", 1, {"A": self.value_size}, again)
        return [*super().sites(model, batch, seq_len, again), norm]


class GatedDeltaNetMixer(RecurrentMixer):
    """x [B, L, H] -> [B, L, H] by the gated delta rule; its output is normalised, then gated."""

    def __init__(self, kind: GatedDeltaNet, model: DecoderOptions, strategy: Strategy):
        super().__init__(kind, model, strategy)
        self.norm = nn.Parameter(torch.ones(kind.value_size))

    def of_recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *by_head: Tensor
    ) -> Sequence[Tensor]:
        a_log, dt_bias = (w.to(gates.dtype) for w in by_head)
        q, k = (l2_norm(x, way=self.way) for x in (q, k))
        a, b = gates.unbind(-1)
        return q, k, v, -a_log.exp() * F.softplus(a + dt_bias), b.sigmoid()

    def normalised(self, o: Tensor, gate: Tensor) -> Tensor:
        weight = self.strategy.shared_by_heads(self.norm)
        return gated_norm(o, gate, weight, self.model.norm_epsilon, gate_first=False, way=self.way).flatten(2)
