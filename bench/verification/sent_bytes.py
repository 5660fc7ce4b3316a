"""What a rank sends in a verified step beside the closed forms of its strategy and backend, exactly."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from spbench.bench.engines.plan import Plan, RankClass
from spbench.bench.meters.recorder import Recorder
from spbench.bench.verification.discrepancy import Discrepancy
from spbench.impls.backends.backend import Backend, PlannedStep, planned_sums
from spbench.impls.composition import ONE_STAGE, composed_traffic
from spbench.impls.models.model import Model


def byte_differences(
    recorder: Recorder, model: Model, backend: Backend, batch: int, seq_len: int
) -> Iterator[tuple[str, Discrepancy]]:
    """Where the whole model's step was seen to send other bytes than the closed forms say, by phase and
    collective; and where a rank holds other parameters than the model's sites say.

    Args:
        recorder: has seen the step.
        backend: of the step, on the rank's place.
    """
    strategy, around, precision = backend.strategy, backend.around, backend.precision
    sizes = strategy.place.sizes
    sites = list(model.sites(batch, seq_len, strategy.vocabulary_parts))
    sums = planned_sums(sites, strategy, 1)
    width = precision.parameters.itemsize
    gradient_bytes = backend.gradient_dtype(precision, backend.options).itemsize

    def build() -> torch.nn.Module:
        with torch.device("meta"):
            return model.build(strategy, seq_len)

    step = PlannedStep(sums, 1, precision, strategy, around, build, backend.options)
    entries = [
        *composed_traffic(sites, strategy, ONE_STAGE, 1, width, gradient_bytes),
        *backend.traffic(step),
    ]
    plan = Plan([RankClass(ONE_STAGE, {}, (0,))], [entries], sizes)
    for each in plan.difference(recorder.communication, 0):
        sent, formula = each["metered_bytes"], each["formula_bytes"]
        yield (
            f"{each['phase']} {each['collective']} over {each['axis']}",
            Discrepancy.without_number(f"sends {sent} bytes, {formula} by the closed form"),
        )
    # a backend may have taken the parameters over, in parts or padded
    held, counted = sum(p.numel() for p in build().parameters()), sum(each.elements for each in sums)
    if held != counted:
        yield "parameters", Discrepancy.without_number(f"are {held} elements, {counted} by the model's sites")
