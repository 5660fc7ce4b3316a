"""Activation checkpointing: a block's input is kept, and backward runs the block again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from spbench.impls.kernels.dropout import DropoutRandom

Output = TypeVar("Output")


def recomputed(
    block: Callable[..., Output], random: DropoutRandom, *inputs: Any, early_stop: bool = False
) -> Output:
    """``block(*inputs)``, of which only the inputs are kept until backward. With ``early_stop`` it runs
    again as far as the last tensor that its backward needs, as torch's own default is."""
    first = random.number

    def run(*inputs: Any) -> Output:
        random.number = first  # the same dropout masks when backward runs it again
        return block(*inputs)

    with set_checkpoint_early_stop(early_stop):  # the papers' frameworks run the whole block again
        output: Output = checkpoint(run, *inputs, use_reentrant=False, preserve_rng_state=False)
        return output
