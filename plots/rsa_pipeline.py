"""The largest batch and its throughput by pipeline stages: RSA (arXiv 2105.13120), Figures 4 and 8."""

from dataclasses import replace
from functools import partial

from spbench.plots.axes import GPUS
from spbench.plots.drawing import Drawing
from spbench.plots.lines import PlottedQuantity, measured
from spbench.plots.rsa_throughput import THROUGHPUT, scaling

BATCH = PlottedQuantity("batch", "Largest batch (sequences)", measured("answer"))

draw = Drawing(
    __name__,
    partial(
        scaling,
        quantities=[BATCH, THROUGHPUT],
        default_title="Largest batch by pipeline stages",
        along=replace(GPUS, label="Number of GPUs, 4 a stage"),
    ),
)
