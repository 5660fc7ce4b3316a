"""Activation checkpointing: a block's input is kept, and backward runs the block again.

What torch's reentrant checkpoint holds on the device while it runs a layer backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
    noop_context_fn,
    set_checkpoint_early_stop,
)

from spbench.impls.kernels.dropout import DropoutRandom
from spbench.impls.kernels.kept_results import KeptResults, keeping
from spbench.impls.models.blocks.host_checkpoints import HostCheckpoints


class BackwardFrame:
    """A block [B, L, H] -> [B, L, H], or several of these, that is recomputed, with the tensors of a
    reentrant checkpoint's frame.

    ``CheckpointFunction.backward`` (torch/utils/checkpoint.py, use_reentrant=True, the default of Hugging
    Face's ``gradient_checkpointing_enable``; ArcticTraining's ``CheckpointFunctionWithCPUOffload`` is a copy)
    has the block's input, its output, made again, and the gradient of that as local variables, and runs
    ``torch.autograd.backward`` of the block inside. So all three live until the gradient of the input is
    there. Without reentrance autograd frees each after its last use, and the output at once.

    The block runs as without reentrance, for fully_shard's hooks gather weights once more in a graph inside
    another, which DeepSpeed's do not; only what is held is the reentrant one's. Gradients are the same.
    """

    def __init__(self, block: Callable[..., Any]):
        self.block = block
        #: of this backward
        self.held: list[Tensor] = []
        self._runs = 0

    def __call__(self, x: Tensor, *others: Any) -> Any:
        self._runs += 1
        x = x.view_as(x)  # its gradient is that of this use alone
        y = self.block(x, *others)
        results = y if isinstance(y, tuple) else (y,)
        if self._runs > 1:  # in backward, whose graph is that of the first run
            self.held += (x.detach(), *(each.detach() for each in results))
        elif x.requires_grad:
            for each in results:
                each.register_hook(self.held.append)
            x.register_hook(lambda _: self.held.clear())
        return y


Output = TypeVar("Output")


def recomputed(
    block: Callable[..., Output],
    random: DropoutRandom,
    *inputs: Any,
    early_stop: bool = False,
    keep: bool = False,
    keep_exchanges: bool = False,
    reentrant: bool = False,
    on_host: HostCheckpoints | None = None,
) -> Output:
    """``block(*inputs)``, of which only the inputs are kept until backward, and with ``keep`` what every
    other matmul made, attention, and sums that are scattered (torchtitan's selective checkpointing by "op"),
    with ``keep_exchanges`` what all-to-alls of rows brought too. With
    ``on_host`` tensors among the inputs are kept there. With ``early_stop`` it runs again as far as the last
    tensor that its backward needs, as torch's own default is. ``reentrant``: what torch's reentrant
    checkpoint holds meanwhile is held too, see :class:`BackwardFrame`."""
    first = random.number
    within: Callable[..., Output] = BackwardFrame(block) if reentrant else block

    def run(*inputs: Any) -> Output:
        random.number = first  # the same dropout masks when backward runs it again
        return within(*inputs)

    contexts = partial(_keeping, exchanges=keep_exchanges) if keep else noop_context_fn
    where = nullcontext() if on_host is None else on_host.keeping()
    # the papers' frameworks run the whole block again
    with set_checkpoint_early_stop(early_stop), where:
        output: Output = checkpoint(
            run, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
        )
        return output


def _keeping(*, exchanges: bool = False) -> tuple[Any, Any]:
    """The contexts of a block's forward and of its second run, which share what is kept: every other matrix
    product, and what is :func:`kept`."""
    results = KeptResults(products=True, exchanges=exchanges)

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        # none of those within a result that is kept, which are not run again
        # torch 2.12 asks in the second run too
        of_projection = operator is torch.ops.aten.mm.default and keeping()
        if of_projection and results.keeps_next(again=context.is_recompute):
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    first, again = create_selective_checkpoint_contexts(policy)
    return _both(results.in_use(again=False), first), _both(results.in_use(again=True), again)


@contextmanager
def _both(one: AbstractContextManager[Any], other: AbstractContextManager[Any]) -> Iterator[None]:
    with one, other:
        yield
