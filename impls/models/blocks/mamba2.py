"""Mamba-2 (Dao and Gu, arXiv 2405.21060) as what mixes the tokens in a decoder's layer.

As mamba_ssm's Mamba2 with its norm: C, B and x are convolved together, with biases; the step of each head is
softplus(dt + dt_bias), its decay exp(-exp(A_log) step); D x is added to what the state gives; x silu(z) comes
before the norm, of each group's features alone. Here each part has a projection of its own, of which
mamba_ssm makes one product. As in its memory-saving path (mamba_split_conv1d_scan_combined), only what was
projected is kept, and backward convolves again. Megatron-Core (ssm/mamba_mixer.py) leaves the gate to that
kernel, which keeps its result before the gate, and norms what it returns, which is kept too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.kernels.activations import silu_times
from spbench.impls.kernels.gated_norm import gated_norm
from spbench.impls.kernels.projection import TRANSFORMER_ENGINE
from spbench.impls.kernels.rms_norm import rms_norm
from spbench.impls.kernels.state_space import StateSpace
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.recurrent_mixer import RecurrentLayer, RecurrentMixer
from spbench.impls.strategies.base import Strategy


@dataclass(frozen=True)
class Mamba2(RecurrentLayer):
    """A layer of Mamba-2: Z heads of A features (headdim), G groups (n_groups), D numbers a feature of the
    state."""

    rule = StateSpace
    gates: ClassVar[int] = 1
    biased: ClassVar[bool] = True
    makes_again: ClassVar[bool] = True

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return Mamba2Mixer(self, model, strategy)

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        return {"split": self.split_parameters(model) + self.heads + self.heads * self.value_size}


class Mamba2Mixer(RecurrentMixer):
    """x [B, L, H] -> [B, L, H] by Mamba-2's recurrence plus D x; its output is gated, then normalised."""

    def __init__(self, kind: Mamba2, model: DecoderOptions, strategy: Strategy):
        super().__init__(kind, model, strategy)
        self.D = strategy.feature_parameter(torch.ones(kind.heads))
        self.norm = strategy.feature_parameter(torch.ones(kind.heads * kind.value_size))

    def by_head(self) -> tuple[Tensor, ...]:
        return (self.D,)

    def of_recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, gates: Tensor, *by_head: Tensor
    ) -> Sequence[Tensor]:
        a_log, dt_bias, d = (w.to(gates.dtype) for w in by_head)
        step = F.softplus(gates.squeeze(-1) + dt_bias)
        return q, k, v, -a_log.exp() * step, step, d.to(v.dtype)

    def normalised(self, o: Tensor, gate: Tensor) -> Tensor:
        group = self.kind.heads // self.kind.key_heads
        o, gate = (x.flatten(2).unflatten(-1, (-1, group * self.kind.value_size)) for x in (o, gate))
        weight, epsilon = self.norm.view(o.shape[-2:]), self.model.norm_epsilon
        if self.model.library == TRANSFORMER_ENGINE and self.way == "fused":
            return rms_norm(silu_times(gate, o), weight, epsilon).flatten(2)
        return gated_norm(o, gate, weight, epsilon, gate_first=True, way=self.way).flatten(2)
