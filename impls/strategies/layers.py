"""What layers compute with weights: projections, embedding and loss, on a single device.

Shape letters: B batch, L sequence, H hidden, V vocabulary, Z heads, G heads of keys and values, A head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.kernels.cross_entropy import CrossEntropy, cross_entropy_of
from spbench.impls.kernels.projection import project
from spbench.impls.strategies.delegation import left_within, property_left_within


class Linear(nn.Module):
    """x [..., in_features] -> x W^T + b [..., out_features]."""

    bias: nn.Parameter | None

    def __init__(self, in_features: int, out_features: int, *, bias: bool = True):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(out_features)) if bias else None

    def project(self, x: Tensor) -> Tensor:
        """x W^T [..., out_features], without the bias."""
        return project(x, self.weight)

    def forward(self, x: Tensor) -> Tensor:
        return project(x, self.weight, self.bias)


class GroupedLinear(nn.Module):
    """x [..., in_features] -> ``groups`` times x W_g^T [..., out_features], as one matmul.

    The weight is [groups, out_features, in_features], so that a split of its second dim splits each group;
    the bias, if there is one, [groups, out_features].

    Attributes:
        gathered_once: where a strategy gathers x, whether the whole x is kept instead of gathered again in
            backward.
    """

    bias: nn.Parameter | None
    gathered_once = False

    def __init__(self, in_features: int, out_features: int, groups: int, *, bias: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, out_features, in_features))
        self.bias = nn.Parameter(torch.zeros(groups, out_features)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return self._groups(self.project(x, self.bias)).unbind(-2)

    def together(self, x: Tensor) -> Tensor:
        """All projections side by side [..., groups, out_features], without their biases."""
        return self._groups(self.project(x, None))

    def _groups(self, y: Tensor) -> Tensor:
        return y.unflatten(-1, self.weight.shape[:2])

    def project(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [..., in_features] times all groups' weights, plus ``bias``: [..., groups * out_features]."""
        return project(x, self.weight, bias)


