"""Throughput of training by number of GPUs and video: DSP (arXiv 2403.10266), version 1, Figure 3."""

from functools import partial

from spbench.plots.drawing import Drawing
from spbench.plots.dsp_videos import videos
from spbench.plots.lines import PlottedQuantity, measured

THROUGHPUT = PlottedQuantity("throughput_samples_per_s", "Samples per second", measured("samples_per_s"))

draw = Drawing(__name__, partial(videos, quantity=THROUGHPUT, default_title="Throughput by number of GPUs"))
