"""The host of a device: what its core takes for the work by which a step is launched."""

from __future__ import annotations

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from spbench.bench.measure.clusters.sourced import Sourced
from spbench.bench.yaml_files import StrictModel


class Host(StrictModel):
    """A process that launches what its device does, one thread, in eager mode. CUDA graphs and code of
    ``torch.compile`` launch otherwise and are not modelled.

    Attributes:
        operator_s: of an operator that launches a kernel, from Python or autograd's engine to the driver.
        view_s: of an operator that launches nothing, as a view.
        node_s: of a node of autograd run, beside its operators.
        module_s: of a call of a module, beside what it calls.
        collective_s: of a collective, a send or a receive posted.
        step_s: of a step, beside all these.
        launch_latency_s: from a launch to the start of its kernel, on a device that waits for it.
        launches_ahead: how many launches of kernels the driver takes before it makes the host wait.
        synchronous: kernels run on the host's own thread, as on a CPU: it waits for each of them.
        scale: what this host takes for each of these, beside the one that they were measured on.
    """

    operator_s: Sourced[NonNegativeFloat]
    view_s: Sourced[NonNegativeFloat]
    node_s: Sourced[NonNegativeFloat]
    module_s: Sourced[NonNegativeFloat]
    collective_s: Sourced[NonNegativeFloat]
    step_s: Sourced[NonNegativeFloat]
    launch_latency_s: Sourced[NonNegativeFloat]
    launches_ahead: Sourced[PositiveInt]
    synchronous: bool = False
    scale: Sourced[PositiveFloat] = Sourced(value=1.0, source="the host that the figures were measured on")

    def seconds(self, figure: str) -> float:
        """What one of the figures is on this host; 0 where it is not known."""
        known: Sourced[float] = getattr(self, figure)
        return (known.value or 0.0) * (self.scale.value or 1.0)
