"""Which weights DeepSpeed's ZeRO-3 gathers before each use, and which it frees after (DeepSpeed 0.19.8,
runtime/zero/partitioned_param_coordinator.py: ``PartitionedParameterCoordinator``).

DeepSpeed's hooks of modules (:class:`ModuleHooks`) record a trace in a first forward and backward, and
DeepSpeed prefetches along this trace in all later ones. :func:`recorded` records the trace on a single device
without data before the first step, so that all micro-batches are alike.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

from spbench.impls.backends.buckets import weakly
from spbench.impls.backends.deepspeed_stage import DeepSpeedOptions
from spbench.impls.layout import Unsupported
from spbench.impls.observed_work import host_works, noting_host_work, noting_work
from spbench.impls.strategies.base import Strategy

#: what DeepSpeed's hooks cost the host for each weight in a forward and in a backward, in calls of a module:
#: the means of two runs of scripts/program_host.py on a busy machine (a Llama of 12 layers, one of four
#: ranks), 86 and 87, 61 and 67. The driver's calls, for streams and events, are not among them
FORWARD_CALLS, BACKWARD_CALLS = 87, 64


@dataclass(frozen=True)
class DeepSpeedZero3Options(DeepSpeedOptions):
    """Options of :class:`~spbench.impls.backends.deepspeed_zero3.DeepSpeedZero3`.

    Attributes:
        stage3_prefetch_bucket_size: weights that are gathered ahead after each gather.
        stage3_max_live_parameters: no weights are gathered ahead that make more than these whole.
        stage3_max_reuse_distance: weights that are used again within these elements stay whole.
        stage3_param_persistence_threshold: weights of at most these elements stay whole during a step.
        sub_group_size: the optimizer updates consecutive partitions of at least these elements at once; 0:
            each weight by itself.
    """

    overlap_comm: bool = True
    stage3_prefetch_bucket_size: int = 50_000_000
    stage3_max_live_parameters: int = 1_000_000_000
    stage3_max_reuse_distance: int = 1_000_000_000
    stage3_param_persistence_threshold: int = 100_000
    sub_group_size: int = 1_000_000_000


#: names of weights that are used at once
Scope = tuple[str, ...]
#: (whether a backward runs, whether a use of weights begins or ends, the weights)
Event = tuple[bool, bool, Scope]


class UsedWeights(dict[str, Any]):
    """A module's parameters, which reports each access."""

    def __init__(self, parameters: dict[str, Any], used: Callable[[nn.Parameter], None]):
        super().__init__(parameters)
        self._used = used

    def __getitem__(self, key: str) -> Any:
        if (p := super().__getitem__(key)) is not None:
            self._used(p)
        return p


