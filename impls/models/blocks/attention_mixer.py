"""The base class of the modules of softmax attention and of latent attention.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden (this
rank's features of it between projections), Z heads (this rank's), A head size.
"""

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
    """The part of an attention module from the heads' queries on: RoPE, attention, and the projection that
    closes the mixer. A derived class makes the projections that open the mixer."""

    def __init__(self, kind: SoftmaxOptions, model: DecoderOptions, strategy: Strategy):
        super().__init__()
        self.kind, self.model, self.strategy = kind, model, strategy

    def close(self) -> None:
        """Make the parameters behind the opening projections, so that parameters lie in the order of use."""
        model, strategy = self.model, self.strategy
        self.sinks = strategy.feature_parameter(torch.zeros(model.heads)) if self.kind.sinks else None
        self.out = strategy.linear_out(self.kind.width(model), model.hidden)

    def adapt_closing(self) -> None:
        """Make the adapter of the projection that closes the mixer, if the options ask for one."""
        self.closing, width = None, self.kind.width(self.model)
        if self.model.adapts([CLOSING]):
            self.closing = ClosingAdapter(self.model, self.strategy, self.strategy, width, self.model.hidden)

    def closed(self, y: Tensor) -> Tensor:
        """The closing projection [B, L, H] of the heads' features y [B, L, Z A], plus the adapter's."""
        projected = self.out.project(y)
        return projected if self.closing is None else self.closing(y, projected)

    def attend_to(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        """The attention [B, Z, L, A] of q to k and v, which backward recomputes if the options say so."""
        if self.model.recomputes("core_attn"):
            return recomputed(self.attend_at_once, self.strategy.random, q, k, v, places)
        return self.attend_at_once(q, k, v, places)

    def beside_heads(self, o: Tensor) -> Tensor:
        """The features of all heads in one row for each position [B, L, Z A], from o [B, Z, L, A]."""
        y = o.transpose(1, 2)
        del o
        if self.model.fused and self.kind.kernel in FLASH_KERNELS and len(y) > 1:
            # the libraries' hidden states are [L, B, H], so they copy this kernel's result [B, L, H]
            y = y.clone(memory_format=torch.contiguous_format)
        return y.flatten(2)

    def rotated(self, x: Tensor, places: Places) -> Tensor:
        """x [..., L, features] turned by RoPE's angles, in the way that the options name."""
        base, size = self.kind.rotary_base, x.shape[-1]
        assert base is not None
        if self.model.fuses("rope"):
            return fused_rotary(x, places.angles(size, base))
        if self.model.fused:
            return rotated_by_angles(x, places.angles(size, base))
        if self.model.rope == "each_layer":
            return rotated_by_halves(x, *places.rotary_of_layer(self, size, base))
        return rotated(x, *places.rotary(size, base))

    def turned(self, x: Tensor, places: Places) -> Tensor:
        """x [B, L, R] or [B, L, Z, R], turned by RoPE if the layer has RoPE."""
        if self.kind.rotary_base is None:
            return x
        if x.ndim == 3:
            return self.rotated(x, places)
        return self.rotated(x.transpose(1, 2), places).transpose(1, 2)

    def attend_at_once(self, q: Tensor, k: Tensor, v: Tensor, places: Places) -> Tensor:
        """The attention [B, Z, L, A] of q to k and v, without recomputation of its own in backward."""
        attended = self.kind.attended(places.attended, places.seq_len)
        if self.model.packing_read:
            read_packing(places.seq_len, q.device)
        if not self.kind.needs_all_positions:
            # a strategy whose hook has only q, k and v still runs where no window, document or sink is used
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
        """The way of :func:`softmax_of_scores` that makes probabilities of scores; None: no scores exist."""
        if self.kind.kernel != "unfused":
            return None
        if not self.model.fused:
            return "plain"
        # TransformerEngine's own fusion does not heed Megatron-LM's argument
        by_megatron = self.model.library == "megatron-local"
        return "in_float32" if by_megatron and not self.model.fuses("masked_softmax") else "fused"
