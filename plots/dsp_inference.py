"""Latency of a forward by number of GPUs and video: DSP (arXiv 2403.10266), inference."""

from functools import partial

from spbench.plots.drawing import Drawing
from spbench.plots.dsp_videos import videos
from spbench.plots.lines import PlottedQuantity, measured

LATENCY = PlottedQuantity("latency_s", "Latency of a forward (s)", measured("step_time_s"), logarithmic=True)

draw = Drawing(__name__, partial(videos, quantity=LATENCY, default_title="Latency by number of GPUs"))
