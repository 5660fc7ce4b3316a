"""What may be searched for, and the values that a search may try.

A quantity is found by being there: a class derived from :class:`Quantity`, with a name, in a module of this
package.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from spbench.bench.cell import Cell
from spbench.impls.axes import Place
from spbench.impls.discovery import named_classes
from spbench.impls.layout import Unsupported
from spbench.impls.strategies.nesting import nesting

#: kernels treat tiny shapes apart, so that shorter sequences do not predict longer ones
SHORTEST_SAMPLE = 128


class Quantity:
    """A setting of a cell that can be searched for."""

    #: how searches name it; the field of :class:`Cell`, unless :meth:`at` sets something else
    name: ClassVar[str]
    #: degree of the polynomial in it that the bytes of a tensor are
    degree: ClassVar[int]

    def parts(self, cell: Cell) -> int:
        """The number of equal parts that the value is divided into: values are multiples of it."""
        return 1

    def smallest_sample(self, unit: int) -> int:
        """In units, the smallest value whose step is like that of large ones, to predict these from."""
        return 1

    def at(self, cell: Cell, value: int) -> Cell:
        """A cell that searches for this quantity, with the quantity set to a value, and no search."""
        return cell.at(value)


class Batch(Quantity):
    """Samples of the whole batch, equally many in each micro-batch of each replica."""

    name = "batch"
    degree = 1

    def parts(self, cell: Cell) -> int:
        return cell.sizes.dp * cell.training.micro_batches


class SequenceLength(Quantity):
    """Positions of a whole sequence, equally many in each chunk that the strategy cuts; attention scores have
    bytes that are quadratic in them."""

    name = "seq_len"
    degree = 2

    def parts(self, cell: Cell) -> int:
        place = Place(cell.mesh_sizes)
        return nesting(cell.strategy).configured(place, cell.strategy_options).length_multiple

    def smallest_sample(self, unit: int) -> int:
        return -(-SHORTEST_SAMPLE // unit)


def quantities() -> Mapping[str, type[Quantity]]:
    """The quantities by name."""
    return named_classes("spbench.bench.measure.engines", Quantity)


class Candidates:
    """The values that a search may try.

    Args:
        cell: with ``search`` set.

    Attributes:
        values: in ascending order.

    Raises:
        Unsupported: the smallest value is above the search's limit, or the strategy cannot run on these
            sizes.
    """

    def __init__(self, cell: Cell):
        assert cell.search is not None
        self.cell, self.asked = cell, cell.search
        self.quantity = quantities()[cell.search.quantity]()
        step = cell.search.step * self.quantity.parts(cell)
        self.values = range(step, cell.search.limit + 1, step)
        if not self.values:
            raise Unsupported(
                f"{self.quantity.name} is searched in steps of {step}, above the limit {cell.search.limit}",
                "raise the limit",
            )

    def at(self, value: int) -> Cell:
        """The cell with the quantity set to a value, and no search."""
        return self.quantity.at(self.cell, value)
