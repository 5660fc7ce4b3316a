"""Which weights DeepSpeed's ZeRO-3 gathers before each use, and which it frees after (DeepSpeed 0.19.8,
runtime/zero/partitioned_param_coordinator.py: ``PartitionedParameterCoordinator``).

DeepSpeed records the modules that run in a first forward and backward, and prefetches along this trace in all
later ones. :func:`uses_in_order` derives the trace from the module, so that all micro-batches are alike.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal

from torch import nn

from spbench.impls.backends.deepspeed_stage import DeepSpeedOptions
from spbench.impls.layout import Unsupported


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


#: the names of the weights that a module uses itself, in their order
Scope = tuple[str, ...]
#: a forward's use, a second run's use, or a backward's use of some weights
Pass = Literal["forward", "again", "backward"]


def _scopes(module: nn.Module, names: Mapping[nn.Parameter, str]) -> Iterator[Scope]:
    """Yields the scopes of a module in the order of registration, the module's own weights last."""
    own = [*module._parameters.values()]
    for child in module.children():
        if isinstance(child, (nn.ParameterList, nn.ParameterDict)):  # which are not called
            own += child._parameters.values()
        else:
            yield from _scopes(child, names)
    if scope := tuple(names[p] for p in own if p is not None and p in names):
        yield scope


def uses_in_order(module: nn.Module, names: Mapping[nn.Parameter, str]) -> list[tuple[Pass, Scope]]:
    """The uses of weights in a forward and backward of a whole model.

    Args:
        names: the names of the trained weights.
    """
    pieces: list[tuple[list[Scope], bool]] = []
    blocks: Any = getattr(module, "blocks", None)
    for name, child in module.named_children():
        if name != "blocks":
            pieces.append(([*_scopes(child, names)], False))
            continue
        for run, again in getattr(module, "runs", [([*blocks], False)]):
            of_run = [scope for block in run for scope in _scopes(blocks[block], names)]
            pieces.append((of_run, again))
    own = [names[p] for p in module._parameters.values() if p is not None and p in names]
    tied: Any = getattr(module, "tied", None)
    if own or tied is not None:
        pieces.append(([tuple(own or [names[tied]])], False))
    uses: list[tuple[Pass, Scope]] = [("forward", scope) for scopes, _ in pieces for scope in scopes]
    for scopes, again in reversed(pieces):
        if again and scopes:
            uses.append(("backward", scopes[-1]))  # its output's gradient comes before the second run
            uses += [("again", scope) for scope in scopes[:-1]]
            scopes = scopes[:-1]
        uses += [("backward", scope) for scope in reversed(scopes)]
    return uses


def replayed(coordinator: Coordinator, uses: Sequence[tuple[Pass, Scope]]) -> Iterator[tuple[bool, str]]:
    """Yields each gather of a forward and backward: (whether backward has begun, the weight)."""
    left = Counter(name for way, scope in uses for name in scope if way == "backward")
    coordinator.begin()
    active: set[str] = set()
    for way, scope in uses:
        for name in reversed(scope) if way == "backward" else scope:
            if name not in active:
                active.add(name)
                now, ahead = coordinator.use(name)
                gathers = [[name]] * now + ahead
                yield from ((way != "forward", each) for each in chain.from_iterable(gathers))
        for name in reversed(scope) if way == "backward" else scope:
            left[name] -= way == "backward"
            if way != "backward" or not left[name]:
                active.discard(name)
                coordinator.release(name)


#: DeepSpeed gathers ahead at each call of a module, also of one without weights or with persistent ones: in
#: a layer of Hugging Face's Llama 13 calls for 7 weights, about two for each weight
ROUNDS = 2


class Coordinator:
    """The weights that are whole, or on their way, at each use in a forward and backward.

    Args:
        elements: the number of elements of each weight, by name.
        uses: the names of weights in the order of their uses in a forward and backward.
    """

    def __init__(self, elements: Mapping[str, int], uses: Sequence[str], options: DeepSpeedZero3Options):
        self.elements, self.options = elements, options
        least = options.stage3_param_persistence_threshold
        #: the weights that stay whole
        self.persistent = [name for name, number in elements.items() if number <= least]
        self.uses = [name for name in uses if elements[name] > least]
        self.begin()

    def begin(self) -> None:
        """Called before a forward, when no weights but the persistent ones are whole."""
        self.whole, self.live, self.number = {*self.persistent}, 0, 0
        self.queue = deque(enumerate(self.uses))
        #: the last use for which each weight was gathered, or was whole when it could have been
        self.fetched_for: dict[str, int] = {}

    def use(self, name: str) -> tuple[bool, list[list[str]]]:
        """(whether to gather the weight, the weights of each gather ahead), before the next use of a weight.

        Raises:
            Unsupported: the trace has another weight next.
        """
        if name in self.persistent:
            return False, []
        if self.number >= len(self.uses) or self.uses[self.number] != name:
            raise Unsupported(
                f"deepspeed_zero3 takes weights to be used in the order of the model's layers; {name} is not",
                "use the backend zero3",
            )
        now = name not in self.whole
        self._gather(name)
        if self.fetched_for.get(name, -1) < self.number:
            number, first = self.queue.popleft()
            self.fetched_for[first] = number
        ahead = [names for _ in range(ROUNDS) if (names := self._prefetch())]
        self.number += 1
        return now, ahead

    def _prefetch(self) -> list[str]:
        """The weights of one gather ahead."""
        names: list[str] = []
        room = self.options.stage3_max_live_parameters - self.live
        room, taken = min(room, self.options.stage3_prefetch_bucket_size), 0
        while self.queue and taken < room:
            number, later = self.queue.popleft()
            self.fetched_for[later] = number
            if later not in self.whole:
                names.append(later)
                taken += self.elements[later]
                self._gather(later)
        return names

    def _gather(self, name: str) -> None:
        if name not in self.whole:
            self.whole.add(name)
            self.live += self.elements[name]

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


def flat_uses(uses: Sequence[tuple[Pass, Scope]]) -> list[str]:
    """The trace of :class:`Coordinator`: a weight that a backward of several uses still holds is not used
    again."""
    left = Counter(name for way, scope in uses for name in scope if way == "backward")
    names, active = [], set[str]()
    for way, scope in uses:
        for name in reversed(scope) if way == "backward" else scope:
            if name not in active:
                names.append(name)
            left[name] -= way == "backward"
            if way == "backward":
                (active.add if left[name] else active.discard)(name)
    return names
