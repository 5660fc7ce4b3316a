"""Pipeline stages of sharded models: when gradients are summed, and weights freed.

In torch.distributed.pipelining each backward of a stage adds to whole gradients and keeps gathered weights
(``backward_maybe_with_nosync`` of its stage.py, torch 2.13). After the stage's last backward of the step it
reduce-scatters them, unit by unit, and frees the weights (``perform_reduce_grad``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule


def keep_for_later(stage: FSDPModule) -> None:
    """Have backwards through a stage add to whole gradients, and keep the weights."""
    _sum_after_backward(stage, False)


def sum_in_backward(stage: FSDPModule) -> None:
    """Have the next backward reduce-scatter what backwards have added up, and free the weights."""
    _sum_after_backward(stage, True)


def sum_kept(stage: FSDPModule) -> None:
    """Reduce-scatter the gradients that backwards through a stage have added up, and free its weights."""
    from torch.distributed.fsdp import fully_shard

    _sum_after_backward(stage, True)
    state = fully_shard.state(stage)  # type: ignore[attr-defined]  # not exported: torch's pipelining does this
    for unit in state._state_ctx.all_states:
        for group in unit._fsdp_param_groups:
            group.post_backward()
    state._root_post_backward_final_callback()


def _sum_after_backward(stage: FSDPModule, yes: bool) -> None:
    stage.set_is_last_backward(yes)
    stage.set_reshard_after_backward(yes)
    stage.set_requires_gradient_sync(yes)
