"""Memory that is lent again and again and never given back, as Megatron-LM's GlobalMemoryBuffer."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


class ReusedBuffer:
    """One flat tensor a dtype, which grows to the largest shape that has been asked for. What was lent before
    may be overwritten."""

    def __init__(self) -> None:
        self._held: dict[torch.dtype, Tensor] = {}

    def take(self, shape: Sequence[int], like: Tensor) -> Tensor:
        """Memory of that shape, with the dtype and the device of ``like``."""
        elements = math.prod(shape)
        held = self._held.get(like.dtype)
        if held is None or held.numel() < elements:
            held = self._held[like.dtype] = like.new_empty(elements)
        return held[:elements].view(tuple(shape))
