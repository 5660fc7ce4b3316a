"""The largest sequence length that fits by number of GPUs: RSA (arXiv 2105.13120), Figures 5a, 5b and 9."""

from functools import partial

from spbench.plots.drawing import Drawing
from spbench.plots.largest import LENGTH, largest

draw = Drawing(__name__, partial(largest, searched=LENGTH))
