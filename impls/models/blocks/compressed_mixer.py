"""DeepSeek-V4's attention to compressed blocks of positions, as the mixer of a layer: compressed sparse
attention (CSA, section 2.3.1 of its report), heavily compressed attention (HCA, 2.3.2), or neither, as
transformers' deepseek_v4 has them.

Each position has one row of A features, which is the key and the value of all heads. A query attends to the
rows of the W positions up to its own and to rows that stand for blocks of m positions, of which a query sees
those that end at or before it. A block's row is a sum of its positions' values, weighted for each feature by
the softmax of gates; values and gates are projections of the hidden state, and each place in a block has a
bias of its gates. In HCA, m = 128, a query attends to all blocks. In CSA, m = 4, blocks overlap: a position
has two values and two gates, one for its own block and one for the next. There an indexer, whose keys are
made of blocks in the same way, chooses K blocks; it is frozen (:mod:`spbench.impls.models.blocks.indexer`).

RoPE turns R features of queries and rows, a block's by the block's first position. A row is also the
value, so the output is turned back by its query's position. The heads' outputs are projected in O groups to P
features each, and these to the hidden state.

Left out, because DeepSeek-V4's layers have more than attention: hyper-connections of several residual
streams, routing by a hash of the token in the first layers, and other bases of RoPE in layers of blocks.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, Z heads, Q
features of the latent of queries, A head size; S features of a block's row: A, or D of an index key; E 2
where blocks overlap, else 1; J heads of the indexer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn

from spbench.impls.kernels.decay import state_dtype
from spbench.impls.models.blocks.attention_mixer import AttentionMixer
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.indexer import IndexedAttention, Indexer, attend_to_chosen, turned_first
from spbench.impls.models.blocks.norms import norm_of
from spbench.impls.models.blocks.places import Places
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.layers import Linear


@dataclass(frozen=True)
class CompressedAttention(IndexedAttention):
    """The kind of mixer that is attention to blocks; ``block`` is m, 0 in a layer without blocks.

    Attributes:
        near: W.
        groups, group_size: O and P.
    """

    near: int = 128
    groups: int = 8
    group_size: int = 1024

    @property
    def row_sizes(self) -> Sequence[int]:
        """S of the rows that a layer makes of blocks: those that heads attend to, and index keys."""
        return [self.key_size, *([self.index_head_dim] if self.index_n_heads else [])] if self.block else []

    @property
    def overlap(self) -> int:
        """E."""
        return 2 if self.index_n_heads else 1

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return CompressedMixer(self, model, strategy)

    def width(self, model: DecoderOptions) -> int:
        return self.groups * self.group_size

    def _of_blocks(self, model: DecoderOptions, size: int) -> int:
        of_norm = (2 if model.norm == "layer" else 1) * size
        return self.overlap * size * (2 * model.hidden + self.block) + of_norm

    def untrained(self, model: DecoderOptions) -> int:
        queries = (self.q_lora_rank or 0) * self.index_head_dim + model.hidden
        of_keys = self._of_blocks(model, self.index_head_dim) if self.index_n_heads else 0
        return queries * self.index_n_heads + of_keys

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        rank, of_heads = self.q_lora_rank or 0, model.heads * self.kv_lora_rank
        whole = (model.hidden + (2 if model.norm == "layer" else 1)) * (rank + self.kv_lora_rank)
        whole += of_heads * self.group_size + self.untrained(model)
        whole += self._of_blocks(model, self.kv_lora_rank) if self.block else 0
        split = rank * of_heads + self.width(model) * model.hidden + model.heads
        return {"split": split, "whole": whole}

    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        sizes = self.row_sizes
        dims = {"B": batch, "L": seq_len, "Z": model.heads, "m": self.block or 1, "W": self.near}
        passed = (self.near - 1) * self.kv_lora_rank + (2 * self.block * sum(sizes) if sizes[1:] else 0)
        of_rows = dict(zip("FD", (*sizes, 0, 0), strict=False))
        attends = Site("indexed_attention", 1, dims | of_rows, again or model.recomputes("core_attn"))
        return [Site("rows_before", 1, dims | {"F": passed}, again), attends]


class Blocks(nn.Module):
    """Makes rows of blocks, x [B, L, H] -> [B, L / m, S], in steps, because a block may need values and gates
    of the block before."""

    def __init__(self, kind: CompressedAttention, model: DecoderOptions, size: int):
        super().__init__()
        self.size = size
        self.values, self.gates = (Linear(model.hidden, kind.overlap * size, bias=False) for _ in range(2))
        self.bias = nn.Parameter(torch.zeros(kind.block, kind.overlap * size))
        self.norm = norm_of(model, size)

    def projected(self, x: Tensor) -> Tensor:
        """Values and gates [B, 2, L / m, m, E S]."""
        values, gates = (y.project(x).unflatten(1, (-1, len(self.bias))) for y in (self.values, self.gates))
        return torch.stack((values, gates + self.bias), 1)

    def forward(self, projected: Tensor, before: Tensor | None, first: bool) -> Tensor:
        """The rows; ``before``: values and gates for the next block [B, 2, 1, m, S] of the block before the
        first one, None where blocks do not overlap; ``first``: there is no block before."""
        if before is not None:
            # a sum on all ranks, whose programs are so alike
            before = before + before.new_tensor([0.0, -torch.inf if first else 0.0]).view(2, 1, 1, 1)
            of_next, own = projected.split(self.size, -1)
            projected = torch.cat((torch.cat((before, of_next[:, :, :-1]), 2), own), 3)
        values, gates = projected.unbind(1)
        weights = gates.to(state_dtype(gates.dtype)).softmax(2).to(values.dtype)
        return cast(Tensor, self.norm((values * weights).sum(2)))


class CompressedMixer(AttentionMixer):
    """The module of attention to blocks, x [B, L, H] -> [B, L, H]."""

    kind: CompressedAttention

    def __init__(self, kind: CompressedAttention, model: DecoderOptions, strategy: Strategy):
        super().__init__(kind, model, strategy)
        assert kind.q_lora_rank is not None
        hidden, size = model.hidden, kind.kv_lora_rank
        self.q_down = Linear(hidden, kind.q_lora_rank, bias=False)
        self.q_norm = norm_of(model, kind.q_lora_rank)
        self.q_up = strategy.grouped_linear_in(kind.q_lora_rank, model.heads * size, 1)
        self.head_norm = norm_of(model, size, weighted=False)
        self.row, self.row_norm = Linear(hidden, size, bias=False), norm_of(model, size)
        self.blocks = nn.ModuleList(Blocks(kind, model, each) for each in kind.row_sizes)
        self.blocks[1:].requires_grad_(False)
        self.indexer = Indexer(kind, hidden) if kind.index_n_heads else None
        of_group = model.heads * size // kind.groups
        self.grouped = nn.Parameter(torch.empty(kind.groups, kind.group_size, of_group))
        self.close()
        self.adapt_closing()

    def forward(self, x: Tensor, places: Places) -> Tensor:
        kind, of_blocks = self.kind, places.part(slice(None, None, self.kind.block or 1))
        of_queries = self.q_norm(self.q_down.project(x))
        q = self.q_up.project(of_queries, None).unflatten(-1, (-1, kind.kv_lora_rank))
        q = self._turned(self.head_norm(q), places)
        own = self._turned(self.row_norm(self.row.project(x)), places)
        # the indexer is frozen, so nothing is kept for its backward
        makers = cast(Sequence[Blocks], self.blocks)
        made = [maker.projected(y) for maker, y in zip(makers, (x, x.detach()), strict=False)]
        given = [y[:, :, -1:, :, : y.shape[-1] // 2] for y in made] if kind.index_n_heads else []
        before, *received = self._before(own[:, 1 - kind.near :], *given)
        rows = [
            self._turned(maker(y, z, self.strategy.sequence_part == 0), of_blocks)
            for maker, y, z in zip(makers, made, [*received, None], strict=False)
        ]
        index = None
        if self.indexer is not None:
            index = self.indexer(x, of_queries, partial(self.turned, places=places), rows[1].detach())
        assert self.sinks is not None
        near = torch.cat((before, own), 1), self.sinks
        y = attend_to_chosen(self, q, rows[0] if rows else None, index, places, *near)
        y = self._turned(y, places.part(slice(None), back=True)).flatten(2).unflatten(2, (kind.groups, -1))
        return self.closed(torch.einsum("blgf,gpf->blgp", y, self.grouped).flatten(2))

    def _before(self, *last: Tensor) -> Sequence[Tensor]:
        """What lies before this rank's positions, like its own ``last`` rows; unused on the first rank."""
        rows = self.strategy.rows_before(torch.cat([x.flatten(1) for x in last], 1).unsqueeze(1))
        if rows is None:
            return [torch.zeros_like(x) for x in last]
        parts = rows.squeeze(1).split([x[0].numel() for x in last], 1)
        return [part.view(x.shape) for part, x in zip(parts, last, strict=True)]

    def _turned(self, x: Tensor, places: Places) -> Tensor:
        """x [B, L, ..., A] with its first R features turned by RoPE."""
        return turned_first(x, self.kind.qk_rope_head_dim, partial(self.turned, places=places))
