"""Losses with LASP beside those of one device: LASP (arXiv 2404.02882), convergence table."""

from spbench.plots.convergence import losses
from spbench.plots.drawing import Drawing

draw = Drawing(__name__, losses)
