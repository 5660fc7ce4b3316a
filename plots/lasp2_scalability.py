"""Memory and throughput by sequence length and GPUs: LASP-2 (arXiv 2502.07563)."""

from functools import partial

from spbench.plots.drawing import Drawing
from spbench.plots.lasp_scalability import length_scaling

draw = Drawing(__name__, partial(length_scaling, default_title="Memory and throughput of LASP-2"))
