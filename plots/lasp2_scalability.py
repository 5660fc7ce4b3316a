"""Memory and throughput by sequence length and GPUs: LASP-2 (arXiv 2502.07563)."""

from functools import partial

from spbench.plots.drawing import Drawing
from spbench.plots.length_scaling import length_scaling_figure

draw = Drawing(__name__, partial(length_scaling_figure, default_title="Memory and throughput of LASP-2"))
