"""Activation checkpointing: a block's input is kept, and backward runs the block again.

What torch's reentrant checkpoint holds on the device while it runs a layer backward.

Results that are not kept for backward, but made again when it needs them.

Activation checkpointing (:mod:`spbench.impls.models.blocks.recomputation`) runs a block again, with its last
operator. Here results are left out of what others keep, and made again from what is kept anyway
(Megatron-LM's CheckpointWithoutOutput, for moe_act, layernorm and mla_up_proj of --recompute-modules).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
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
