"""Tables of measured times by shape: matmuls, attention and collectives, as a cluster's file names them.

A table is a CSV file of scenarios/clusters/tables, which also has its source and licence. The rate of a call
is interpolated between the nearest measured calls, linearly in the logarithms of sizes and rates. Beyond a
table's sizes its nearest edge counts, and the caller models the rest (:meth:`RateTable.covers`).
"""

import csv
import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib.resources import files
from io import StringIO
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.measure.clusters.figures import FLOPS, Sourced

PACKAGE = "spbench.scenarios.clusters"
#: the head size of all tables of attention
HEAD_SIZE = 128


@cache
def table_names() -> Sequence[str]:
    """The names of the packaged tables, sorted."""
    return sorted(path.stem for path in _folder().glob("*.csv"))


def wrong_tables(figures: Iterable[tuple[str, Sourced[Any]]]) -> Iterator[str]:
    """The tables that a cluster names but that do not exist, or that have other calls than the key needs,
    each as the key path and the problem. UserError for a table whose own file is wrong."""
    for at, figure in figures:
        if not at.endswith(".table") or figure.value is None:
            continue
        kind = next((kind for part, kind in _OF_KEYS.items() if part in at), "collectives")
        alike = [name for name in table_names() if _kind(name) == kind]
        if figure.value not in table_names():
            yield f"{at}: unknown table of measured rates {shown(figure.value)}" + suggestion(
                figure.value, alike
            )
        elif _kind(figure.value) != kind:
            yield f"{at}: {figure.value} has {_kind(figure.value)}; name a table of {kind}, as {alike[0]}"
        elif kind == "matmuls" and at.split(".")[2] not in ("bf16", "fp16"):
            yield f"{at}: {figure.value} has matmuls in half precision alone; leave it out"
        else:
            _calls(figure.value)


#: the kind of calls that a key's table must have, by a part of the key path
_OF_KEYS = {".matmul.": "matmuls", ".attention.": "calls of attention"}


def _kind(name: str) -> str:
    """The kind of calls in a table, a key of :data:`_KINDS`, from the end of the table's name."""
    of_kind = {"matmul": "matmuls", "collectives": "collectives"}
    return of_kind.get(name.rpartition("-")[2], "calls of attention")


def table_text(name: str) -> str:
    """The CSV text of a table."""
    return (_folder() / f"{name}.csv").read_text(encoding="utf-8")


def table_in_words(name: str) -> str:
    """The calls and sizes, as "1,932 matmuls, m 2048 to 16384, n 32 to 65536, k 32 to 65536
    (h200_sxm-matmul)"."""
    kind, (_, sizes, _) = _kind(name), _calls(name)
    along = zip(_KINDS[kind].sizes, sizes.T, strict=True)
    ranges = (f"{size} {values.min():.0f} to {values.max():.0f}" for size, values in along)
    return f"{len(sizes):,} {kind.removesuffix(' of attention')}, {', '.join(ranges)} ({name})"


def table_digest(name: str) -> str:
    """The SHA-256 digest of a table's text, in hexadecimal digits."""
    return hashlib.sha256(table_text(name).encode()).hexdigest()


def _folder() -> Path:
    return Path(str(files(PACKAGE))) / "tables"


class RateTable:
    """The measured calls of one kind by their sizes, with the seconds of each call.

    Args:
        sizes: [calls, number of sizes]: the sizes of each call, as m, n and k.
        seconds: [calls]: the time of each call.
        work: [calls]: the work of each call, as FLOPs; work / seconds is interpolated.

    Attributes:
        sizes, seconds, work: the arguments.
        smallest, largest: [number of sizes]: the least and greatest measured value of each size.
    """

    def __init__(self, sizes: np.ndarray, seconds: np.ndarray, work: np.ndarray):
        self.sizes, self.seconds, self.work = sizes, seconds, work
        self.smallest, self.largest = sizes.min(axis=0), sizes.max(axis=0)
        places = np.log2(sizes)
        axes = [np.unique(along) for along in places.T]
        grid = np.full([len(axis) for axis in axes], np.nan)
        at = [np.searchsorted(axis, along) for axis, along in zip(axes, places.T, strict=True)]
        grid[tuple(at)] = np.log(work / seconds)
        self._axes, self._grid = axes, _filled(axes, grid)

    def cut(self, sizes: np.ndarray) -> np.ndarray:
        """[calls, number of sizes]: the sizes of calls, clipped to the measured range."""
        return np.clip(sizes, self.smallest, self.largest)

    def rates(self, sizes: np.ndarray) -> np.ndarray:
        """[calls]: the work a second of calls of these sizes, each size clipped to the measured range."""
        below, shares = [], []
        for axis, along in zip(self._axes, np.log2(self.cut(sizes)).T, strict=True):
            place = np.clip(np.searchsorted(axis, along, side="right") - 1, 0, max(len(axis) - 2, 0))
            above = np.minimum(place + 1, len(axis) - 1)
            below.append((place, above))
            width = axis[above] - axis[place]
            shares.append(np.divide(along - axis[place], width, out=np.zeros_like(along), where=width > 0))
        logarithms = np.zeros(len(sizes))
        for corner in product((0, 1), repeat=len(self._axes)):
            weights = [share if side else 1 - share for share, side in zip(shares, corner, strict=True)]
            at = tuple(places[side] for places, side in zip(below, corner, strict=True))
            logarithms += np.prod(weights, axis=0) * self._grid[at]
        return np.asarray(np.exp(logarithms))

    def covers(self, sizes: np.ndarray) -> np.ndarray:
        """[calls]: whether each size of a call lies within the measured range."""
        return np.asarray(((sizes >= self.smallest) & (sizes <= self.largest)).all(axis=1))


