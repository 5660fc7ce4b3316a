"""Activation checkpointing: a block's input is kept, and backward runs the block again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from impls.random import DropoutRandom


def recomputed(block: Callable[..., Tensor], random: DropoutRandom, *inputs: Any) -> Tensor:
    """``block(*inputs)``, of which only the inputs are kept until backward."""
    first = random.number

    def run(*inputs: Any) -> Tensor:
        random.number = first  # the same dropout masks when backward runs it again
        return block(*inputs)

    with set_checkpoint_early_stop(False):  # as the papers' frameworks: the whole block runs again
        return checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
