"""Results that a block's forward keeps, so that a run for recomputation need not compute these again.

torch's selective checkpointing keeps results of single operators. This module keeps results that several
operators and messages compute together, and in each other's memory.
"""

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

from spbench.impls.observed_work import set_to

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


class KeptResults:
    """The results that a block's forward keeps, in the order of their computation.

    Args:
        products: whether to keep the result of every other projection too.
        exchanges: whether to keep the results of all-to-alls too.
    """

    def __init__(self, *, products: bool = False, exchanges: bool = False) -> None:
        self.results: deque[Tensor | tuple[Tensor, ...]] = deque()
        self.again, self.products, self.exchanges = False, products, exchanges
        # projections of each run, counted apart because a block may have an odd number
        self._counts = {False: 0, True: 0}

    def keeps_next(self, *, again: bool) -> bool:
        """Whether to keep the result of the projection that the block computes or recomputes next."""
        self._counts[again] += 1
        return self.products and self._counts[again] % 2 == 1

    @contextmanager
    def in_use(self, *, again: bool) -> Iterator[None]:
        """A context in which the block runs (``again``: runs a second time), and these results are in use."""
        self.again = again
        with set_to(_in_use, self):
            yield


#: the kept results of the block that runs now, in this thread; None: the block keeps none
_in_use: ContextVar[KeptResults | None] = ContextVar("kept results", default=None)


def keeping() -> bool:
    """Whether the block that runs now keeps results; nothing may overwrite a result then."""
    return _in_use.get() is not None


def kept(make: Callable[[], Result]) -> Result:
    """Returns ``make()``, or in a second run of a block that keeps results, the result of the first run.

    Call this function only where autograd records nothing, as in the forward of an autograd function. Nothing
    is kept within ``make``.
    """
    if (keeper := _in_use.get()) is None:
        return make()
    if keeper.again:
        return keeper.results.popleft()  # type: ignore[return-value]
    with set_to(_in_use, None):
        result = make()
    # autograd sets the history of a returned tensor, so an alias without history is kept
    alias = result.detach() if isinstance(result, Tensor) else tuple(x.detach() for x in result)
    keeper.results.append(alias)
    return result


def kept_product(make: Callable[[], Result]) -> Result:
    """As :func:`kept` for a projection of several operators, if the block keeps this projection's result."""
    keeper = _in_use.get()
    if keeper is None or not keeper.keeps_next(again=keeper.again):
        return make()
    return kept(make)


def kept_exchange(make: Callable[[], Tensor]) -> Tensor:
    """As :func:`kept` for the result of an all-to-all, if the block keeps such results."""
    keeper = _in_use.get()
    return make() if keeper is None or not keeper.exchanges else kept(make)


def kept_number(make: Callable[[], Tensor]) -> Tensor:
    """As :func:`kept`, but only if the block keeps projections' results: for a number that these need."""
    keeper = _in_use.get()
    return make() if keeper is None or not keeper.products else kept(make)
