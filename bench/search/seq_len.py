"""The longest sequence: in positions, of which each rank has equally many where the strategy chunks
sequences."""

from __future__ import annotations

from spbench.bench.cell import Cell
from spbench.bench.search.search import Quantity
from spbench.impls.axes import Place
from spbench.impls.strategies.nesting import nesting

#: sequences shorter than this are not used to predict longer ones: kernels treat tiny shapes apart
SHORTEST_SAMPLE = 128


class SequenceLength(Quantity):
    """Positions of a whole sequence; attention scores have bytes that are quadratic in them."""

    name = "seq_len"
    degree = 2

    def parts(self, cell: Cell) -> int:
        place = Place(cell.mesh_sizes)
        strategy = nesting(cell.strategy).configured(place, cell.strategy_options)
        # the chunks that it cuts: one a rank, two with a placement in zigzag
        return strategy.length_multiple

    def smallest_sample(self, unit: int) -> int:
        return -(-SHORTEST_SAMPLE // unit)
