"""Activation checkpointing: only a block's input is kept, and backward runs the block again.

:func:`recomputed` runs a block with its input kept. :class:`BackwardFrame` holds the tensors that torch's
reentrant checkpoint holds on the device while a block runs backward.

:func:`remade` and :func:`used_without_results` leave a result out of the tensors that later operators keep
for backward, and make the result again from tensors that are kept anyway (Megatron-LM's
CheckpointWithoutOutput, for moe_act, layernorm and mla_up_proj of --recompute-modules)."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, partial
from itertools import chain, repeat
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
from spbench.impls.observed_work import host_works

#: what a layer's first and second runs cost the host, in calls of a module. Under torch's checkpoint without
#: reentrance, hooks in Python run three times for each tensor that a layer keeps: scripts/program_host.py has
#: 117 and 200 (a Llama of transformers), of which 14 are calls of modules, which are counted. Megatron-Core's
#: layers take longer in forward, of which its second run has more: the median of scripts/megatron_host.py
TORCH_CALLS, MEGATRON_CALLS = (117, 186), (0, 206)


class BackwardFrame:
    """A recomputed block, or run of blocks, [B, L, H] -> [B, L, H], that holds the tensors which a reentrant
    checkpoint holds in backward.

    ``CheckpointFunction.backward`` (torch/utils/checkpoint.py, use_reentrant=True, the default of Hugging
    Face's ``gradient_checkpointing_enable``; ArcticTraining's ``CheckpointFunctionWithCPUOffload`` is a copy)
    has the block's input, its recomputed output, and the output's gradient as local variables while it runs
    ``torch.autograd.backward`` of the block. So all three live until the input's gradient exists. Without
    reentrance autograd frees the output at once, and the other two after their last use.

    The block itself runs without reentrance, because fully_shard's hooks would gather weights once more in a
    graph inside another, which DeepSpeed's hooks do not. Gradients are the same.
    """

    def __init__(self, block: Callable[..., Any]):
        self.block = block
        #: the tensors that this backward holds
        self.held: list[Tensor] = []
        self._runs = 0

    def __call__(self, x: Tensor, *others: Any) -> Any:
        self._runs += 1
        x = x.view_as(x)  # so that the gradient of x is only that of this use
        y = self.block(x, *others)
        results = y if isinstance(y, tuple) else (y,)
        if self._runs > 1:  # the second run, in backward, whose hooks the first run has registered
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
    calls: tuple[int, int] = (0, 0),
    on_host: HostCheckpoints | None = None,
) -> Output:
    """``block(*inputs)``, whose inputs alone are kept until backward runs the block again.

    ``keep`` also keeps the results of every other matmul, of attention, and of reduce-scatters (torchtitan's
    selective checkpointing by "op"); ``keep_exchanges``, of all-to-alls of rows too. ``early_stop`` ends the
    second run at the last tensor that backward needs, torch's default. ``on_host`` keeps input tensors on the
    host. ``reentrant`` also holds the tensors of :class:`BackwardFrame`. The host works for ``calls`` in the
    first run and in the second, see :func:`host_works`."""
    first = random.number
    within: Callable[..., Output] = BackwardFrame(block) if reentrant else block
    costs = chain(calls[:1], repeat(calls[1]))

    def run(*inputs: Any) -> Output:
        random.number = first  # the same dropout masks when backward runs it again
        host_works(next(costs))
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
    """The contexts of a block's forward and of its second run, which share the kept results: of every other
    matmul, and of operators in :func:`spbench.impls.kernels.kept_results.kept`."""
    results = KeptResults(products=True, exchanges=exchanges)

    def policy(context: Any, operator: Any, *_: Any, **__: Any) -> CheckpointPolicy:
        # no matmul within a kept result is saved, because the second run skips the whole computation
        # torch 2.12 calls the policy in the second run too
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


class _Kept:
    """A placeholder for a result, or for a view of a result, that an operator keeps for backward."""

    def __init__(self, made: Callable[[], Sequence[Tensor]], number: int, x: Tensor):
        self._made, self._number = made, number
        self._view = x.shape, x.stride(), x.storage_offset()

    def read(self) -> Tensor:
        return self._made()[self._number].as_strided(*self._view)


def remade(results: Sequence[Tensor], make: Callable[[], Sequence[Tensor]]) -> AbstractContextManager[Any]:
    """A context in which operators keep placeholders for ``results``, which ``make`` makes again in backward
    and which live until all these operators have run backward. ``make`` may hold only kept tensors."""
    numbers = {x.untyped_storage()._cdata: number for number, x in enumerate(results)}
    made = cache(torch.no_grad()(make))  # once, when backward first reads a result

    def pack(x: Tensor) -> Any:
        number = numbers.get(x.untyped_storage()._cdata)
        return x if number is None else _Kept(made, number, x)

    def unpack(kept: Any) -> Tensor:
        return kept.read() if isinstance(kept, _Kept) else kept

    return torch.autograd.graph.saved_tensors_hooks(pack, unpack)


class _Ending(torch.autograd.Function):
    """The last operator of a block, which keeps the block's results, so that its second run has them."""

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
    """``use(*block(*inputs))``, where backward runs the block again, once, for the block's gradients and for
    the results that ``use`` keeps. Other tensors that ``use`` keeps are kept as usual."""
    results = recomputed(lambda *inputs: _Ending.apply(*block(*inputs)), random, *inputs)
    # the node of _Ending: reading its saved tensors makes checkpoint run the block again
    node: Any = results[0].grad_fn
    with remade(results, lambda: node.saved_tensors):
        return use(*results)
