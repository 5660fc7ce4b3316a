"""Results that a block's forward keeps, so that the block does not compute them when it runs again.

torch's selective checkpointing keeps the results of single operators. What several operators and messages
make together, and in each other's memory, is kept here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TypeVar

from torch import Tensor

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


class KeptResults:
    """What a block's forward keeps, in the order in which it made it.

    Args:
        products: whether every other product of a projection is kept too.
        exchanges: whether what rows of an all-to-all arrive as is kept too.
    """

    def __init__(self, *, products: bool = False, exchanges: bool = False) -> None:
        self.results: deque[Tensor | tuple[Tensor, ...]] = deque()
        self.again, self.products, self.exchanges = False, products, exchanges
        # counted anew in each run: a block may have an odd number
        self._counts = {False: 0, True: 0}

    def keeps_next(self, *, again: bool) -> bool:
        """Whether the product that the block makes now, or makes again, is one of those that are kept."""
        self._counts[again] += 1
        return self.products and self._counts[again] % 2 == 1

    @contextmanager
    def in_use(self, *, again: bool) -> Iterator[None]:
        """While the block runs, or runs again."""
        token, self.again = _in_use.set(self), again
        try:
            yield
        finally:
            _in_use.reset(token)


#: those of the block that runs now, in this thread
_in_use: ContextVar[KeptResults | None] = ContextVar("kept results", default=None)


def keeping() -> bool:
    """Whether the block that runs now keeps results, which nothing may write on."""
    return _in_use.get() is not None


def kept(make: Callable[[], Result]) -> Result:
    """What ``make`` returns: of a block that keeps results, from its first run also when it runs again.

    To be called where no gradient is recorded, as in the forward of an autograd function. Within ``make``
    nothing is kept.
    """
    if (keeper := _in_use.get()) is None:
        return make()
    if keeper.again:
        return keeper.results.popleft()  # type: ignore[return-value]
    token = _in_use.set(None)
    try:
        result = make()
    finally:
        _in_use.reset(token)
    # autograd writes on the tensors that a function returns, which must not hold what they came from
    alias = result.detach() if isinstance(result, Tensor) else tuple(x.detach() for x in result)
    keeper.results.append(alias)
    return result


def kept_product(make: Callable[[], Result]) -> Result:
    """As :func:`kept`, of a projection that is several operators, where the block keeps this product."""
    keeper = _in_use.get()
    if keeper is None or not keeper.keeps_next(again=keeper.again):
        return make()
    return kept(make)


def kept_exchange(make: Callable[[], Tensor]) -> Tensor:
    """As :func:`kept`, of what an all-to-all brings, where the block keeps that."""
    keeper = _in_use.get()
    return make() if keeper is None or not keeper.exchanges else kept(make)


def kept_number(make: Callable[[], Tensor]) -> Tensor:
    """As :func:`kept`, of a number that a projection needs, where the block keeps products."""
    keeper = _in_use.get()
    return make() if keeper is None or not keeper.products else kept(make)
