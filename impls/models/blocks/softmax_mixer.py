"""Softmax attention as the mixer of a layer of a causal language model: the module, and its queries, keys and
values in parts (some heads of some positions), which a strategy can project one by one.

To make a part, the part's rows of the weights multiply its positions of x; norm and RoPE follow. In backward
the negative angles undo RoPE, and the part is projected again for the norm.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden (between
projections this rank's features), Z heads (this rank's), G heads of keys and values, A head size; z, g and l
are the numbers of a part's heads of queries, of its heads of keys and values, and of its positions.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spbench.impls.kernels.layer_norm import layer_norm
from spbench.impls.kernels.projection import (
    TRANSFORMER_ENGINE,
    add_input_gradient,
    bias_gradient,
    library_of,
    mark_rows,
    project,
    weight_gradient,
)
from spbench.impls.kernels.rms_norm import rms_norm
from spbench.impls.models.blocks.adapter_options import QKV
from spbench.impls.models.blocks.adapters import OpeningAdapters
from spbench.impls.models.blocks.attention_mixer import AttentionMixer
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.softmax_options import SoftmaxOptions
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.head_sources import HeadPart, HeadSource
from spbench.impls.strategies.layers import GroupedLinear, GroupedQueryLinear, SeparateLinear


@dataclass(frozen=True)
class SoftmaxAttention(SoftmaxOptions):
    """The kind of mixer that is causal softmax attention."""

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        """The module of attention, which maps x [B, L, H] and :class:`Places` to [B, L, H]."""
        return SoftmaxAttentionMixer(self, model, strategy)


class SoftmaxAttentionMixer(AttentionMixer):
    """The module of softmax attention, x [B, L, H] -> [B, L, H], without the bias of its last projection."""

    def __init__(self, kind: SoftmaxOptions, model: DecoderOptions, strategy: Strategy):
        super().__init__(kind, model, strategy)
        hidden, kv_heads = model.hidden, model.kv_heads or model.heads
        self.project: SeparateLinear | GroupedQueryLinear | GroupedLinear
        if model.separate_projections:
            width = kv_heads * model.head_size
            outputs: tuple[int, ...] = (model.attention_width, width, width)
            outputs = (sum(outputs),) if model.joint_qkv else outputs
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
        """The attention [B, Z, L, A] of all heads, whose queries, keys and values come from x [B, L, H]."""
        q, k, v = self._projected(x)
        q, k = self.turned(q, places), self.turned(k, places)
        q = q.flatten(1, -3)
        if self._made_contiguous:
            q, k, v = (x.contiguous() for x in (q, k, v))
        return self.attend_to(q, k, v, places)

    @property
    def _made_contiguous(self) -> bool:
        """Whether queries, keys and values are copied to be contiguous, which frees their projection. Fused
        kernels need contiguous tensors; TransformerEngine's attention by scores takes views, unless q, k and
        v are parts of several tensors (get_qkv_layout of its dot_product_attention/utils.py)."""
        if self.model.attention_views:
            return False
        if self.kind.kernel != "unfused":
            return True
        apart = self.kind.rotary_base is not None or self.model.qk_norm or self.model.grouped
        return self.model.library == TRANSFORMER_ENGINE and apart

    def turned(self, x: Tensor, places: Places) -> Tensor:
        """Queries or keys x [..., L, A], turned by RoPE's angles if the layer has RoPE."""
        if self.kind.rotary_base is None:
            return x
        size = int(self.model.head_size * self.kind.rotary_share)
        # Megatron-Core's own RoPE concatenates turned and other features, even where there are no others
        if size == self.model.head_size and (self.model.fuses("rope") or not self.model.fused):
            return self.rotated(x, places)
        return torch.cat((self.rotated(x[..., :size], places), x[..., size:]), -1)

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, Z, L, A] or [B, G, Z/G, L, A], keys and values [B, G, L, A]."""
        opened = self.project(x)
        if self.opening is not None:
            opened = self.opening(x, opened)
        if self.model.joint_qkv:  # rows by groups of heads, as in GroupedQueryLinear
            of_group = self.model.heads // (self.model.kv_heads or self.model.heads)
            groups = opened[0].unflatten(-1, (-1, of_group + 2, self.model.head_size))
            q, k, v = groups.split([of_group, 1, 1], -2)
            q, k, v = q if self.model.grouped else q.squeeze(-2), k.squeeze(-2), v.squeeze(-2)
        elif not self.model.separate_projections and self.kind.by_groups(self.model):
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
        """The weight and, for layer norms, the bias of the norm of "q" or "k"; [] without such a norm."""
        if not self.model.qk_norm:
            return []
        names = [f"{name}_norm", f"{name}_norm_bias"][: 2 if self.model.norm == "layer" else 1]
        if self.model.qk_norm_over == "all":  # each rank has all heads of its positions
            return [getattr(self, each) for each in names]
        # getattr, not get_parameter, because a flat backend makes a weight a view of the flat parameter
        return [self.strategy.shared_by_heads(getattr(self, each)) for each in names]

    def normalised(self, x: Tensor, weight: Tensor, *bias: Tensor) -> Tensor:
        """x [B, L, ..., A] after a norm of the model's kind over a head, or over all heads (qk_norm_over)."""
        epsilon = self.model.norm_epsilon
        if self.model.qk_norm_over == "all":
            shape, x = x.shape, x.flatten(2)
            return self._normalised(x, epsilon, weight, *bias).view(shape)
        return self._normalised(x, epsilon, weight, *bias)

    def _normalised(self, x: Tensor, epsilon: float, weight: Tensor, *bias: Tensor) -> Tensor:
        """x after a norm of the model's kind over the last dim."""
        if self.model.norm != "layer":
            return rms_norm(x, weight, epsilon, way=self.model.rms_norm)
        # libraries' kernels take no views, so backward keeps a copy of the projection's part
        return layer_norm(x.contiguous(), weight, bias[0], epsilon)


