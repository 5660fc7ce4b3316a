"""Softmax attention as what mixes the tokens in a layer of a causal language model.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden (this
rank's features of it between projections), Z heads (this rank's), G heads of keys and values, A head size.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spbench.impls.kernels.host_copies import read_packing
from spbench.impls.kernels.layer_norm import layer_norm
from spbench.impls.kernels.projection import TRANSFORMER_ENGINE
from spbench.impls.kernels.rms_norm import rms_norm
from spbench.impls.kernels.rotary import fused_rotary, rotated, rotated_by_angles, rotated_by_halves
from spbench.impls.models.blocks.adapter_options import CLOSING, QKV
from spbench.impls.models.blocks.adapters import ClosingAdapter, OpeningAdapters
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.projected_heads import ProjectedHeads
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.blocks.softmax_options import FLASH_KERNELS, SoftmaxOptions
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.grouped_query import GroupedQueryLinear
from spbench.impls.strategies.layers import GroupedLinear, SeparateLinear


@dataclass(frozen=True)
class SoftmaxAttention(SoftmaxOptions):
    """A layer of causal softmax attention."""

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        """The module that mixes the tokens."""
        return SoftmaxAttentionMixer(self, model, strategy)


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
        """The same, never recomputed."""
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


class SoftmaxAttentionMixer(AttentionMixer):
    """x [B, L, H] -> [B, L, H], without the bias of the projection that closes it."""

    def __init__(self, kind: SoftmaxOptions, model: DecoderOptions, strategy: Strategy):
        super().__init__(kind, model, strategy)
        hidden, kv_heads = model.hidden, model.kv_heads or model.heads
        self.project: SeparateLinear | GroupedQueryLinear | GroupedLinear
        if model.separate_projections:
            width = kv_heads * model.head_size
            outputs = model.attention_width, width, width
            self.project = strategy.separate_linear_in(hidden, outputs, bias=kind.bias)
        elif kind.by_groups(model):
            self.project = strategy.grouped_query_linear_in(
                hidden, model.head_size, model.heads, kv_heads, bias=kind.bias
            )
        else:
            self.project = strategy.grouped_linear_in(hidden, model.attention_width, 3)
        of_all = model.qk_norm_over == "all"
        widths = [model.head_size * (n if of_all else 1) for n in (model.heads, kv_heads)]
        if model.qk_norm:
            self.q_norm, self.k_norm = (nn.Parameter(torch.ones(n)) for n in widths)
        if model.qk_norm and model.norm == "layer":
            self.q_norm_bias, self.k_norm_bias = (nn.Parameter(torch.zeros(n)) for n in widths)
        self.gate = strategy.grouped_linear_in(hidden, model.attention_width, 1) if kind.gated else None
        self.close()
        self.opening = self._adapters(kv_heads) if model.adapts(QKV) else None
        self.adapt_closing()

    def _adapters(self, kv_heads: int) -> OpeningAdapters:
        model, strategy = self.model, self.strategy
        width, of_keys, heads = model.attention_width, kv_heads * model.head_size, model.heads

        def together(rank: int) -> nn.Module:
            if self.kind.by_groups(model):
                return strategy.grouped_query_linear_in(rank, model.head_size, heads, kv_heads)
            return strategy.grouped_linear_in(rank, width, 3)

        def alone(rank: int, place: int) -> nn.Module:
            return strategy.separate_linear_in(rank, ((width, of_keys, of_keys)[place],))

        return OpeningAdapters(model, strategy, model.hidden, QKV, together, alone)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        y = self.beside_heads(self.strategy.projected_attention(x, ProjectedHeads(self, places)))
        y = y if self.gate is None else y * self.gate(x)[0].sigmoid()
        return self.closed(y)

    def attend_whole(self, x: Tensor, places: Places) -> Tensor:
        """The attention of all heads [B, Z, L, A] to what they are given by x [B, L, H]."""
        q, k, v = self._projected(x)
        q, k = self.turned(q, places), self.turned(k, places)
        q = q.flatten(1, -3)
        if self._made_contiguous:
            q, k, v = (x.contiguous() for x in (q, k, v))
        return self.attend_to(q, k, v, places)

    @property
    def _made_contiguous(self) -> bool:
        """Whether queries, keys and values are, so that the memory of their projection is given up. Attention
        kernels want that; TransformerEngine's attention by scores takes views, unless q, k and v are parts of
        more than one tensor (get_qkv_layout of its dot_product_attention/utils.py)."""
        if self.model.attention_views:
            return False
        if self.kind.kernel != "unfused":
            return True
        apart = self.kind.rotary_base is not None or self.model.qk_norm or self.model.grouped
        return self.model.library == TRANSFORMER_ENGINE and apart

    def turned(self, x: Tensor, places: Places) -> Tensor:
        """Queries or keys [..., L, A] turned by RoPE's angles, if the layer has it."""
        if self.kind.rotary_base is None:
            return x
        size = int(self.model.head_size * self.kind.rotary_share)
        # Megatron-Core's own RoPE joins what was turned and what was not, also where that is nothing
        if size == self.model.head_size and (self.model.fuses("rope") or not self.model.fused):
            return self.rotated(x, places)
        return torch.cat((self.rotated(x[..., :size], places), x[..., size:]), -1)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, Z, L, A] or [B, G, Z/G, L, A], keys and values [B, G, L, A]."""
        opened = self.project(x)
        if self.opening is not None:
            opened = self.opening(x, opened)
        if not self.model.separate_projections and self.kind.by_groups(self.model):
            q, k, v = opened
        else:
            q, k, v = (y.unflatten(-1, (-1, self.model.head_size)) for y in opened)
            if self.model.grouped and self.model.separate_projections:
                q = q.unflatten(-2, (k.shape[-2], -1))
        if self.model.qk_norm:
            q, k = (self.normalised(y, *self.norm_of(name)) for y, name in ((q, "q"), (k, "k")))
        q, k, v = (y.movedim(1, -2) for y in (q, k, v))
        return q, k, v

    def norm_of(self, name: str) -> list[Tensor]:
        """The weight of the norm of "q" or "k", and its bias where it has one; none without a norm."""
        if not self.model.qk_norm:
            return []
        names = [f"{name}_norm", f"{name}_norm_bias"][: 2 if self.model.norm == "layer" else 1]
        if self.model.qk_norm_over == "all":  # each rank has all heads of its positions
            return [getattr(self, each) for each in names]
        # no get_parameter: under a flat backend a weight is a view of the flat parameter
        return [self.strategy.shared_by_heads(getattr(self, each)) for each in names]

    def normalised(self, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        """[B, L, ..., A] -> the same, by the kind of norm that the model has."""
        epsilon = self.model.norm_epsilon
        if self.model.qk_norm_over == "all":
            shape, x = x.shape, x.flatten(2)
            return self._normalised(x, epsilon, weight, *bias).view(shape)
        return self._normalised(x, epsilon, weight, *bias)

    def _normalised(self, x: Tensor, epsilon: float, weight: Tensor, *bias: Tensor) -> Tensor:
        """Over the last dim."""
        if self.model.norm != "layer":
            return rms_norm(x, weight, epsilon, way=self.model.rms_norm)
        # libraries' kernels take no views: what is kept is a copy of the projection's part
        return layer_norm(x.contiguous(), weight, bias[0], epsilon)
