"""Context parallelism of torch (torch.distributed.tensor.experimental): its ring attention.

torch dispatches scaled_dot_product_attention to its ring only for CUDA's operators, so this peer calls the
ring's own functions. They take the attention to one block as an argument, which is
:mod:`spbench.impls.kernels.flash_attention` on every device.
"""

import importlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from spbench.impls.kernels.flash_attention import flash_attention, flash_attention_backward
from spbench.impls.layout import Site
from spbench.impls.peers.peer import Peer
from spbench.impls.strategies.grid import as_sequences
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placed_chunks import PlacedChunks, PlacementOptions
from spbench.impls.traffic import Traffic

RINGS = "torch.distributed.tensor.experimental._attention"
FUNCTIONS = "torch.distributed.tensor.experimental._context_parallel._attention"
#: the dim of positions in [B, Z, L, A]
POSITIONS = 2


@dataclass(frozen=True)
class TorchContextParallelOptions(PlacementOptions):
    """Options of :class:`TorchContextParallel`.

    Attributes:
        placement: "contiguous", or "zigzag", which torch calls load balancing and has by default.
        rotate: how keys and values travel: "allgather", torch's default: to all ranks at once; "alltoall": to
            the next rank at each step.
    """

    rotate: str = "allgather"

    words = {"placement": ("contiguous", "zigzag"), "rotate": ("allgather", "alltoall")}


@contextmanager
def _ring_options(balanced: bool, rotate: str) -> Iterator[None]:
    """A context in which torch's ring has these options, which are global to the process."""
    rings: Any = importlib.import_module(RINGS)
    options = rings._cp_options
    before = options.enable_load_balance, options.rotate_method
    options.enable_load_balance = balanced
    rings.set_rotate_method(rotate)
    try:
        yield
    finally:
        options.enable_load_balance, options.rotate_method = before


def _forward_block(q: Tensor, k: Tensor, v: Tensor, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    return flash_attention(q, k, v, scale, is_causal)


def _backward_block(
    *,
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    logsumexp: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    return flash_attention_backward(grad_out, query, key, value, out, logsumexp, scale, is_causal)


class _Ring(torch.autograd.Function):
    """torch's ring attention: q [B, Z, L/N, A], k, v [B, G, L/N, A] -> [B, Z, L/N, A]."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, group: Any, causal: bool, options: tuple[bool, str]
    ) -> Tensor:
        ring = importlib.import_module(FUNCTIONS)._templated_ring_attention
        scale = q.shape[-1] ** -0.5
        with _ring_options(*options):
            o, lse = ring(group, POSITIONS, _forward_block, q, k, v, is_causal=causal, scale=scale)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.chosen = group, causal, scale, options
        return o

    @staticmethod
    def backward(ctx: Any, d_o: Tensor) -> tuple[Tensor | None, ...]:
        ring = importlib.import_module(FUNCTIONS)._templated_ring_attention_backward
        q, k, v, o, lse = ctx.saved_tensors
        group, causal, scale, options = ctx.chosen
        with _ring_options(*options):
            gradients = ring(
                group, POSITIONS, _backward_block, d_o, "grad_out", q, k, v, o, lse, causal, scale=scale
            )
        return *gradients, None, None, None


class TorchContextParallel(Peer, PlacedChunks):
    """Sequence chunks whose keys and values pass by all queries in torch's ring attention."""

    name = "torch_context_parallel"
    summary = "context parallelism of torch itself: its ring attention"
    source = "docs.pytorch.org/tutorials/unstable/context_parallel.html"
    requires = ("torch",)
    meets = frozenset({"attention", "causal_attention", "full_attention"})
    options_type = TorchContextParallelOptions
    options: TorchContextParallelOptions

    def load(self) -> None:
        importlib.import_module(RINGS)

    def communication(self, sites: Iterable[Site], element_bytes: int) -> Iterator[Traffic]:
        """Keys and values travel as ``rotate`` says, forward and backward. Their gradients, in float32, go
        from rank to rank for N steps, and end on the rank that owns the keys.

        A step from rank to rank is an all-to-all in which all bytes of a rank go to one other rank. The
        closed form and the meters count it as any other all-to-all: (N - 1) / N of the bytes.
        """
        for site in as_sequences(sites, self.grid_dim):
            if site.kind not in self.meets or self.size == 1:
                continue
            d = site.dims
            block = 2 * d["B"] * d.get("G", d["Z"]) * (d["L"] // self.size) * d["A"]
            for phase in ["forward", *(["backward"] if site.recomputed else []), "backward"]:
                if self.options.rotate == "allgather":
                    payload = block * self.size * element_bytes
                    yield Traffic(phase, "keys and values", "all_gather", site.count, payload)
                else:
                    steps = site.count * (self.size - 1)
                    yield Traffic(phase, "keys and values", "all_to_all", steps, block * element_bytes)
            yield Traffic("backward", "their gradients", "all_to_all", site.count * self.size, block * 4)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, meetings: Meetings) -> Tensor:
        placement = meetings.placement
        options = placement == "zigzag", self.options.rotate
        o: Tensor = _Ring.apply(q, k, v, self.group, placement is not None, options)
        return o
