"""Where the positions of a rank lie in the sequence, and the angles of RoPE that follow from it.

Shape letters: L sequence (this rank's part of it, where a strategy chunks it), A head size.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.strategies.base import Strategy


def places_in_documents(seq_len: int, attended: Attended, device: torch.device) -> Tensor:
    """Where each position of a sequence lies in its document, from 0 [L]."""
    whole = torch.arange(seq_len, device=device)
    if not attended.documents:
        return whole
    lengths = torch.tensor(attended.documents, device=device)
    return whole - (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=seq_len)


class Places:
    """Where the positions lie in the sequence that this rank has between the projections of a block, and what
    all layers share that follows from it. Made when first asked for.

    Args:
        seq_len: of the whole sequence.
        like: a tensor with the activations' dtype and device.
        attended: with the documents that the sequence is packed of; positions are counted in each anew.
    """

    def __init__(self, strategy: Strategy, seq_len: int, like: Tensor, attended: Attended = CAUSAL):
        self.strategy, self.seq_len, self.attended = strategy, seq_len, attended
        self.dtype, self.device = like.dtype, like.device
        #: by features and base, which differ between layers with a window and without
        self._rotary: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}
        self._angles: dict[tuple[int, float], Tensor] = {}
        #: the layer that asked last, with its cos and sin
        self._of_layer: tuple[object, Tensor, Tensor] | None = None

    @cached_property
    def positions(self) -> Tensor:
        """[L], in a precision for angles: bfloat16 cannot tell position 256 from 257."""
        precise = torch.float64 if self.dtype is torch.float64 else torch.float32
        whole = places_in_documents(self.seq_len, self.attended, self.device)
        return self.strategy.block_part(whole, 0).to(precise)

    def turned(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of theta [..., A] times each position: [..., L, A]."""
        angle = theta.to(self.positions.dtype).unsqueeze(-2) * self.positions.unsqueeze(-1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def theta(self, head_size: int, base: float) -> Tensor:
        """What RoPE turns each pair of features by from one position to the next [A/2]."""
        powers = torch.arange(0, head_size, 2, dtype=torch.float64, device=self.device)
        return (base ** (-powers / head_size)).to(self.positions.dtype)

    def rotary(self, head_size: int, base: float) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin [L, A/2], made for the first layer that asks and kept for the others."""
        key = head_size, base
        if key not in self._rotary:
            self._rotary[key] = self.turned(self.theta(*key))
        return self._rotary[key]

    def rotary_of_layer(self, layer: object, head_size: int, base: float) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin [L, A], each twice, made anew for each layer that asks."""
        if self._of_layer is None or self._of_layer[0] is not layer:
            theta = self.theta(head_size, base)
            angle = theta * self.positions.unsqueeze(-1)
            both = torch.cat((angle, angle), -1)
            self._of_layer = layer, both.cos().to(self.dtype), both.sin().to(self.dtype)
        return self._of_layer[1:]

    def angles(self, head_size: int, base: float) -> Tensor:
        """RoPE's angles [L, A], each twice, in at least float32 as libraries hold them; made once."""
        key = head_size, base
        if key not in self._angles:
            angle = self.theta(*key) * self.positions.unsqueeze(-1)
            self._angles[key] = torch.cat((angle, angle), -1)
        return self._angles[key]

    def part(self, positions: slice, *, back: bool = False) -> Places:
        """The angles of some of these positions; with ``back`` RoPE turns the other way, as its gradient."""
        return _PartOfPlaces(self, positions, back)


class _PartOfPlaces(Places):
    """Angles of some positions of ``whole``, which holds them."""

    def __init__(self, whole: Places, part: slice, back: bool):
        self.whole, self.part_of_whole, self.back = whole, part, back

    def rotary(self, head_size: int, base: float) -> tuple[Tensor, Tensor]:
        cos, sin = (x[self.part_of_whole] for x in self.whole.rotary(head_size, base))
        return cos, -sin if self.back else sin

    def rotary_of_layer(self, layer: object, head_size: int, base: float) -> tuple[Tensor, Tensor]:
        cos, sin = (x[self.part_of_whole] for x in self.whole.rotary_of_layer(layer, head_size, base))
        return cos, -sin if self.back else sin

    def angles(self, head_size: int, base: float) -> Tensor:
        angles = self.whole.angles(head_size, base)[self.part_of_whole]
        return -angles if self.back else angles
