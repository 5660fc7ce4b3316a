"""Weights that ranks have updated in parts, gathered bucket by bucket as the next forward needs them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from torch import nn

from spbench.impls.backends.buckets import weakly
from spbench.impls.backends.main_gradients import GradientBucket, GradientBuffer


class GatheredInForward:
    """Gathers each bucket before a module needs it, and then begins with the next bucket of its buffer.

    Megatron-Core gathers, before each module, the module's own parameters. Models here use weights of modules
    that they do not call (a head). So all parameters of a block (of ``blocks``) are gathered before it, those
    registered before the blocks before the model, and the others after the last block; a model without blocks
    gathers all before it.

    Args:
        modules: the models, each a run of layers.
        buffers: sharded buffers of their parameters.
    """

    def __init__(self, modules: Iterable[nn.Module], buffers: Sequence[GradientBuffer]):
        self.bucket_of = {p: each for buffer in buffers for each in buffer.buckets for p in each.parameters}
        # from a buffer's last bucket on: parameters lie in reverse
        self.next = {bucket: after for buffer in buffers for after, bucket in pairwise(buffer.buckets)}
        self.begun: set[GradientBucket] = set()
        gather = weakly(self.gather)
        for module in modules:
            for hooked, hook, parameters in _needs(module):
                hook(hooked, _with(gather, parameters))

    def forget(self) -> None:
        """Called after an update: gathered weights are out of date."""
        self.begun.clear()

    def begin(self, parameters: Iterable[nn.Parameter]) -> None:
        """Begin to gather these, in the order of their buckets."""
        for bucket in self._buckets(parameters):
            self._begin(bucket)

    def gather(self, parameters: Iterable[nn.Parameter]) -> None:
        """Gather these."""
        for bucket in self._buckets(parameters):
            self._begin(bucket)
            if bucket.work is not None:
                bucket.wait()
                if bucket in self.next:
                    self._begin(self.next[bucket])

    def _buckets(self, parameters: Iterable[nn.Parameter]) -> Iterable[GradientBucket]:
        """Those of parameters that are trained: the others are whole on every rank, and have none."""
        return dict.fromkeys(self.bucket_of[p] for p in parameters if p.requires_grad)

    def _begin(self, bucket: GradientBucket) -> None:
        if bucket not in self.begun:
            self.begun.add(bucket)
            bucket.gather(overlapped=True)


Hook = Callable[..., None]
Need = tuple[nn.Module, Callable[[nn.Module, Hook], Any], list[nn.Parameter]]


def _needs(module: nn.Module) -> Iterator[Need]:
    """Where hooks are registered, how, and which parameters must be whole there."""
    blocks = [*getattr(module, "blocks", nn.ModuleDict()).values()]
    within = {p for block in blocks for p in block.parameters()}
    order = list(module.parameters())
    first = next((i for i, p in enumerate(order) if p in within), len(order))
    yield module, nn.Module.register_forward_pre_hook, order[:first]
    for block in blocks:
        yield block, nn.Module.register_forward_pre_hook, list(block.parameters())
    if blocks:
        after = [p for p in order[first:] if p not in within]
        yield blocks[-1], nn.Module.register_forward_hook, after


def _with(gather: Hook, parameters: list[nn.Parameter]) -> Hook:
    """A module's hook that gathers these, whatever it is called with."""
    return lambda *_: gather(parameters)
