"""Latency of generating a video by number of GPUs: DSP (arXiv 2403.10266), inference."""

from functools import partial

from spbench.plots.drawing import Drawing
from spbench.plots.dsp_videos import videos
from spbench.plots.lines import PlottedQuantity, measured

#: forwards of a generation, as the scenario has it
STEPS = 100
LATENCY = PlottedQuantity(
    "latency_s", f"Latency of {STEPS} forwards (s)", measured("step_time_s", 1 / STEPS), logarithmic=True
)

draw = Drawing(__name__, partial(videos, quantity=LATENCY, default_title="Latency by number of GPUs"))
