"""The errors of interpolation in the tables of rates: each call is left out and computed from the others.

    python scripts/interpolation_errors.py                   # the table, as CSV
    python scripts/interpolation_errors.py --write           # into results/reproduction/interpolation.csv

A call can be left out if it has measured neighbours on both sides along a size. Its rate is computed on the
straight line between these neighbours, as the mean over its sizes, in which nearer neighbours weigh more.
Collectives are left out only along their bytes, because each group has all sizes. The columns "beyond" have
the calls of the largest m, length or bytes, each computed at the rate of the call with half of that size.
"""

import argparse
import csv
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from spbench.bench.measure.clusters.rate_tables import RateTable, collective_tables, rate_table, table_names

FILE = Path(__file__).parents[1] / "results" / "reproduction" / "interpolation.csv"
COLUMNS = ("table", "calls", "left_out", "median_error", "error_of_90", "beyond", "median_error_beyond")


def tables(name: str) -> list[RateTable]:
    """The tables of rates in a file: one, or one for each collective."""
    kind = name.rpartition("-")[2]
    if kind == "collectives":
        return list(collective_tables(name).values())
    return [rate_table(name)]


def errors_between(table: RateTable, axes: Sequence[int]) -> list[float]:
    """The relative error of each call that can be left out, computed from its neighbours along ``axes``."""
    rates, places = np.log(table.work / table.seconds), np.log2(table.sizes)
    at = {tuple(sizes): number for number, sizes in enumerate(table.sizes.tolist())}
    errors = []
    for number, own in enumerate(rates):
        estimates, weights = [], []
        for axis, low, high in _neighbours(table, axes, at, number):
            distance = places[high][axis] - places[low][axis]
            share = (places[number][axis] - places[low][axis]) / distance
            estimates.append((1 - share) * rates[low] + share * rates[high])
            weights.append(distance**-2.0)
        if estimates:
            errors.append(float(np.expm1(own - np.average(estimates, weights=weights))))
    return errors


def _neighbours(
    table: RateTable, axes: Sequence[int], at: dict[tuple[float, ...], int], number: int
) -> Iterator[tuple[int, int, int]]:
    """For each axis, (axis, call below, call above): the numbers of the nearest calls that differ from call
    ``number`` only in that size; axes without such calls on both sides are left out."""
    call = tuple(table.sizes[number].tolist())
    for axis in axes:
        own = call[axis]
        along = {
            size: at.get((*call[:axis], size, *call[axis + 1 :])) for size in np.unique(table.sizes[:, axis])
        }
        below = [each for size, each in along.items() if size < own and each is not None]
        above = [each for size, each in along.items() if size > own and each is not None]
        if below and above:
            yield axis, below[-1], above[0]


def errors_beyond(table: RateTable, axis: int) -> list[float]:
    """The relative error of each largest call along an axis, at the rate of the call with half the size."""
    seconds = dict(zip(map(tuple, table.sizes.tolist()), table.seconds.tolist(), strict=True))
    errors = []
    for number, sizes in enumerate(table.sizes.tolist()):
        half = tuple(size / 2 if place == axis else size for place, size in enumerate(sizes))
        if sizes[axis] == table.largest[axis] and half in seconds:
            work = table.work[number] / table.work[list(seconds).index(half)]
            factor = work if work > 1 else 2.0  # collectives: twice the bytes
            errors.append(seconds[half] * factor / table.seconds[number] - 1)
    return errors


def row(name: str) -> dict[str, object]:
    """The line of the output for the tables in file ``name``."""
    of_tables, collectives = tables(name), name.endswith("-collectives")
    axes, largest = ([1], 1) if collectives else (range(3), 0)
    between = np.abs([error for table in of_tables for error in errors_between(table, axes)])
    beyond = np.abs([error for table in of_tables for error in errors_beyond(table, largest)])
    values = [
        name,
        sum(len(table.seconds) for table in of_tables),
        len(between),
        f"{np.median(between):.4f}",
        f"{np.quantile(between, 0.9):.4f}",
        len(beyond),
        f"{np.median(beyond):.4f}",
    ]
    return dict(zip(COLUMNS, values, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"into {FILE.name}")
    rows = [row(name) for name in table_names()]
    with FILE.open("w", encoding="utf-8", newline="") if parser.parse_args().write else sys.stdout as out:
        writer = csv.DictWriter(out, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