class SeparateLinear(nn.Module):
    """x [..., in_features] -> x W_g^T + b_g [..., F_g] for each F_g of ``out_features``, one matmul each."""

    def __init__(self, in_features: int, out_features: Sequence[int], *, bias: bool = False):
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.empty(n, in_features)) for n in out_features)
        self.biases = nn.ParameterList(nn.Parameter(torch.zeros(n)) for n in out_features if bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        biases = [*self.biases] or [None] * len(self.weights)
        if (recipe := getattr(self.weights[0], "spbench_fp8", None)) is not None:
            by_recipe: tuple[Tensor, ...] = recipe.project_all(x, [*self.weights], biases)
            return by_recipe
        return tuple(project(x, w, b) for w, b in zip(self.weights, biases, strict=True))


class GroupedQueryLinear(nn.Module):
    """x [..., H] -> queries [..., G, Z/G, A], keys and values [..., G, A], as one matmul: the fused
    projection of grouped-query attention (Ainslie et al., arXiv 2305.13245), in which a head of keys and
    values serves a group of Z/G heads of queries.

    The weights lie group by group, the queries of a group, its key and its value, as in Megatron-LM
    (mixed_qkv of its attention), so that a cut between groups cuts all three. The weight is
    [G, (Z/G + 2) A, H], the bias, if there is one, [G, (Z/G + 2) A].
    """

    bias: nn.Parameter | None

    def __init__(self, in_features: int, head_size: int, heads: int, kv_heads: int, *, bias: bool = False):
        super().__init__()
        self.head_size = head_size
        rows = kv_heads, (heads // kv_heads + 2) * head_size
        self.weight = nn.Parameter(torch.empty(*rows, in_features))
        self.bias = nn.Parameter(torch.zeros(rows)) if bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.separate(project(x, self.weight, self.bias))

    def separate(self, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [..., G, Z/G, A], keys and values [..., G, A], as views of y [..., (Z + 2 G) A]."""
        groups = y.unflatten(-1, (self.weight.shape[0], -1, self.head_size))
        q, k, v = groups.split([groups.shape[-2] - 2, 1, 1], -2)
        return q, k.squeeze(-2), v.squeeze(-2)


class LayerHooks:
    """What does a layer compute with its weights, and which part of them has this rank?"""

    @property
    def of_mlp(self) -> LayerHooks:
        """The hooks that build the projections of a decoder's MLP, where a strategy treats these differently
        from the mixer's; their weights have the kind ``mlp``. Models ask the outermost strategy, which alone
        may split weights."""
        return self

    @left_within
    def linear_in(self, in_features: int, out_features: int) -> Linear:
        """The projection that opens a block: [..., in_features] -> [..., out_features or a part of it]."""
        return Linear(in_features, out_features)

    @left_within
    def grouped_linear_in(
        self, in_features: int, out_features: int, groups: int, *, bias: bool = False
    ) -> GroupedLinear:
        """Several projections of one input that open a block:
        [..., in_features] -> ``groups`` times [..., out_features or the same part of it]."""
        return GroupedLinear(in_features, out_features, groups, bias=bias)

    @left_within
    def separate_linear_in(
        self, in_features: int, out_features: Sequence[int], *, bias: bool = False
    ) -> SeparateLinear:
        """Several projections of one input that open a block, one matmul each: [..., in_features] -> [...,
        each of ``out_features`` or the same part of it]."""
        return SeparateLinear(in_features, out_features, bias=bias)

    @left_within
    def grouped_query_linear_in(
        self, in_features: int, head_size: int, heads: int, kv_heads: int, *, bias: bool = False
    ) -> GroupedQueryLinear:
        """The projection that opens grouped-query attention: [..., in_features] -> queries [..., G, Z/G, A],
        keys and values [..., G, A], for all ``heads`` and ``kv_heads`` or a part of them. ``kv_heads``
        divides ``heads``."""
        return GroupedQueryLinear(in_features, head_size, heads, kv_heads, bias=bias)

    @left_within
    def shared_by_heads(self, weight: Tensor) -> Tensor:
        """A weight that all heads share and every rank holds, wrapped for use on this rank's heads, so that
        its gradient counts the heads of all ranks."""
        return weight

    @left_within
    def features_for_heads(self, x: Tensor) -> Tensor:
        """Features x [B, L or a part, F] of this rank's positions -> features of the positions that the rank
        has between the projections of a block, for use by its heads."""
        return x

    @left_within
    def linear_in_text(self, in_features: int, out_features: int) -> Linear:
        """:meth:`linear_in` for an input that every rank has whole, even where sequences are cut."""
        return self.linear_in(in_features, out_features)

    @left_within
    def linear_out(self, in_features: int, out_features: int) -> Linear:
        """The projection that closes a block, without bias (the model adds it after the sum over ranks):
        [..., in_features or a part] -> [..., out_features]."""
        return Linear(in_features, out_features, bias=False)

    @left_within
    def embedding(self, vocabulary: int, hidden: int) -> nn.Module:
        """Word embedding: token ids [B, L] -> [B, L, hidden]; its ``weight`` is tied to the head."""
        return nn.Embedding(vocabulary, hidden)

    @left_within
    def vocabulary_parameter(self, *shape: int) -> nn.Parameter:
        """A parameter with a row for each vocabulary entry, split like the weight of :meth:`embedding`."""
        return nn.Parameter(torch.zeros(shape))

    @left_within
    def feature_parameter(self, initial: Tensor) -> nn.Parameter:
        """A parameter [H or a part of it] with a number for each feature between the projections of a block;
        ``initial`` [H] are its values."""
        return nn.Parameter(initial.to(torch.get_default_dtype()))

    @left_within
    def sequence_parameter(self, *shape: int) -> nn.Parameter:
        """A parameter whose last dim is the sequence, with a column for each position or a part of them."""
        return nn.Parameter(torch.empty(shape))

    @property_left_within
    def vocabulary_parts(self) -> int:
        """The number of parts that the vocabulary is split into; models pad the vocabulary to a multiple."""
        return 1

    @left_within
    def vocabulary_logits(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """Scores [B, L, V or a part of it] of x [B, L, H] against a :meth:`vocabulary_parameter` [V, H]."""
        return project(x, weight, bias)

    @left_within
    def cross_entropy(self, logits: Tensor, labels: Tensor, *, way: str | CrossEntropy) -> Tensor:
        """The loss of each token [B, L] in at least float32, from labels [B, L] and logits of
        :meth:`vocabulary_logits`, which nothing else may read. ``way`` is "plain", torch's own, or an
        implementation of :func:`cross_entropy_of`."""
        if way != "plain":
            return cross_entropy_of(way)(logits, labels, None)
        return F.cross_entropy(
            full_precision(logits).flatten(0, 1), labels.flatten(), reduction="none"
        ).view_as(labels)


def full_precision(x: Tensor) -> Tensor:
    """x in float32 if x is float16 or bfloat16, else x itself."""
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
