"""Results that are not kept for backward, but made again when it needs them.

Activation checkpointing (:mod:`spbench.impls.models.blocks.recomputation`) runs a block again, with its last
operator. Here one result is left out of what others keep, and made again from what is kept anyway
(Megatron-LM's CheckpointWithoutOutput, for moe_act and layernorm of --recompute-modules).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor


class _Remade:
    """What stands for a result until backward reads it; several that kept it read the same one."""

    def __init__(self, make: Callable[[], Tensor]):
        self._make = make
        self._made: Tensor | None = None

    def read(self) -> Tensor:
        if self._made is None:
            with torch.no_grad():
                self._made = self._make()
        return self._made


class _Kept:
    """What an operator keeps of a result: all of it, or a view."""

    def __init__(self, remade: _Remade, x: Tensor):
        self._remade = remade
        self._view = x.shape, x.stride(), x.storage_offset()

    def read(self) -> Tensor:
        return self._remade.read().as_strided(*self._view)


def remade(result: Tensor, make: Callable[[], Tensor]) -> AbstractContextManager[Any]:
    """Inside, what operators keep of ``result`` for backward is made again by ``make``, which must hold only
    what is kept anyway. It lives on until all that kept it have run backward."""
    storage, one = result.untyped_storage()._cdata, _Remade(make)

    def pack(x: Tensor) -> Any:
        return _Kept(one, x) if x.untyped_storage()._cdata == storage else x

    def unpack(kept: Any) -> Tensor:
        return kept.read() if isinstance(kept, _Kept) else kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)
