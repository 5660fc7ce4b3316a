"""Sequence parallelism of Open-Sora 1.0 (March and April 2024), which its code calls DeepSpeed-Ulysses.

hpcaitech/Open-Sora at v1.0.0: SeqParallelAttention and SeqParallelMultiHeadCrossAttention in
opensora/models/layers/blocks.py, STDiTBlock in opensora/models/stdit/stdit.py, all_to_all in
opensora/acceleration/communications.py. By date, authors and numbers it is in all likelihood the baseline
"DS-Ulysses" of DSP's first version (arXiv 2403.10266, Figure 3); no text says so.

Positions [B, T, S] are cut along the frames T, and every attention swaps heads for positions:

- temporal attention has T/N frames of a place, and swaps these for all T frames of Z/N heads: Ulysses.
- spatial attention has all S places of T/N frames already, and swaps nevertheless. It puts the places of N
  frames of other ranks, t, t + T/N, t + 2T/N, ..., one after another and attends over all N S places with Z/N
  heads. That is (T/N) (N S)^2 (Z/N) = T S^2 Z scores: as many as one device computes, not an N-th of these;
  and a frame attends to other frames (reported by a user, hpcaitech/Open-Sora issue 296; from v1.2 on spatial
  attention cuts places).
- attention to the text gathers all T S queries of Z/N heads. These messages are useless, since every rank has
  the text; and a kernel of FlashAttention-2's design runs its backward in a thread block for each 128 keys
  and head, of which only Z/N are left.

So a block sends 4 + 4 + 2 = 10 M/N forward and as much backward, where Ulysses along the frames sends 4 M/N
and DSP 2 M/N (M the bytes of B T S H elements). Queries, keys and values go in one all-to-all of lists of
pieces: a contiguous piece is made for each rank, and the received pieces are joined.
"""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from spbench.impls.as_published.as_published import AsPublished
from spbench.impls.collectives import scatter_to_group
from spbench.impls.layout import Site, Unsupported, nearest_divisors
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.grid import grid_of, whole_attention
from spbench.impls.strategies.sequence_chunks import SequenceChunks
from spbench.impls.traffic import Traffic

#: the grid dim that is cut: the frames
FRAMES = 0
#: the dims of positions and of heads in [lines, positions, Z, A]
POSITIONS, HEADS = 1, 2


