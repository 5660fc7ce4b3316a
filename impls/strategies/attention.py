"""The kinds of attention that models ask for, in which positions of a sequence meet, on a single device.

Shape letters: B batch, L sequence, Z heads, G heads of keys and values, A head size, D size of queries and
keys of linear attention, K Linformer's projected length.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.collectives import ReusedBuffer
from spbench.impls.kernels.chosen_attention import Choice, Index, Near, attention_to_chosen
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.dropout import DropoutRandom
from spbench.impls.kernels.dropout_attention import dropout_flash_attention
from spbench.impls.kernels.flash_attention import causal_flash_attention
from spbench.impls.kernels.linear_attention import BLOCK, linear_attention, quadratic_linear_attention
from spbench.impls.kernels.packed_linear_attention import packed_linear_attention
from spbench.impls.kernels.projection import strided_product
from spbench.impls.kernels.ranged_attention import ranged_flash_attention
from spbench.impls.kernels.sinks import attention_with_sinks
from spbench.impls.kernels.softmax import masked_softmax, softmax_of_scores
from spbench.impls.layout import HEEDS_ALL
from spbench.impls.strategies.delegation import left_within, property_left_within
from spbench.impls.strategies.head_sources import HeadSource

#: "chunked" takes time linear in L, because it keeps a D x A state; "left_product" multiplies scores and
#: values tile by tile, in L x L time and without memory for scores; "quadratic" stores all scores [L, L],
#: with torch's own operators
LINEAR_ATTENTION_WAYS = {
    "chunked": linear_attention,
    "left_product": lambda q, k, v, decay: linear_attention(q, k, v, decay, block=q.shape[2]),
    "quadratic": quadratic_linear_attention,
}


class AttentionHooks:
    """How do positions of a sequence meet? The defaults hold where this rank has all keys and values that its
    queries attend to, for the heads of its own projections."""

    #: features of attention that the class respects in addition to the causal mask (keys of HEEDED), by the
    #: kind of site; a class that overrides how positions meet must list its own
    heeds: ClassVar[Mapping[str, frozenset[str]]] = HEEDS_ALL
    random: DropoutRandom
    within: AttentionHooks | None
    if TYPE_CHECKING:

        @property
        def outermost(self) -> AttentionHooks: ...

    @property_left_within
    def attention_axes(self) -> tuple[str, ...]:
        """The mesh axes over which attention probabilities are spread: ranks along these axes draw different
        dropout masks, ranks along all other axes draw the same."""
        return ()

    @left_within
    def attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, softmax: str
    ) -> Tensor:
        """Softmax attention: q, k, v [B, Z, L or a part, A] -> [B, Z, L or a part, A].

        ``mask`` [B, 1, 1 or queries, L] is True where a query must not attend to a key: its key dim is always
        whole, its query dim this rank's. ``softmax`` is an implementation of :func:`masked_softmax`.
        """
        return self.local_attention(q, k, v, mask, dropout=dropout, softmax=softmax)

    @left_within
    def local_attention(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, dropout: float, softmax: str
    ) -> Tensor:
        """Softmax attention where this rank already holds all keys that its queries need:
        q [B, Z, queries, A], k, v [B, Z, keys, A] -> [B, Z, queries, A]."""
        scores = torch.matmul(q, k.transpose(-1, -2))
        probabilities = masked_softmax(scores, mask, q.shape[-1] ** -0.5, softmax)
        del scores
        probabilities = self.random.dropout(probabilities, dropout, self.outermost.attention_axes)
        return torch.matmul(probabilities, v)

    @left_within
    def causal_attention(
        self, q: Tensor, k: Tensor, v: Tensor, attended: Attended = CAUSAL, sinks: Tensor | None = None
    ) -> Tensor:
        """Causal softmax attention, scores scaled by A**-0.5: q [B, Z, L or a part, A], k, v [B, G, L or a
        part, A] -> [B, Z, L or a part, A], for the heads of this rank's projections.

        G divides Z: each head of k and v serves Z/G consecutive heads of q (grouped queries, arXiv
        2305.13245). ``attended`` limits the earlier positions that a position attends to; by default it
        attends to all. ``sinks`` [Z] are logits of these heads that join the softmax's denominators
        (:mod:`spbench.impls.kernels.sinks`).
        """
        whole = [(0, q.shape[2])]
        ranges = None if attended.plain else attended.ranges(whole, whole)
        if sinks is not None:
            return attention_with_sinks(q, k, v, sinks, True if ranges is None else ranges)
        return causal_flash_attention(q, k, v) if ranges is None else ranged_flash_attention(q, k, v, ranges)

    def projected_attention(self, x: Tensor, heads: HeadSource) -> Tensor:
        """Causal softmax attention of the queries, keys and values that ``heads`` projects from x [B, L or a
        part, H] -> [B, Z, L or a part, A]. By default ``heads`` projects all at once, for
        :meth:`causal_attention`; a strategy that projects in parts overrides this method. An outer strategy
        with its own ``causal_attention`` does not call the method of the strategy within."""
        if self.within is None or type(self).causal_attention is not AttentionHooks.causal_attention:
            return heads.attend_whole(x)
        return self.within.projected_attention(x, heads)

    @left_within
    def indexed_attention(
        self, q: Tensor, rows: Tensor | None, index: Index | None, how: Choice, near: Near | None = None
    ) -> Tensor:
        """Softmax attention to rows that an indexer chooses: q [B, L or a part, Z, F] for all heads, rows
        [B, L or a part, F] of the latent and the key features that heads share, or one for each block of
        positions, what the indexer makes of these positions, and what lies ``near`` queries
        -> [B, L or a part, Z, C]; see :func:`attention_to_chosen`."""
        return attention_to_chosen(q, rows, index, how, near=near)

    @left_within
    def attended_pairs(self, attended: Attended, length: int) -> int:
        """Number of pairs, per head, of this rank's queries and any rank's keys that meet in causal attention
        of a sequence of ``length`` positions."""
        return int(attended.pairs([(0, length)]).sum())

    @left_within
    def scored_pairs(self, length: int) -> int:
        """Number of pairs, per head, of this rank's queries and any rank's keys for which linear attention
        computes a score, where this number differs between ranks; 0: all ranks have the same work."""
        return 0

    @left_within
    def whole_attention(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        dropout: float,
        scores: str | None = None,
        into: ReusedBuffer | None = None,
        mask: Tensor | None = None,
        clear: bool = False,
    ) -> Tensor:
        """Softmax attention with dropout of probabilities, or with all scores in memory, where this rank has
        all positions of its heads: q [B, Z, L, A], k, v [B, G, L, A] -> [B, Z, L, A], grouped as in
        :meth:`causal_attention`.

        Args:
            scores: None: no tensor holds scores (causal flash attention). Else scores are stored, with this
                implementation of :func:`softmax_of_scores`; k and v then have as many heads as q.
            into: lends the memory for the scores, as Megatron-LM's buffer does; only if ``scores`` is a name.
            mask: [B, 1, 1 or L, L], True where a query must not attend to a key; only if ``scores`` is a
                name; None: the causal mask.
            clear: set probabilities under the mask to 0, which a query needs whose keys are all masked.
        """
        axes = self.outermost.attention_axes
        if scores is None:
            return dropout_flash_attention(q, k, v, dropout, self.random.next_seed(axes))
        if into is not None:
            # the matmul does not add to this memory, so its old values are never read
            into.take((*q.shape[:3], k.shape[2]), q)
        products = strided_product(q, k.mT, q.shape[-1] ** -0.5)
        probabilities = softmax_of_scores(products, mask, scores)
        del products
        if clear and mask is not None:
            probabilities = probabilities.masked_fill(mask, 0)
        return strided_product(self.random.dropout(probabilities, dropout, axes), v)

    @left_within
    def linear_attention(self, q: Tensor, k: Tensor, v: Tensor, mask: DecayMask) -> Tensor:
        """Causal linear attention, o_i = sum over j <= i of exp(-s (i - j)) (q_i . k_j) v_j, unscaled: q, k
        [B, Z, L or a part, D], v [B, Z, L or a part, A] -> [B, Z, L or a part, A].

        ``mask`` holds the decay rate s of every head of the layer, also of other ranks' heads, and ``way``, a
        key of LINEAR_ATTENTION_WAYS. q, k and v may be views, which backward keeps as they are. The state
        starts from zero in each of the mask's documents.
        """
        decay, way, lengths = mask.rates, mask.way, mask.attended.documents
        if way not in LINEAR_ATTENTION_WAYS:
            raise ValueError(f"linear attention is {' or '.join(LINEAR_ATTENTION_WAYS)}, not {way!r}")
        if not lengths:
            return LINEAR_ATTENTION_WAYS[way](q, k, v, decay)
        if way != "quadratic":
            block = q.shape[2] if way == "left_product" else BLOCK
            return packed_linear_attention(q, k, v, decay, lengths, block=block)
        queries, keys, values = (x.split(lengths, 2) for x in (q, k, v))
        documents = zip(queries, keys, values, strict=True)
        return torch.cat([quadratic_linear_attention(*document, decay) for document in documents], 2)

    @left_within
    def project_sequence(self, x: Tensor, weight: Tensor) -> Tensor:
        """Linformer's projection of keys or values along the sequence: x [B, Z, L or a part, A] and a weight
        [K, L or a part] of :meth:`sequence_parameter` -> [B, Z, K, A], complete on every rank."""
        return torch.matmul(weight, x)
