"""Heads of softmax attention as parts that strategies project by themselves.

A part's rows of the weights are multiplied with its positions, normalised and turned as the layer has it.
Backward, RoPE is undone by the negative angles; a norm needs what it normalised, which is projected again.

Shape letters: B batch, L sequence, H hidden, Z heads, G heads of keys and values, A head size; of a part, z,
g and l of these.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spbench.impls.kernels.projection import (
    add_input_gradient,
    bias_gradient,
    library_of,
    mark_rows,
    project,
    weight_gradient,
)
from spbench.impls.models.blocks.places import Places
from spbench.impls.strategies.grouped_query import GroupedQueryLinear
from spbench.impls.strategies.head_sources import HeadPart, HeadSource
from spbench.impls.strategies.layers import GroupedLinear, SeparateLinear

if TYPE_CHECKING:
    from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttentionMixer

#: of the three that are projected
QUERIES, KEYS, VALUES = range(3)


class ProjectedHeads(HeadSource):
    """The queries, keys and values of a :class:`SoftmaxAttentionMixer`. Of the tensors x alone has
    positions."""

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
        # a rank's part of split weights is followed by what sums or gathers over ranks
        whole = not self.mixer.strategy.splits_features
        again = self.mixer.model.recomputes("core_attn") or self.mixer.opening is not None
        again = again or self.mixer.model.fp8 != "none"  # casts are of whole weights
        again = again or (self.mixer.model.qk_norm and self.mixer.model.qk_norm_over == "all")
        return whole and not again and not self.mixer.kind.needs_all_positions

    def attend_whole(self, x: Tensor) -> Tensor:
        return self.mixer.attend_whole(x, self.places)

    # -- what is differentiated: x, the weights, their biases, and the norms of queries and of keys ----------

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
        """A part's rows of queries, keys or values, of weights [.., H] or biases, or of gradients of these: a
        view [.., A, H] or [.., A]."""
        project: nn.Module = self.mixer.project
        if isinstance(project, SeparateLinear):
            rows = tensors[which].unflatten(0, (self.groups, -1, self.head_size))
        elif isinstance(project, GroupedQueryLinear):
            group = tensors[0].unflatten(1, (-1, self.head_size))
            rows = (group[:, :-2], group[:, -2:-1], group[:, -1:])[which]
        else:
            assert isinstance(project, GroupedLinear)
            rows = tensors[0][which].unflatten(0, (self.groups, -1, self.head_size))
        if which != QUERIES:
            return part.of_keys(rows, 0)
        return rows.unflatten(1, (part.runs, -1))[part.groups, :, part.members]

    def _rows(self, tensors: Sequence[Tensor], which: int, part: HeadPart) -> tuple[Tensor, Tensor | None]:
        """A part's rows of the weights [F, H] and of the biases [F], where there are some."""
        weights, biases, _ = self._separated(tensors)
        rows = self._by_heads(weights, which, part).flatten(0, -2)
        bias = self._by_heads(biases, which, part).flatten() if biases else None
        return mark_rows(rows, library_of(self._weights()[0])), bias

    def _separated(
        self, tensors: Sequence[Tensor]
    ) -> tuple[Sequence[Tensor], Sequence[Tensor], Sequence[Tensor]]:
        """Weights, biases and norms, of what :meth:`tensors` returns or of its gradients."""
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
        """[B, z, l, A], before norm and RoPE."""
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
