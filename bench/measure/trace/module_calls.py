"""In which module's forward or backward something happens: the modules of a step, followed call by call.

Autograd numbers its nodes in the order in which forward makes them. The numbers that a module's call makes
are noted, so that in backward the number of the running node says whose it is. The step itself is
not changed: it gets no hooks, and its graph is left as it is.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from spbench.bench.measure.trace.torch_internals import backward_node, next_node, replaced

#: of accumulations of gradients, which all have one number; those of other nodes are smaller
_MOST_NODES = 2**62


class ModuleCalls:
    """The modules that are being called.

    Attributes:
        names: the paths of modules by the numbers of their places, with * for the numbers of layers, so that
            layers have one place, and pipeline stages the same ones; the first is "": none.
    """

    def __init__(self) -> None:
        self.names = [""]
        self._places: dict[int, int] = {}
        self._running = [0]
        #: the first node of autograd made at a place, ascending, and that place
        self._nodes, self._places_of_nodes = [0], [0]

    def place(self) -> int:
        """The place of what runs now: that of the innermost module whose forward runs, or whose forward made
        the node of autograd that runs; 0: none."""
        if len(self._running) > 1:
            return self._running[-1]
        node = backward_node()
        if node is None or node > _MOST_NODES:
            return 0
        return self._places_of_nodes[bisect_right(self._nodes, node) - 1]

    @contextmanager
    def followed(self) -> Iterator[None]:
        """Inside, calls of modules are noted."""
        call = nn.Module.__call__

        def noted(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            self._running.append(self._place_of(module))
            self._note()
            try:
                return call(module, *args, **kwargs)
            finally:
                self._running.pop()
                self._note()

        with replaced(nn.Module, {"__call__": noted}):
            yield

    def _note(self) -> None:
        self._nodes.append(next_node())
        self._places_of_nodes.append(self._running[-1])

    def _place_of(self, module: nn.Module) -> int:
        """The place of a module; one that is not known yet is the root of its own paths."""
        if id(module) not in self._places:
            for path, each in module.named_modules():
                name = re.sub(r"\d+", "*", path) or type(each).__name__
                if name not in self.names:
                    self.names.append(name)
                self._places.setdefault(id(each), self.names.index(name))
        return self._places[id(module)]
