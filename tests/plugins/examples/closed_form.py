"""An engine that runs nothing: what a rank sends by its strategy's and backend's closed forms."""

import spbench


class ClosedFormEngine(spbench.Engine):
    """The communication of rank 0, in microseconds of work; no memory and no time."""

    name = "closed_form"
    summary = "closed forms alone: bytes sent, at once"
    is_exact = True

    def measure(self, cell):
        rows = spbench.plan(cell).formula(rank=0)
        return spbench.Measurement(communication=rows, formula=rows)
