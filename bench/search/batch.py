"""The largest batch: in samples, of which each micro-batch of each replica has equally many."""

from __future__ import annotations

from spbench.bench.cell import Cell
from spbench.bench.search.search import Quantity


class Batch(Quantity):
    """Samples of the whole batch; every tensor has bytes that are affine in them."""

    name = "batch"
    degree = 1

    def parts(self, cell: Cell) -> int:
        return cell.sizes.dp * cell.training.micro_batches
