"""What a GPU sends for a layer of linear attention by sequence length: LASP (arXiv 2404.02882), Table 1."""

from functools import partial

from spbench.plots.axes import LENGTHS
from spbench.plots.drawing import Drawing
from spbench.plots.sent_elements import sent_elements
from spbench.plots.series import gpus, model

draw = Drawing(
    __name__,
    partial(sent_elements, along=LENGTHS, facet=lambda row: f"{model(row)}, {gpus(row)} GPUs"),
)