class ModuleHooks:
    """DeepSpeed's hooks of modules (parameter_offload.py), by which it learns of uses of weights.

    A use begins in forward when a module reads its weight, and in backward with the gradient of the module's
    result. A use ends in forward with the module's call, and in backward with the weight's gradient. All
    weights of a *leaf* are used at once: of a block of experts, its router and shared experts included, as
    ``leaf_module`` has Mixtral, Qwen2-MoE and Qwen3-MoE by default.

    Args:
        names: the names of the trained weights.
        begins: called when a use begins, with the names of the weights and the hook's calls for the host.
        ends: called when a use ends, with the names of the weights.
        gradients: called with the names of weights whose gradients are sent now: a leaf's are sent together.
        forward: called before each forward of the whole module.
    """

    def __init__(
        self,
        module: nn.Module,
        names: Mapping[nn.Parameter, str],
        begins: Callable[[Scope, int], None],
        ends: Callable[[Scope], None],
        gradients: Callable[[Scope], None] = lambda scope: None,
        forward: Callable[[], None] = lambda: None,
    ):
        self.module, self.names, self.begins, self.ends = module, names, begins, ends
        self.gradients, self.forward = gradients, forward
        #: the weights of each leaf, by the leaf and by each of the weights
        self.leaves: dict[nn.Module | str, Scope] = {}
        for owner in module.modules():
            if getattr(owner, "gathered_whole", False):
                scope = tuple(names[p] for p in owner.parameters() if p in names)
                self.leaves |= dict.fromkeys([owner, *scope], scope)
            owner.register_forward_pre_hook(self._enter)
            owner.register_forward_hook(self._leave)
        for owner in module.modules():
            owner._parameters = UsedWeights(owner._parameters, self._used)
        for p in names:
            p.register_post_accumulate_grad_hook(weakly(self._arrived))
        #: modules that run forward, with the weights that each uses itself
        self.running: list[tuple[nn.Module, list[Scope]]] = []
        self.active: set[str] = set()
        #: weights of leaves that have their gradients
        self.arrived: set[str] = set()

    def _enter(self, module: nn.Module, inputs: Any) -> None:
        if module is self.module:
            for state in (self.running, self.active, self.arrived):
                state.clear()
            self.forward()
        self.running.append((module, []))
        # a second run keeps what backward holds already
        if scope := tuple(name for name in self.leaves.get(module, ()) if name not in self.active):
            self.running[-1][1].append(scope)
            self._begin(scope, FORWARD_CALLS)

    def _used(self, p: nn.Parameter) -> None:
        name = self.names.get(p)
        if name is not None and self.running and name not in self.active:
            self.running[-1][1].append((name,))
            self._begin((name,), FORWARD_CALLS)

    def _begin(self, scope: Scope, calls: int) -> None:
        if new := tuple(name for name in scope if name not in self.active):
            self.active.update(new)
            self.begins(new, calls)
        else:
            host_works(calls)

    def _end(self, scope: Scope) -> None:
        self.active.difference_update(scope)
        self.ends(scope)

    def _leave(self, module: nn.Module, inputs: Any, outputs: Any) -> None:
        while self.running and self.running[-1][0] is not module:
            self.running.pop()
        scopes = self.running.pop()[1] if self.running else []
        for scope in scopes:
            self._end(scope)
        if not scopes or in_backward():
            return
        for x in tree_leaves(outputs):
            if isinstance(x, Tensor) and x.requires_grad:
                x.register_hook(partial(self._before_backward, scopes))

    def _before_backward(self, scopes: list[Scope], gradient: Tensor) -> None:
        self.running.clear()  # of a second run that has ended early
        while scopes:
            self._begin(scopes.pop(), BACKWARD_CALLS)

    def _arrived(self, p: nn.Parameter) -> None:
        name = self.names[p]
        scope = self.leaves.get(name, (name,))
        self.arrived.add(name)
        if self.arrived.issuperset(scope):
            self.arrived.difference_update(scope)
            self._end(scope)
            self.gradients(scope)


def in_backward() -> bool:
    """Whether a backward runs, which may run a layer's forward again."""
    return bool(torch._C._current_graph_task_id() != -1)


def recorded(module: nn.Module) -> tuple[Event, ...]:
    """The uses of weights in a forward and backward of a model's module, by a run on a single device whose
    tensors have no data."""
    if not (hasattr(module, "model") and hasattr(module, "seq_len")):
        what = f"deepspeed_zero3 needs the attributes model and seq_len of {type(module).__name__}"
        raise Unsupported(what, "set these, or use the backend zero3")
    return _recorded(module.model, module.seq_len)


@cache
def _recorded(model: Any, seq_len: int) -> tuple[Event, ...]:
    events: list[Event] = []
    silent = noting_host_work(lambda *_: None), noting_work(lambda _: None)
    with _disable_current_modes(), FakeTensorMode(), torch.device("cpu"), silent[0], silent[1]:
        module = model.build(Strategy(), seq_len)
        hooks = ModuleHooks(
            module,
            {p: name for name, p in module.named_parameters() if p.requires_grad},
            lambda scope, _: events.append((in_backward(), True, scope)),
            lambda scope: events.append((in_backward(), False, scope)),
        )
        hooks.module(model.inputs(1, seq_len, None))["loss"].backward()
    return tuple(events)


