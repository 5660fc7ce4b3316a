"""Throughput at the largest batch by number of GPUs: RSA (arXiv 2105.13120), Figures 3b and 7b."""

from functools import partial

from spbench.plots.drawing import Drawing
from spbench.plots.lines import PlottedQuantity, measured
from spbench.plots.scaling import scaling_figure

THROUGHPUT = PlottedQuantity("throughput", "Tokens per second", measured("tokens_per_s"))

draw = Drawing(
    __name__,
    partial(scaling_figure, quantities=[THROUGHPUT], default_title="Throughput at the largest batch"),
)
