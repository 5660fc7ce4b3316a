"""Kimi Delta Attention (KDA, Kimi Linear, arXiv 2510.26692, section 3) as the mixer of a layer.

KDA is Gated DeltaNet with a gate for each feature of a key, as fla's KimiDeltaAttention and the layers of
Kimi-Linear-48B-A3B have it. Of each feature a head keeps the share exp(-exp(A_log) softplus(a + dt_bias)).
Two matmuls with A features between them give the gates a from the input, two further ones the gate of the
output, which is sigmoid(z). As in fla, backward computes the decays from a again.

A rank of tensor parallelism has the first of the two matmuls whole, and its heads' part of the second, as in
latent attention. Shape letters as in :mod:`spbench.impls.models.blocks.recurrent_mixer`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn

from spbench.impls.kernels.decay import feature_gate, state_dtype
from spbench.impls.kernels.gated_delta import KimiDelta
from spbench.impls.kernels.gated_norm import l2_norm
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.recurrent_mixer import GatedDeltaNet, GatedDeltaNetMixer, Projected
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.layers import Linear


@dataclass(frozen=True)
class KimiDeltaAttention(GatedDeltaNet):
    """The kind of mixer that is KDA."""

    rule = KimiDelta
    gates_again: ClassVar[bool] = True
    gate_sigmoid: ClassVar[bool] = True

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return KimiDeltaMixer(self, model, strategy)

    @property
    def projected(self) -> list[int]:
        return [*self.channels, self.heads]

    @property
    def risen(self) -> tuple[int, int]:
        """The features of all heads to which the second matmuls project: the gates, and the output's gate."""
        return self.heads * self.key_size, self.heads * self.value_size

    @property
    def decay_biases(self) -> int:
        return self.heads * self.key_size

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        of_base, narrow = super().parameters(model), self.value_size
        split = of_base["split"] + narrow * sum(self.risen)
        return {"split": split, "whole": of_base["whole"] + 2 * model.hidden * narrow}

    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        of_heads, *others = super().sites(model, batch, seq_len, again)
        sizes = {"B": batch, "L": seq_len, "H": self.value_size} | model.gathered_dims
        rising = [Site("linear_in", 1, sizes | {"F": to}, again) for to in self.risen]
        of_heads = replace(of_heads, dims={**of_heads.dims, "gates": self.key_size + 1})
        return [*rising, of_heads, *others]


class KimiDeltaMixer(GatedDeltaNetMixer):
    """The module of KDA, x [B, L, H] -> [B, L, H], whose output is normalised, then gated."""

    kind: KimiDeltaAttention

    def __init__(self, kind: KimiDeltaAttention, model: DecoderOptions, strategy: Strategy):
        super().__init__(kind, model, strategy)
        narrow = kind.value_size
        self.a_down, self.z_down = (Linear(model.hidden, narrow, bias=False) for _ in kind.risen)
        self.a_up, self.z_up = (strategy.grouped_linear_in(narrow, to, 1) for to in kind.risen)

    def projections(self, x: Tensor) -> Projected:
        q, k, v, b = self.project(x)
        a, gate = (
            self.a_up.project(self.a_down.project(x), None),
            self.z_up.project(self.z_down.project(x), None),
        )
        gates = torch.cat((a.unflatten(-1, (-1, self.kind.key_size)), b.unsqueeze(-1)), -1)
        return (q, k, v), gates, gate

    def of_heads(self) -> Sequence[Tensor]:
        return self.A_log, self.dt_bias.unflatten(0, (-1, self.kind.key_size))

    def with_gates(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *by_head: Tensor
    ) -> Sequence[Tensor]:
        q, k = (l2_norm(x, way=self.way) for x in (q, k))
        (a_log, dt_bias), (a, b) = by_head, gates.split([self.kind.key_size, 1], -1)
        b = b.squeeze(-1).to(state_dtype(b.dtype)).sigmoid()
        return q, k, v, feature_gate(a, a_log, dt_bias, self.way), b
