"""The time of a world's step on a cluster, under any calibration of it."""

from __future__ import annotations

from collections.abc import Sequence

from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.simulator.costs import Costs, check_rates
from spbench.bench.measure.simulator.folding import smallest_shift
from spbench.bench.measure.simulator.message_matching import World, owners
from spbench.bench.measure.simulator.program import Program
from spbench.bench.measure.simulator.simulation import Simulation
from spbench.bench.measure.simulator.timeline import Timeline


class Simulator:
    """A world on a cluster, ready to be timed under any calibration without matching it up anew.

    Args:
        programs: one for each distinct program.
        ranks_of: global ranks that run each.
        precision: whose rates must be known, and whose calibration of the cluster is the default.
        parameters: of the whole model, which a calibration may charge for.
        attention: the model's kernel of softmax attention, see :class:`AttentionRates`.
        fold: simulate only ranks that a shift of the world does not map onto each other, where there is such
            a shift, and periods of a program only until it is known what they do. The timeline is the same.
        unlike_axis: of the mesh, along which ranks of one program have unlike work
            (:mod:`measure.simulator.lighter_ranks`); the last of them runs all of it. None: nowhere.

    Raises:
        Deadlock, ValueError: see :class:`World` and :func:`owners`.
        RatesUnknown: the profile lacks a figure.
    """

    def __init__(
        self,
        programs: Sequence[Program],
        ranks_of: Sequence[Sequence[int]],
        cluster: Cluster,
        precision: str = "fp32",
        parameters: int = 0,
        fold: bool = True,
        attention: str = "flash",
        unlike_axis: int | None = None,
    ):
        program_of = owners(programs, ranks_of)
        check_rates(cluster, precision, len(program_of))
        shift = smallest_shift(programs, program_of, cluster) if fold else len(program_of)
        self.world = World(programs, program_of, shift)
        self.cluster, self.precision, self.parameters = cluster, precision, parameters
        self.attention, self.fast_forward, self.unlike_axis = attention, fold, unlike_axis

    def __call__(self, calibration: Calibration | None = None) -> Timeline:
        """The timeline; without a calibration, with the cluster's own for the precision.

        Raises:
            Deadlock: ranks wait for each other in a circle.
        """
        if calibration is None:
            calibration = self.cluster.calibration_of(self.precision)
        costs = Costs(self.cluster, calibration, self.parameters, self.attention)
        return Simulation(self.world, costs, self.fast_forward, self.unlike_axis).timeline()