def replayed(coordinator: Coordinator, events: Sequence[Event]) -> Iterator[tuple[bool, Scope]]:
    """Yields each gather of a forward and backward: (whether backward has begun, the weights)."""
    coordinator.begin()
    for backward, begins, names in events:
        if begins:
            now, ahead = coordinator.use(names)
            yield from ((backward, scope) for scope in [now, *ahead] if scope)
        else:
            for name in names:
                coordinator.release(name)


#: DeepSpeed gathers ahead at each call of a module, also of one without weights or with persistent ones: in
#: a layer of Hugging Face's Llama 13 calls for 7 weights, about two for each weight; a leaf has one call
ROUNDS = 2


class Coordinator:
    """The weights that are whole, or on their way, at each use in a forward and backward.

    Args:
        elements: the number of elements of each weight, by name.
        events: the uses of weights in a forward and backward.
    """

    def __init__(self, elements: Mapping[str, int], events: Sequence[Event], options: DeepSpeedZero3Options):
        self.elements, self.options = elements, options
        least = options.stage3_param_persistence_threshold
        #: the weights that stay whole
        self.persistent = {name: None for name, number in elements.items() if number <= least}
        self.uses = [name for _, begins, names in events if begins for name in self._gathered(names)]
        self.begin()

    def _gathered(self, names: Scope) -> list[str]:
        """The weights among ``names`` that do not persist. A rank may have a part of all experts."""
        return [name for name in names if name in self.elements and name not in self.persistent]

    def begin(self) -> None:
        """Called before a forward, when no weights but the persistent ones are whole."""
        self.whole, self.live, self.number = {*self.persistent}, 0, 0
        self.queue = deque(enumerate(self.uses))
        #: the last use for which each weight was gathered, or was whole when it could have been
        self.fetched_for: dict[str, int] = {}

    def use(self, names: Scope) -> tuple[Scope, list[Scope]]:
        """(the weights to gather now, the weights of each gather ahead), before the next use of weights.

        Raises:
            Unsupported: the trace has other weights next.
        """
        used = self._gathered(names)
        if not used:
            return (), []
        if self.uses[self.number : self.number + len(used)] != used:
            raise Unsupported(
                f"deepspeed_zero3 takes weights to be used in the order of a single device; {used[0]} is not",
                "use the backend zero3",
            )
        now = tuple(name for name in used if name not in self.whole)
        self.whole.update(now)
        self.live += sum(self.elements[name] for name in now)
        for _ in {name for name in used if self.fetched_for.get(name, -1) < self.number}:
            number, first = self.queue.popleft()
            self.fetched_for[first] = number
        ahead = [each for _ in range(ROUNDS if len(names) == 1 else 1) if (each := self._prefetch())]
        self.number += len(used)
        return now, ahead

    def _prefetch(self) -> Scope:
        """The weights of one gather ahead."""
        names: list[str] = []
        room = self.options.stage3_max_live_parameters - self.live
        room, taken = min(room, self.options.stage3_prefetch_bucket_size), 0
        while self.queue and taken < room:
            number, later = self.queue.popleft()
            self.fetched_for[later] = number
            if later not in self.whole:
                names.append(later)
                self.whole.add(later)
                taken += self.elements[later]
        self.live += taken
        return tuple(names)

    def release(self, name: str) -> bool:
        """Whether to free a weight after its use: not if it persists, is used again within
        ``stage3_max_reuse_distance``, or was passed over by a prefetch for a later use."""
        if name not in self.whole or name in self.persistent:
            return False
        if self.fetched_for.get(name, -1) > self.number:
            return False
        passed = 0
        for later in islice(self.uses, self.number, None):
            if passed >= self.options.stage3_max_reuse_distance:
                break
            if later == name:
                return False
            passed += self.elements[later]
        self.whole.discard(name)
        self.live -= self.elements[name]
        return True