#: the indices of queries, keys and values in ``which``
QUERIES, KEYS, VALUES = range(3)


class ProjectedHeads(HeadSource):
    """The queries, keys and values of a :class:`SoftmaxAttentionMixer`, whole or in parts. The tensors to
    differentiate are x [B, L, H], weights, biases and norms; only x has positions."""

    position_dim, with_positions, needed = 1, 1, 1

    def __init__(self, mixer: SoftmaxAttentionMixer, places: Places):
        self.mixer, self.places = mixer, places
        model = mixer.model
        self.heads, self.groups = model.heads, model.kv_heads or model.heads
        self.head_size = self.value_size = model.head_size
        self.attended = mixer.kind.attended(places.attended, places.seq_len)
        self.sinks = mixer.sinks

    @property
    def in_parts(self) -> bool:
        # split weights need sums or gathers over ranks after each projection
        whole = not self.mixer.strategy.splits_features
        again = self.mixer.model.recomputes("core_attn") or self.mixer.opening is not None
        again = again or self.mixer.model.fp8 != "none"  # because casts are of whole weights
        again = again or (self.mixer.model.qk_norm and self.mixer.model.qk_norm_over == "all")
        return whole and not again and not self.mixer.kind.needs_all_positions

    def attend_whole(self, x: Tensor) -> Tensor:
        return self.mixer.attend_whole(x, self.places)

    # -- the tensors to differentiate: x, the weights, their biases, and the norms of queries and of keys ----

    def tensors(self, x: Tensor) -> Sequence[Tensor]:
        norms = [*self.mixer.norm_of("q"), *self.mixer.norm_of("k")]
        return x, *self._weights(), *self._biases(), *norms

    def _weights(self) -> Sequence[Tensor]:
        project = self.mixer.project
        return [*project.weights] if isinstance(project, SeparateLinear) else [project.weight]

    def _biases(self) -> Sequence[Tensor]:
        project = self.mixer.project
        if isinstance(project, SeparateLinear):
            return [*project.biases]
        return [] if project.bias is None else [project.bias]

    def _by_heads(self, tensors: Sequence[Tensor], which: int, part: HeadPart) -> Tensor:
        """A view of a part's rows of queries, keys or values (``which``): [.., A, H] of the weights or their
        gradients, [.., A] of the biases or their gradients."""
        project: nn.Module = self.mixer.project
        if self.mixer.model.joint_qkv or isinstance(project, GroupedQueryLinear):
            dim, sizes = (0, (self.groups, -1)) if isinstance(project, SeparateLinear) else (1, (-1,))
            group = tensors[0].unflatten(dim, (*sizes, self.head_size))
            rows = (group[:, :-2], group[:, -2:-1], group[:, -1:])[which]
        elif isinstance(project, SeparateLinear):
            rows = tensors[which].unflatten(0, (self.groups, -1, self.head_size))
        else:
            assert isinstance(project, GroupedLinear)
            rows = tensors[0][which].unflatten(0, (self.groups, -1, self.head_size))
        if which != QUERIES:
            return part.of_keys(rows, 0)
        return rows.unflatten(1, (part.runs, -1))[part.groups, :, part.members]

    def _rows(self, tensors: Sequence[Tensor], which: int, part: HeadPart) -> tuple[Tensor, Tensor | None]:
        """A part's rows of the weights [rows, H] and of the biases [rows]; None: there are no biases."""
        weights, biases, _ = self._separated(tensors)
        rows = self._by_heads(weights, which, part).flatten(0, -2)
        bias = self._by_heads(biases, which, part).flatten() if biases else None
        return mark_rows(rows, library_of(self._weights()[0])), bias

    def _separated(
        self, tensors: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """The weights, the biases and the norms among the tensors of :meth:`tensors`, or among gradients."""
        weights = 1 + len(self._weights())
        biases = weights + len(self._biases())
        return tensors[1:weights], tensors[weights:biases], tensors[biases:]

    def _norm(self, tensors: Sequence[Tensor], which: int) -> Sequence[Tensor]:
        norms = self._separated(tensors)[2]
        each = len(norms) // 2
        return () if which == VALUES else norms[:each] if which == QUERIES else norms[each:]

    # -- parts -------------------------------------------------------------------------------------------

    def queries(self, tensors: Sequence[Tensor], part: HeadPart) -> Tensor:
        return self._made(tensors, QUERIES, part)

    def keys_values(self, tensors: Sequence[Tensor], part: HeadPart) -> tuple[Tensor, Tensor]:
        return self._made(tensors, KEYS, part), self._made(tensors, VALUES, part)

    def add_queries(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], part: HeadPart, d_q: Tensor
    ) -> None:
        self._add(tensors, gradients, QUERIES, part, d_q)

    def add_keys_values(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], part: HeadPart, d_k: Tensor, d_v: Tensor
    ) -> None:
        self._add(tensors, gradients, KEYS, part, d_k)
        self._add(tensors, gradients, VALUES, part, d_v)

    def _projected(self, tensors: Sequence[Tensor], which: int, part: HeadPart) -> Tensor:
        """A part's queries, keys or values [B, z or g, l, A] before norm and RoPE."""
        rows, bias = self._rows(tensors, which, part)
        y = project(tensors[0], rows, bias)
        return y.unflatten(-1, (-1, self.head_size)).transpose(1, 2)

    def _made(self, tensors: Sequence[Tensor], which: int, part: HeadPart) -> Tensor:
        y = self._projected(tensors, which, part)
        if norm := self._norm(tensors, which):
            y = self.mixer.normalised(y, *norm)
        return y if which == VALUES else self.mixer.turned(y, self.places.part(part.positions))

    def _add(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor], which: int, part: HeadPart, d: Tensor
    ) -> None:
        if which != VALUES:
            d = self.mixer.turned(d, self.places.part(part.positions, back=True))
        if norm := self._norm(tensors, which):
            y, *leaves = (x.detach().requires_grad_() for x in (self._projected(tensors, which, part), *norm))
            with torch.enable_grad():
                normalised = self.mixer.normalised(y, *leaves)
            d, *d_norm = torch.autograd.grad(normalised, [y, *leaves], d)
            for total, gradient in zip(self._norm(gradients, which), d_norm, strict=True):
                total.add_(gradient)
        d_y = d.transpose(1, 2).flatten(2)
        x, (rows, bias) = tensors[0], self._rows(tensors, which, part)
        d_weights, d_biases, _ = self._separated(gradients)
        of_rows = self._by_heads(d_weights, which, part)
        of_rows.add_(weight_gradient(d_y, x, rows).view(of_rows.shape))
        if bias is not None:
            of_bias = self._by_heads(d_biases, which, part)
            of_bias.add_(bias_gradient(d_y, bias).view(of_bias.shape))
        add_input_gradient(gradients[0], d_y, rows)
