"""What mixers of softmax attention share, plain and latent.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden (this
rank's features of it between projections), Z heads (this rank's), A head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from spbench.impls.kernels.host_copies import read_packing
from spbench.impls.kernels.rotary import fused_rotary, rotated, rotated_by_angles, rotated_by_halves
from spbench.impls.models.blocks.adapter_options import CLOSING
from spbench.impls.models.blocks.adapters import ClosingAdapter
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.blocks.softmax_options import FLASH_KERNELS, SoftmaxOptions
from spbench.impls.strategies.base import Strategy


class AttentionMixer(nn.Module):
    """What mixers of softmax attention share: how heads attend, RoPE, and the projection that closes the
    layer. A derived class makes the projections that open it."""

    def __init__(self, kind: SoftmaxOptions, model: DecoderOptions, strategy: Strategy):
        super().__init__()
        self.kind, self.model, self.strategy = kind, model, strategy

    def close(self) -> None:
        """Make what follows the projections that open the layer: parameters lie in the order of their use."""
        model, strategy = self.model, self.strategy
        self.sinks = strategy.feature_parameter(torch.zeros(model.heads)) if self.kind.sinks else None
        self.out = strategy.linear_out(self.kind.width(model), model.hidden)

    def adapt_closing(self) -> None:
        """Make the adapter of the projection that closes the layer, if it has one."""
        self.closing, width = None, self.kind.width(self.model)
        if self.model.adapts([CLOSING]):
            self.closing = ClosingAdapter(self.model, self.strategy, self.strategy, width, self.model.hidden)

    def closed(self, y: Tensor) -> Tensor:
        """The heads' features [B, L, Z A] projected to [B, L, H]."""
        projected = self.out.project(y)
        return projected if self.closing is None else self.closing(y, projected)

    def attend_to(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        """The attention [B, Z, L, A] of q to k and v of this rank's positions, as the layer has it."""
        if self.model.recomputes("core_attn"):
            return recomputed(self.attend_at_once, self.strategy.random, q, k, v, places)
        return self.attend_at_once(q, k, v, places)

    def beside_heads(self, o: Tensor) -> Tensor:
        """The heads' features one after another [B, L, Z A], from o [B, Z, L, A]."""
        y = o.transpose(1, 2)
        del o
        if self.model.fused and self.kind.kernel in FLASH_KERNELS and len(y) > 1:
            # the libraries' hidden states are [L, B, H]: they copy what this kernel returns, [B, L, H]
            y = y.clone(memory_format=torch.contiguous_format)
        return y.flatten(2)

    def rotated(self, x: Tensor, places: Places) -> Tensor:
        """[..., L, features that turn] -> the same."""
        base, size = self.kind.rotary_base, x.shape[-1]
        assert base is not None
        if self.model.fuses("rope"):
            return fused_rotary(x, places.angles(size, base))
        if self.model.fused:
            return rotated_by_angles(x, places.angles(size, base))
        if self.model.rope == "each_layer":
            return rotated_by_halves(x, *places.rotary_of_layer(self, size, base))
        return rotated(x, *places.rotary(size, base))

    def attend_at_once(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        """As :meth:`attend_to`, with nothing recomputed in backward."""
        attended = self.kind.attended(places.attended, places.seq_len)
        if self.model.packing_read:
            read_packing(places.seq_len, q.device)
        if not self.kind.needs_all_positions:
            # strategies that know of nothing but causal attention need not name further arguments
            if self.sinks is not None:
                return self.strategy.causal_attention(q, k, v, attended, self.sinks)
            if not attended.plain:
                return self.strategy.causal_attention(q, k, v, attended)
            return self.strategy.causal_attention(q, k, v)
        local = self.model.library == "megatron-local"
        if self.kind.kernel == "unfused" and k.shape[1] < q.shape[1]:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        return self.strategy.whole_attention(
            q,
            k,
            v,
            dropout=self.kind.dropout,
            scores=self._softmax_of_scores,
            into=self.strategy.buffer if local else None,
        )

    @property
    def _softmax_of_scores(self) -> str | None:
        """How scores become probabilities, a way of :func:`softmax_of_scores`; None: none are made."""
        if self.kind.kernel != "unfused":
            return None
        if not self.model.fused:
            return "plain"
        # TransformerEngine's own fusion does not heed Megatron-LM's argument
        by_megatron = self.model.library == "megatron-local"
        return "in_float32" if by_megatron and not self.model.fuses("masked_softmax") else "fused"
