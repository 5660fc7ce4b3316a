"""Results that are not kept for backward, but made again when it needs them.

Activation checkpointing (:mod:`spbench.impls.models.blocks.recomputation`) runs a block again, with its last
operator. Here results are left out of what others keep, and made again from what is kept anyway
(Megatron-LM's CheckpointWithoutOutput, for moe_act, layernorm and mla_up_proj of --recompute-modules).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from spbench.impls.kernels.dropout import DropoutRandom
from spbench.impls.models.blocks.recomputation import recomputed


class _Remade:
    """What stands for results until backward reads one; several that kept them read the same ones."""

    def __init__(self, make: Callable[[], Sequence[Tensor]]):
        self._make = make
        self._made: Sequence[Tensor] | None = None

    def read(self) -> Sequence[Tensor]:
        if self._made is None:
            with torch.no_grad():
                self._made = self._make()
        return self._made


class _Kept:
    """What an operator keeps of a result: all of it, or a view."""

    def __init__(self, remade: _Remade, number: int, x: Tensor):
        self._remade, self._number = remade, number
        self._view = x.shape, x.stride(), x.storage_offset()

    def read(self) -> Tensor:
        return self._remade.read()[self._number].as_strided(*self._view)


def remade(results: Sequence[Tensor], make: Callable[[], Sequence[Tensor]]) -> AbstractContextManager[Any]:
    """Inside, what operators keep of ``results`` for backward is made again by ``make``, which must hold only
    what is kept anyway. They live on until all that kept one have run backward."""
    numbers, one = {x.untyped_storage()._cdata: number for number, x in enumerate(results)}, _Remade(make)

    def pack(x: Tensor) -> Any:
        number = numbers.get(x.untyped_storage()._cdata)
        return x if number is None else _Kept(one, number, x)

    def unpack(kept: Any) -> Tensor:
        return kept.read() if isinstance(kept, _Kept) else kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Ending(torch.autograd.Function):
    """Results of a block, as what it keeps, so that they are there when the block has run again."""

    @staticmethod
    def forward(ctx: Any, *results: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(*results)
        return tuple(x.view_as(x) for x in results)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, ...]:
        return gradients


def used_without_results(
    block: Callable[..., Sequence[Tensor]],
    use: Callable[..., Tensor],
    random: DropoutRandom,
    inputs: Sequence[Any],
) -> Tensor:
    """``use(*block(*inputs))``, where backward runs the block again, once, for its own gradients and for what
    ``use`` keeps of its results. What else ``use`` keeps is kept."""
    results = recomputed(lambda *inputs: _Ending.apply(*block(*inputs)), random, *inputs)
    # of the ending: it gives what it has kept once, which makes checkpoint run the block
    node: Any = results[0].grad_fn
    with remade(results, lambda: node.saved_tensors):
        return use(*results)
