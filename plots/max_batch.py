"""The largest batch that fits by number of GPUs: RSA (arXiv 2105.13120), Figures 3a and 7a."""

from functools import partial

from spbench.plots.drawing import Drawing
from spbench.plots.largest import BATCH, largest

draw = Drawing(__name__, partial(largest, searched=BATCH))
