"""The places of a rank's positions in the sequence, and the angles of RoPE that follow from the places.

Shape letters: L sequence (this rank's part of it, where a strategy chunks it), A head size.
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from spbench.impls.attended import CAUSAL, Attended
from spbench.impls.strategies.base import Strategy


def places_in_documents(seq_len: int, attended: Attended, device: torch.device) -> Tensor:
    """The place of each position of a whole sequence in its document, from 0, as integers [L]."""
    whole = torch.arange(seq_len, device=device)
    if not attended.documents:
        return whole
    lengths = torch.tensor(attended.documents, device=device)
    return whole - (lengths.cumsum(0) - lengths).repeat_interleave(lengths, output_size=seq_len)


class Places:
    """The places in the sequence of the positions that this rank has between the projections of a block, and
    the tensors of RoPE that layers share. Each tensor is made at its first use.

    Args:
        seq_len: the length of the whole sequence.
        like: a tensor with the activations' dtype and device.
        attended: names the documents of a packed sequence; places count from 0 in each document.
    """

    def __init__(self, strategy: Strategy, seq_len: int, like: Tensor, attended: Attended = CAUSAL):
        self.strategy, self.seq_len, self.attended = strategy, seq_len, attended
        self.dtype, self.device = like.dtype, like.device
        #: cos and sin by features and base: layers with a window may have another base than other layers
        self._rotary: dict[tuple[int, float], tuple[Tensor, Tensor]] = {}
        self._angles: dict[tuple[int, float], Tensor] = {}
        #: the layer that last called ``rotary_of_layer``, with its cos and sin
        self._of_layer: tuple[object, Tensor, Tensor] | None = None

    @cached_property
    def positions(self) -> Tensor:
        """The places [L] in at least float32, because bfloat16 cannot tell position 256 from 257."""
        precise = torch.float64 if self.dtype is torch.float64 else torch.float32
        whole = places_in_documents(self.seq_len, self.attended, self.device)
        return self.strategy.block_part(whole, 0).to(precise)

    def turned(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """The cos and the sin [..., L, A] of theta [..., A] times each place."""
        angle = theta.to(self.positions.dtype).unsqueeze(-2) * self.positions.unsqueeze(-1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def theta(self, head_size: int, base: float) -> Tensor:
        """The angle [A/2] by which RoPE turns each pair of features from one position to the next."""
        powers = torch.arange(0, head_size, 2, dtype=torch.float64, device=self.device)
        return (base ** (-powers / head_size)).to(self.positions.dtype)

    def rotary(self, head_size: int, base: float) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin [L, A/2], which all layers of this head size and base share."""
        key = head_size, base
        if key not in self._rotary:
            self._rotary[key] = self.turned(self.theta(*key))
        return self._rotary[key]

    def rotary_of_layer(self, layer: object, head_size: int, base: float) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin [L, A], with each angle twice, made again for each layer."""
        if self._of_layer is None or self._of_layer[0] is not layer:
            theta = self.theta(head_size, base)
            angle = theta * self.positions.unsqueeze(-1)
            both = torch.cat((angle, angle), -1)
            self._of_layer = layer, both.cos().to(self.dtype), both.sin().to(self.dtype)
        return self._of_layer[1:]

    def angles(self, head_size: int, base: float) -> Tensor:
        """RoPE's angles [L, A], with each angle twice, in at least float32, which all layers share."""
        key = head_size, base
        if key not in self._angles:
            angle = self.theta(*key) * self.positions.unsqueeze(-1)
            self._angles[key] = torch.cat((angle, angle), -1)
        return self._angles[key]

    def part(self, positions: slice, *, back: bool = False) -> Places:
        """The places at a slice of these positions; with ``back`` RoPE turns back, as its gradient needs."""
        return _PartOfPlaces(self, positions, back)


class _PartOfPlaces(Places):
    """Views of the angles of ``whole`` at a slice of its positions."""

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
