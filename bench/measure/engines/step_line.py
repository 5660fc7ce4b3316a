"""The step of a pipeline with very many micro-batches, from steps with few: once the pipeline is full, each
further group of micro-batches takes as long as the group before, sends as much, and holds no more memory.

So a step's seconds and its messages are linear in the number of micro-batches. Steps with three numbers of
micro-batches determine the line; if the three are not on a line, the module raises NotAlike.

The module also names the class of a simulated time: the worst grade among the rates that price a part of the
step large enough to count.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, Self, TypeVar

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import Cluster
from spbench.bench.measure.engines.cell_schedule import puts_off
from spbench.bench.measure.engines.listed import NotAlike
from spbench.bench.measure.engines.rank_turns import SHORT
from spbench.bench.measure.simulator.program import Flops
from spbench.bench.measure.simulator.substitutes import Substitute
from spbench.bench.measure.simulator.timeline import Timeline
from spbench.bench.measure.trace.meter import Operation
from spbench.bench.measurement import returned
from spbench.bench.setting_values import STAND_IN, StandIn

#: the numbers of groups of micro-batches in the steps to be traced, without and with a proof of the line
_GROUPS, _PROOF_GROUPS = (1, 2), (3, 4, 5)
#: the most stages of a pipeline whose whole step, with hardly more micro-batches than stages, is traced as
#: quickly as a short step from which the step could be put together
_FEW_STAGES = 4
#: a cell is put on a line only if it has this many times the micro-batches of the three steps together
_WORTH = 2
#: the most by which the second step may differ from the line of the others, as a share of the step
_OFF = 1e-9
#: the name of a part of a step
Named = TypeVar("Named", str, Substitute)
#: a kind of call: the operator's name, or the collective with its size
Kind = TypeVar("Kind", str, Operation)


def steady_counts(cell: Cell, *, proved: bool = False) -> Sequence[int]:
    """Two numbers of micro-batches, from which on each further micro-batch (or group of an interleaved
    schedule) takes equally long; with ``proved`` a third number, to check that."""
    training, pp = cell.training, cell.sizes.pp
    if training.schedule == "interleaved":
        return [pp * n for n in (_PROOF_GROUPS if proved else _GROUPS)]
    # with one run of layers a rank: pp micro-batches of warm-up, one of steady state, pp of the end
    first = max(2 * pp + 1, SHORT)
    # with that many micro-batches, the inner stages are put together from one short step
    long = training.schedule == "1f1b" and pp > _FEW_STAGES and training.micro_batches > first + 1
    if not (proved or long):
        first = pp + 1  # the second backward of a rank is neither its first, nor its last
    return range(first, first + 2 + proved)


def counts_on_line(cell: Cell) -> Sequence[int] | None:
    """Three numbers of micro-batches whose steps determine the cell's; None if the cell's own step takes no
    longer to trace than the three."""
    counts = steady_counts(cell, proved=True)
    worth = cell.sizes.pp > 1 and not puts_off(cell) and cell.training.micro_batches >= _WORTH * sum(counts)
    return counts if worth else None


@dataclass(frozen=True)
class StepNumbers:
    """Numbers of a simulated step that grow by the same amount with each micro-batch, and with each layer.

    Attributes:
        step_time_s, breakdown, parts, priced_by, flops: the attributes of :class:`Timeline`.
    """

    step_time_s: float
    breakdown: Mapping[str, float]
    parts: Mapping[str, float]
    priced_by: Mapping[Substitute, float]
    flops: Flops

    @classmethod
    def of(cls, step: "Timeline | StepNumbers") -> Self:
        """The numbers of a timeline, or of other numbers."""
        return cls(step.step_time_s, step.breakdown, step.parts, step.priced_by, step.flops)

    def with_allocator(self, memory: Sequence[Mapping[str, Any]], last: int) -> Self:
        """The numbers with a part in which all work waits for the driver, because the allocator returns
        segments to a full card and asks for others. Launches that come late after that do not count.

        Args:
            memory: the memory of rank classes at each step, :attr:`Measurement.by_class`.
            last: the number of the last step.
        """
        if not (seconds := returned(memory, "returned_s", last)):
            return self
        calls = Substitute("the allocator's calls", "other cards' drivers", "transferred")
        breakdown, priced_by = {**self.breakdown, "allocator_s": seconds}, {**self.priced_by, calls: seconds}
        return replace(self, step_time_s=self.step_time_s + seconds, breakdown=breakdown, priced_by=priced_by)

    def on(self, other: Self, times: float) -> Self:
        """This step's numbers plus ``times`` times the differences to ``other``'s numbers; at least 0."""

        def grown(a: Mapping[Named, float], b: Mapping[Named, float]) -> dict[Named, float]:
            return {
                name: max(0.0, a.get(name, 0.0) + times * (b.get(name, 0.0) - a.get(name, 0.0)))
                for name in {**a, **b}
            }

        step = {"step": self.step_time_s}, {"step": other.step_time_s}
        of_both = (
            grown(self.breakdown, other.breakdown),
            grown(self.parts, other.parts),
            grown(self.priced_by, other.priced_by),
        )
        flops = self.flops.plus(other.flops.plus(self.flops.times(-1)).times(times))
        return type(self)(grown(*step)["step"], *of_both, flops)

    def off(self, other: Self) -> float:
        """The largest difference between a number of this step and of ``other``, as a share of the step."""
        pairs = [(self.step_time_s, other.step_time_s)]
        for mine, theirs in ((self.breakdown, other.breakdown), (self.parts, other.parts)):
            pairs += [(mine.get(name, 0.0), theirs.get(name, 0.0)) for name in {**mine, **theirs}]
        return max(abs(a - b) for a, b in pairs) / self.step_time_s


def on_line(counts: Sequence[int], steps: Sequence[StepNumbers], micro_batches: int) -> StepNumbers:
    """The numbers of a step with ``micro_batches``, from three ``steps`` with ``counts`` micro-batches.

    Raises:
        NotAlike: the three steps are not on a line.
    """
    first, second, third = steps
    share = (counts[1] - counts[0]) / (counts[2] - counts[0])
    if (off := second.off(first.on(third, share))) > _OFF:
        raise NotAlike(f"steps of {', '.join(map(str, counts))} micro-batches are {off:.1g} off a line")
    return first.on(third, (micro_batches - counts[0]) / (counts[2] - counts[0]))


def calls_on_line(
    counts: Sequence[int], calls: Sequence[Mapping[Kind, int]], micro_batches: int
) -> dict[Kind, int]:
    """A rank's number of calls of each operator or collective in a step with ``micro_batches``, from the
    rank's ``calls`` in three steps with ``counts`` micro-batches.

    Raises:
        NotAlike: the calls in the three steps are not on a line.
    """
    on_line = {}
    for each in {kind: None for of_step in calls for kind in of_step}:
        a, b, c = (of_step.get(each, 0) for of_step in calls)
        more, left = divmod((c - b) * (micro_batches - counts[2]), counts[2] - counts[1])
        if left or (c - b) * (counts[1] - counts[0]) != (b - a) * (counts[2] - counts[1]):
            raise NotAlike(f"calls of {getattr(each, 'collective', each)} are not on a line")
        on_line[each] = c + more
    return on_line


#: the least share of a step that work must have for its substitute to be named
NAMED = 0.01
#: the grades of substitutes, the worst first, with the least share of a step with which a grade becomes the
#: class of the step's time. Work without any rate may have a small share only because its price is too low
COUNTS = {"substituted": NAMED, "transferred": 0.05, "extrapolated": 0.05}


def by_share(seconds: Mapping[Substitute, float], step_time_s: float) -> list[dict[str, Any]]:
    """The entries of :attr:`Measurement.priced_by`, without work whose share of the step is below NAMED."""
    shares = {each: min(1.0, s / step_time_s) for each, s in seconds.items() if s >= NAMED * step_time_s}
    ordered = sorted(shares, key=lambda each: (-shares[each], each))
    return [{**each._asdict(), "share": shares[each]} for each in ordered]


def rates_of_step(
    cluster: Cluster, precision: str, program: tuple[str, str], priced_by: Sequence[Mapping[str, Any]]
) -> str:
    """The class of a step's rates (:attr:`Measurement.rates`): the stand-in for a part of its program, if
    there is one; else the worst grade of substitutes with a share that counts (COUNTS); else the class of the
    cluster's rates. A scalar fitted to measured steps absorbs the errors of their kernels' prices. So the
    class is "fitted" only for the model and strategy of those steps, and "fitted elsewhere" for others.

    Args:
        program: the names of the model and the strategy.
        priced_by: :attr:`Measurement.priced_by` of the step.
    """
    of_cluster = cluster.rates_of(precision)
    if of_cluster == "fitted":
        figures = (figure.fitted_on for _, figure in cluster.sourced)
        cells = chain(cluster.calibration_of(precision).fitted_on, *figures)
        own = any(tuple(cell.split("/")[:2]) == program for cell in cells)
        return "fitted" if own else "fitted elsewhere"
    if of_cluster != "sourced":
        return of_cluster
    for each in priced_by:
        if each["grade"] == STAND_IN:
            return str(StandIn(each["work"], each["by"]))
    shares: Counter[str] = Counter()
    for each in priced_by:
        shares[each["grade"]] += each["share"]
    return next((grade for grade, least in COUNTS.items() if shares[grade] >= least), of_cluster)
