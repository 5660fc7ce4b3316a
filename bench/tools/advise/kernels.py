"""What a layout would take by other attention kernels that its card has rates of, by traces of few layers."""

from __future__ import annotations

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.attention_kernels import cannot_run
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.scenarios.setting_changes import changed
from spbench.bench.tools.advise.looks import Look, outcomes
from spbench.bench.tools.fit.answers import Answers
from spbench.bench.tools.fit.usual_attention import ATTENTION
from spbench.impls.models.model import model_preset


def by_kernel(cell: Cell, answers: Answers) -> dict[str, float]:
    """By each other kernel the time of a step over that by the layout's own, the shortest first; none where
    the model has no such kernel, or the card one rate.

    Args:
        cell: the layout.
        answers: whose run is :func:`look`.
    """
    model, device = model_preset(*cell.model_arguments), load_cluster(cell.cluster).device
    own, known = model.attention_kernel, device.attention
    if known is None or own not in known.kernels or not hasattr(model, "attention"):
        return {}
    kernels = [name for name, rates in known.kernels.items() if rates and not cannot_run(device, name)]
    cells = {name: cell if name == own else changed(cell, {ATTENTION: name}) for name in kernels}
    if len(cells) < 2:
        return {}
    looks = {name: Look.of(each, "few_layers") for name, each in cells.items()}
    names = {look.key: name for name, look in looks.items()}
    seconds = {
        names[look.key]: outcome.measurement["step_time_s"]
        for look, outcome in outcomes(answers, [*looks.values()])
        if outcome.status != "unsupported"
    }
    if own not in seconds:
        return {}
    ratios = {name: s / seconds[own] for name, s in seconds.items() if name != own}
    return dict(sorted(ratios.items(), key=lambda each: each[1]))
