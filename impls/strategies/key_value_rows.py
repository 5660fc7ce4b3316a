"""Keys and values of several positions in one message, and as views of it.

Shape letters: G heads of keys and values, D features of a key, A of a value, both A but in latent attention.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import torch
from torch import Tensor


class KeyValueRows(NamedTuple):
    """How rows [.., G (D + A)] hold the keys of all heads and then their values."""

    heads: int
    key_size: int
    value_size: int

    @classmethod
    def like(cls, k: Tensor, v: Tensor) -> Self:
        """Those of k [.., G, L, D] and v [.., G, L, A]."""
        return cls(k.shape[1], k.shape[3], v.shape[3])

    def joined(self, k: Tensor, v: Tensor) -> Tensor:
        """k [.., G, D] and v [.., G, A] as new rows."""
        if self.key_size == self.value_size:
            return torch.stack((k, v), -3).flatten(-3)
        rows = k.new_empty(*k.shape[:-2], self.heads * (self.key_size + self.value_size))
        for view, x in zip(self.separate(rows), (k, v), strict=True):
            view.copy_(x)
        return rows

    def separate(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Keys [.., G, D] and values [.., G, A] as views of rows."""
        k, v = rows.split([self.heads * self.key_size, self.heads * self.value_size], -1)
        return k.unflatten(-1, (self.heads, -1)), v.unflatten(-1, (self.heads, -1))
