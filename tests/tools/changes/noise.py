"""Times with the noise of a real machine.

rounds_of_benchmarks.csv has CPU times of ten micro-benchmarks (tests/benchmarks, -m micro) in 60 rounds, each
a process of its own, on a machine of two cores with a load of about 12: rounds differ by some 18%. Rounds are
drawn from these by pairs that followed each other, so that drifts and outliers stay as they were.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from tests.tools.changes.rows import raw

FILE = Path(__file__).with_name("rounds_of_benchmarks.csv")


class Machine:
    """Makes rows of benchmarks of the same code, or of code that is slower in some.

    Args:
        deviation: standard deviation of the logarithm of a round's median about its pair's mean, times the
            square root of 2: how much rounds differ. None: as recorded.
    """

    def __init__(self, seed: int, deviation: float | None):
        self.chance = np.random.default_rng(seed)
        table = pd.read_csv(FILE).set_index(["benchmark", "round"])
        logs = np.log(table.to_numpy()).reshape((*table.index.levshape, table.shape[1]))
        logs -= np.median(logs, axis=(1, 2), keepdims=True)
        #: [benchmark, pair, side, sample]
        self.pairs = logs.reshape(len(logs), -1, 2, logs.shape[2])
        medians = np.median(self.pairs, axis=3)
        recorded = (medians[:, :, 1] - medians[:, :, 0]).std() / 2**0.5
        self.scale = 1.0 if deviation is None else deviation / recorded

    def rows(
        self, metrics: int, rounds: int, slower: dict[int, float] | None = None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """Rows by key of base and new, measured in turns; those of new in ``slower`` by these factors."""
        base, new = {}, {}
        for number in range(metrics):
            pairs = self.pairs[self.chance.integers(len(self.pairs))]
            drawn = pairs[self.chance.integers(len(pairs), size=rounds)]
            drawn = np.where(self.chance.random((rounds, 1, 1)) < 0.5, drawn, drawn[:, ::-1])
            times = np.exp(self.scale * drawn) * 1e-3
            times[:, 1] *= (slower or {}).get(number, 1.0)
            key = f"benchmark {number}"
            base[key], new[key] = (row(key, times[:, side].tolist(), side) for side in (0, 1))
        return base, new


def row(key: str, rounds: list[list[float]], side: int) -> dict[str, Any]:
    """A row of rounds; those of side 0 and 1 take turns."""
    entries = [
        {"time": f"{2 * number + side:04d}", "time_s": float(np.median(samples)), "time_samples_s": samples}
        for number, samples in enumerate(rounds)
    ]
    median = {"time_s": float(np.median([entry["time_s"] for entry in entries]))}
    of = {"measurement": median, "provenance": {"host": "here"}, "rounds": entries}
    return raw(key, "pytest-benchmark", **of)
