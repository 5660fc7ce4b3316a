"""The class of a simulated time: what its rates are, by the worst of what prices a part of it that counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from spbench.bench.measure.clusters.cluster import Cluster
from spbench.bench.measure.simulator.substitutes import Substitute
from spbench.bench.programs import STAND_IN, StandIn

#: the least share of a step for which it is named what some work is priced by
NAMED = 0.01
#: the grades of such prices, the worst first, and the least share of a step with which each makes the class
#: of its time. A small share of work without any rate may be small only because its price is much too low
COUNTS = {"substituted": NAMED, "transferred": 0.05, "extrapolated": 0.05}


def by_share(seconds: Mapping[Substitute, float], step_time_s: float) -> list[dict[str, Any]]:
    """As :attr:`Measurement.priced_by`, without what takes too little to be named."""
    shares = {each: min(1.0, s / step_time_s) for each, s in seconds.items() if s >= NAMED * step_time_s}
    ordered = sorted(shares, key=lambda each: (-shares[each], each))
    return [{**each._asdict(), "share": shares[each]} for each in ordered]


def rates_of_step(
    cluster: Cluster, precision: str, program: tuple[str, str], priced_by: Sequence[Mapping[str, Any]]
) -> str:
    """What the rates of a step are: what stands in for a part of its program, else the worst grade of what is
    priced by something else, as far as that takes a part of the step that counts, or what those of the
    cluster are where there is none. A scalar that was
    fitted to steps has taken up what their kernels were priced by: "fitted" stays for the model and strategy
    that it was fitted to, and is "fitted elsewhere" for others, which do not do what nobody
    modelled of these.

    Args:
        program: the model and the strategy.
        priced_by: as :attr:`Measurement.priced_by`.
    """
    of_cluster = cluster.rates_of(precision)
    if of_cluster == "fitted":
        return "fitted" if program in _fitted_to(cluster, precision) else "fitted elsewhere"
    if of_cluster != "sourced":
        return of_cluster
    for each in priced_by:
        if each["grade"] == STAND_IN:
            return str(StandIn(each["work"], each["by"]))
    shares: Counter[str] = Counter()
    for each in priced_by:
        shares[each["grade"]] += each["share"]
    return next((grade for grade, least in COUNTS.items() if shares[grade] >= least), of_cluster)


def _fitted_to(cluster: Cluster, precision: str) -> set[tuple[str, str]]:
    """Model and strategy of the cells that scalars and rates of a cluster were fitted to."""
    own = cluster.calibration_of(precision).fitted_on
    keys = [*own, *(key for _, figure in cluster.sourced for key in figure.fitted_on)]
    return {(parts[0], parts[1]) for key in keys if len(parts := key.split("/")) > 1}