class OpenSoraUlysses(AsPublished, SequenceChunks):
    """Frames are cut; all-to-alls swap positions for heads in every attention, whether or not they are
    whole."""

    name = "ulysses_opensora"
    summary = "Open-Sora 1.0's sequence parallelism, the likely baseline of DSP's figures"
    source = "github.com/hpcaitech/Open-Sora, v1.0.0"
    departs = (
        "spatial attention joins the places of N frames, one of each rank, so a frame attends to N - 1 others"
    )
    meets = frozenset({"full_attention"})

    def on_one_device(self) -> Strategy:
        return JoinedFrames(self.size)

    def check_sizes(self, sites: Sequence[Site]) -> None:
        for site in sites:
            heads = site.dims.get("Z", self.size)
            if heads % self.size:
                raise Unsupported(
                    f"{heads} attention heads cannot be split over {self.size} ranks",
                    f"use {nearest_divisors(heads, self.size)}",
                )

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        for site in sites:
            if site.kind not in ("full_attention", "text_attention"):
                continue
            d = site.dims
            positions = d["B"] * element_bytes
            for size in grid_of(site):
                positions *= size
            message = positions // self.size * d["Z"] * d["A"]
            text = site.kind == "text_attention"
            for phase in ["forward", *(["backward"] if site.recomputed else []), "backward"]:
                there = "queries to a text" if text else "queries, keys and values"
                yield Traffic(phase, there, "all_to_all", site.count, message if text else 3 * message)
                yield Traffic(phase, "attention's output", "all_to_all", site.count, message)
            if text:
                of_text = 2 * d["B"] * d["W"] * d["Z"] * d["A"] * element_bytes
                yield Traffic("backward", "gradients of a text's keys", "all_gather", site.count, of_text)

    def grid_attention(self, q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
        if self.size == 1:
            return super().grid_attention(q, k, v, dim)
        lines = [x.movedim(dim + 1, -3) for x in (q, k, v)]
        shape = lines[0].shape[:-3]
        # a rank has some frames or all places of a line; the swap gathers in either case
        gathered = self._swap([x.flatten(0, -4) for x in lines], HEADS, POSITIONS)
        y = whole_attention(*(x.transpose(1, 2) for x in gathered)).transpose(1, 2)
        (y,) = self._swap([y], POSITIONS, HEADS)
        return y.unflatten(0, shape).movedim(-3, dim + 1)

    def text_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if self.size == 1:
            return super().text_attention(q, k, v)
        (queries,) = self._swap([q.flatten(1, -3)], HEADS, POSITIONS)  # [B, T S, Z/N, A]
        keys, values = self._of_own_heads(torch.stack((k, v))).transpose(2, 3)
        y = whole_attention(queries.transpose(1, 2), keys, values).transpose(1, 2)
        (y,) = self._swap([y], POSITIONS, HEADS)
        return y.unflatten(1, q.shape[1:-2])

    def _of_own_heads(self, text: Tensor) -> Tensor:
        """This rank's heads [2, B, W, Z/N, A] of a text's keys and values [2, B, W, Z, A], which all ranks
        compute. Backward gathers the gradients of all heads on every rank, and divides them by N, because the
        later sum over ranks counts each gradient N times."""
        if text.requires_grad:
            text.register_hook(lambda gradient: gradient / self.size)
        return scatter_to_group(text, 3, self.group)

    def _swap(self, tensors: Sequence[Tensor], split_dim: int, gather_dim: int) -> Sequence[Tensor]:
        """:func:`spbench.impls.collectives.all_to_all` of several tensors of one shape in one message."""
        swapped: Tensor = _Swap.apply(self.group, split_dim, gather_dim, *tensors)
        return swapped.unbind()


class JoinedFrames(Strategy):
    """One device whose spatial attention joins frames as ``ranks`` ranks of :class:`OpenSoraUlysses` do."""

    name = "joined_frames"

    def __init__(self, ranks: int):
        super().__init__()
        self.ranks = ranks

    def grid_attention(self, q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
        if dim == FRAMES:
            return super().grid_attention(q, k, v, dim)
        # [B, T, S, Z, A] -> [B, T/N, N S, Z, A]: frames t, t + T/N, ... of all ranks
        each = q.shape[1] // self.ranks
        q, k, v = (x.unflatten(1, (self.ranks, each)).transpose(1, 2).flatten(2, 3) for x in (q, k, v))
        y = super().grid_attention(q, k, v, dim)
        return y.unflatten(2, (self.ranks, -1)).transpose(1, 2).flatten(1, 2)


class _Swap(torch.autograd.Function):
    """K tensors [...], whole along ``split_dim`` and this rank's part along ``gather_dim`` -> one tensor
    [K, ...], whole along ``gather_dim`` and cut along ``split_dim``: one all-to-all of lists of N pieces."""

    @staticmethod
    def forward(ctx: Any, group: dist.ProcessGroup, split_dim: int, gather_dim: int, *x: Tensor) -> Tensor:
        ctx.group, ctx.dims = group, (split_dim, gather_dim)
        pieces = zip(*(each.chunk(group.size(), split_dim) for each in x), strict=True)
        # stacking copies once, as making a piece of one tensor of all heads contiguous does
        return _exchanged([torch.stack(piece) for piece in pieces], gather_dim + 1, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        split_dim, gather_dim = ctx.dims
        pieces = gradient.chunk(ctx.group.size(), gather_dim + 1)
        back = _exchanged([piece.contiguous() for piece in pieces], split_dim + 1, ctx.group)
        return None, None, None, *back.unbind()


def _exchanged(pieces: list[Tensor], gather_dim: int, group: dist.ProcessGroup) -> Tensor:
    """Sends piece r to rank r; returns the received pieces, joined along ``gather_dim``."""
    received = [torch.empty_like(piece) for piece in pieces]
    dist.all_to_all(received, pieces, group=group)
    return torch.cat(received, gather_dim)