def _filled(axes: Sequence[np.ndarray], grid: np.ndarray) -> np.ndarray:
    """The grid of rates, in which each place without a measurement (NaN) gets the nearest measured value."""
    holes = np.isnan(grid)
    places = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1)
    for hole in np.argwhere(holes):
        apart = np.abs(places[~holes] - places[tuple(hole)]).sum(axis=1)
        grid[tuple(hole)] = grid[~holes][int(apart.argmin())]
    return grid


@cache
def rate_table(name: str) -> RateTable:
    """A table in half precision. Of matmuls, the sizes are [m, n, k], and the work is their FLOPs. Of forward
    attention with a causal mask and heads of :data:`HEAD_SIZE` features, the sizes are [length, heads,
    groups] (groups of heads share keys and values), and the work is the FLOPs that the mask leaves."""
    _, sizes, seconds = _calls(name)
    return RateTable(sizes, seconds, _KINDS[_kind(name)].work(sizes))


def rates_along(name: str, heads: int, groups: int) -> dict[int, float]:
    """FLOP/s of a table's calls: of its square matmuls [n, n] x [n, n] by n; or, of a table of attention, by
    the length of calls with that many heads and groups."""
    table = rate_table(name)
    others = table.sizes[:, :1] if _kind(name) == "matmuls" else [heads, groups]
    alike = (table.sizes[:, 1:] == others).all(axis=1)
    rates = table.work[alike] / table.seconds[alike]
    return {int(size): float(rate) for size, rate in zip(table.sizes[alike, 0], rates, strict=True)}


@cache
def collective_tables(name: str) -> Mapping[str, RateTable]:
    """A table of collectives within a node for each collective; sizes are [ranks, bytes of the payload as
    :data:`WIRE_SHARE` defines it], and the work is one call."""
    kinds, sizes, seconds = _calls(name)
    of_kind = {kind: np.array([each == kind for each in kinds]) for kind in kinds}
    return {kind: RateTable(sizes[at], seconds[at], np.ones(sum(at))) for kind, at in of_kind.items()}


@cache
def _calls(name: str) -> tuple[list[str], np.ndarray, np.ndarray]:
    """A table's calls: the collective of each ("" for other kinds), sizes [calls, sizes] and seconds [calls].

    Raises:
        UserError: there are no calls, a number is missing or not above 0, or a call contradicts another of
            the same sizes or is impossibly fast; names the file and the line.
    """
    path, kind = _folder() / f"{name}.csv", _KINDS[_kind(name)]
    columns, reader = (*kind.sizes, "us"), csv.DictReader(StringIO(table_text(name)))
    seen = dict[tuple[str, ...], tuple[float, int]]()
    kinds, calls = [], []
    for row in reader:
        where, of = f"{path}:{reader.line_num}", row.get("collective", "")
        try:
            *sizes, us = numbers = [float(row[column]) for column in columns]
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{where}: give a number for each of {', '.join(columns)}") from None
        if not all(0 < each < math.inf for each in numbers):
            raise UserError(f"{where}: give numbers above 0 for {', '.join(columns)}")
        if (rate := float(kind.work(np.array(sizes))) / us * 1e6) > FLOPS.high:
            raise UserError(f"{where}: {rate:.3g} {kind.unit} a second cannot be; us is in microseconds")
        before, line = seen.setdefault((of, *map(str, sizes)), (us, reader.line_num))
        if before != us:
            raise UserError(f"{where}: {us:g} us, but line {line} has {before:g} for that call; drop one")
        kinds.append(of)
        calls.append(numbers)
    if not calls:
        raise UserError(f"{path}: there are no calls in it")
    return kinds, np.array(calls)[:, :-1], np.array(calls)[:, -1] * 1e-6


class _Kind(NamedTuple):
    """A kind of calls: the columns of sizes, a function from sizes to work, and the unit of work."""

    sizes: Sequence[str]
    work: Callable[[np.ndarray], Any]
    unit: str = "FLOPs"


#: the kinds of calls by name; the work of attention is the FLOPs that a causal mask leaves
_KINDS = {
    "matmuls": _Kind(("m", "n", "k"), lambda sizes: 2.0 * sizes.prod(axis=-1)),
    "calls of attention": _Kind(
        ("length", "heads", "groups"), lambda s: 2.0 * HEAD_SIZE * s[..., 1] * s[..., 0] * (s[..., 0] + 1)
    ),
    "collectives": _Kind(("ranks", "bytes"), lambda sizes: sizes[..., 1], "bytes"),
}
