"""A cluster with some of its figures changed, as a file, so that workers and scenarios can name it."""

from __future__ import annotations

import hashlib
import itertools
import re
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import cache_folder, write_whole
from spbench.bench.measure import ASKED, Cluster, load_cluster
from spbench.bench.yaml_files import validate
from spbench.bench.yaml_text import dump

#: parts of a cluster's file whose figures can be changed
PARTS = ("device", "node_link", "network", "nccl", "host", "host_memory")
#: a figure times a factor, and factors from one to another by doubling
_FACTOR = re.compile(r"x(\d*\.?\d+)")
_FACTORS = re.compile(r"x(\d*\.?\d+)\.\.x?(\d*\.?\d+)")
#: values of one figure at the most
_MOST = 64


def is_figure(name: str) -> bool:
    """Whether a dotted name may be the name of a cluster's figure."""
    part, separator, _ = name.partition(".")
    return bool(separator) and part in PARTS


def values_of(text: str) -> list[str]:
    """The values that a text stands for: ``x0.5..x4`` is x0.5 and its doublings up to x4; else the text.

    Raises:
        UserError: the range has none, or too many.
    """
    if (match := _FACTORS.fullmatch(text)) is None:
        return [text]
    first, last = float(match[1]), float(match[2])
    if not 0 < first <= last <= first * 2.0**_MOST:
        raise UserError(f"{text}: give factors above 0, the smaller first, as x0.5..x4")
    values = [first]
    while values[-1] * 2 <= last * (1 + 1e-9):
        values.append(values[-1] * 2)
    return [f"x{value:g}" for value in values]


def swept_figures(pairs: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    """The figures of each cluster that pairs of name and text ask for, of which one may be a range.

    Raises:
        UserError: a name is given twice, or a range has no values.
    """
    values: dict[str, list[str]] = {}
    for name, text in pairs:
        if name in values:
            raise UserError(f"--set {name} is given twice; leave one out, or give a range as x0.5..x4")
        values[name] = values_of(text)
    return [dict(zip(values, each, strict=True)) for each in itertools.product(*values.values())]


def changed_cluster(name: str, figures: Mapping[str, str]) -> str:
    """The path of a file with the cluster, some of its figures changed.

    Where a figure of a link is changed, the rates that collectives were measured to reach on that link change
    by the same factor. The file is in the folder of what is kept between runs.

    Args:
        figures: by dotted name, as ``network.bandwidth_bytes_per_s``: a number, or a factor such as ``x2``.

    Raises:
        UserError: the cluster has no such figure, or a value is no number or factor.
    """
    cluster = load_cluster(name)
    content = cluster.content
    for figure, text in figures.items():
        _change(content, cluster.name, figure, text)
    said = ", ".join(f"{figure} {text}" for figure, text in figures.items())
    content["about"] = f"{cluster.name} with {said}"
    text = dump(content)
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    words = [cluster.name, *(f"{figure.rpartition('.')[2]}-{value}" for figure, value in figures.items())]
    stem = re.sub(r"[^A-Za-z0-9._-]", "_", "-".join([*words, digest]))
    validate(Cluster, {**content, "name": stem}, f"--set {said}")
    kept = cache_folder()
    folder = Path(tempfile.mkdtemp(prefix="spbench-clusters-")) if kept is None else kept / "clusters"
    return str(write_whole(folder / f"{stem}.yaml", text))


def _change(content: dict[str, Any], cluster: str, figure: str, text: str) -> None:
    places = dict(_figures(content, ""))
    if figure not in places:
        part = figure.partition(".")[0]
        figures = [name for name in places if name.startswith(f"{part}.")]
        raise UserError(f"--set {figure}: cluster {cluster} has no such figure{suggestion(figure, figures)}")
    holder, key = places[figure]
    before = holder[key]
    factor = _FACTOR.fullmatch(text)
    try:
        times = float(factor[1]) if factor else float(text) / before if before else None
        value = before * times if factor and before is not None else float(text.removeprefix("x"))
    except ValueError:
        raise UserError(f"--set {figure}={text}: give a number, or a factor as x2") from None
    if factor and before is None:
        raise UserError(f"--set {figure}={text}: cluster {cluster} has no number there to multiply; give one")
    if not 0 <= value < float("inf"):
        raise UserError(f"--set {figure}={text}: give a number from 0 on")
    part, leaf = figure.partition(".")[0], figure.rpartition(".")[2]
    alike = [name for name in places if name.startswith(f"{part}.collectives.") and name.endswith(f".{leaf}")]
    for name in [figure, *(alike if figure == f"{part}.{leaf}" and times is not None else [])]:
        holder, key = places[name]
        number = value if name == figure else (holder[key] or 0.0) * (times or 1.0)
        holder[key] = round(number) if isinstance(holder[key], int) else number
        if "source" in holder:
            holder["note"] = "; ".join(filter(None, [holder.get("note"), f"{text}, {ASKED}"]))


def _figures(part: Any, path: str) -> Iterator[tuple[str, tuple[Any, Any]]]:
    """The numbers of a part of a cluster's file: by dotted name the mapping or list that holds it, and under
    which key."""
    entries = enumerate(part) if isinstance(part, list) else part.items()
    for key, value in entries:
        name = f"{path}{key}"
        if isinstance(value, dict) and "source" in value and "value" in value:
            if value["value"] is None or isinstance(value["value"], int | float):
                yield name, (value, "value")
        elif isinstance(value, dict | list):
            yield from _figures(value, f"{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, (part, key)
