"""From the settings of a scenario file to cells, and what a cell cannot be."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, get_type_hints

from pydantic import BaseModel, TypeAdapter, ValidationError

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.engines.engine import engines
from spbench.bench.errors import UserError, suggestion
from spbench.bench.files.cluster import load_cluster
from spbench.bench.files.yaml_files import dotted, first_problem, merge
from spbench.bench.meters.registry import meters
from spbench.bench.search.search import quantities
from spbench.impls.backends.registry import backends
from spbench.impls.models.model import models
from spbench.impls.strategies.registry import strategies

#: keys of a group that may be lists; so may each axis of sizes
MULTIPLYING = ("model", "strategy", "batch", "seq_len", "precision", "cluster", "engine")


class Problem(ValueError):
    """What is wrong in a scenario file, at a key path."""

    def __init__(self, path: Sequence[str | int], message: str):
        super().__init__(f"{dotted(path)}: {message}")


# -- expansion -------------------------------------------------------------------------------------------

_Layers = list[tuple[tuple[str | int, ...], Mapping[str, Any]]]


def expand(
    defaults: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    variants: Mapping[str, Mapping[str, Any]],
    variant: str,
) -> list[Cell]:
    """The cells of a scenario's groups under one of its variants ("": there are none).

    Raises:
        Problem: what is wrong, at its key path in the file.
    """
    cells: dict[str, int] = {}
    found: list[Cell] = []
    for number, group in enumerate(groups):
        # the last word first, as a reader looks for where a setting comes from
        layers: _Layers = [(("groups", number), group), (("defaults",), defaults)]
        if variant:
            layers.insert(0, (("variants", variant), variants[variant]))
        merged: dict[str, Any] = {}
        for place, layer in reversed(layers):
            if "variant" in layer:
                raise Problem([*place, "variant"], "unknown key; variants have a section of their own")
            merged = merge(merged, layer)
        for content in _product(merged, layers):
            cell = _cell(content | {"variant": variant}, layers)
            if cell.key in cells:
                other = cells[cell.key]
                where = "twice here" if other == number else f"in groups[{other}] too"
                raise Problem(["groups", number], f"the cell {cell.key} is declared {where}; leave one out")
            cells[cell.key] = number
            found.append(cell)
    return found


def _product(merged: Mapping[str, Any], layers: _Layers) -> Iterator[dict[str, Any]]:
    sizes = merged.get("sizes", {})
    lists: dict[tuple[str, ...], list[Any]] = {(k,): merged[k] for k in MULTIPLYING if k in merged}
    if isinstance(sizes, dict):
        lists |= {("sizes", axis): value for axis, value in sizes.items()}
    for path, value in lists.items():
        if value == []:
            raise Problem(_origin(path, layers), "is an empty list, which leaves no cell; give a value")
        if not isinstance(value, list):
            lists[path] = [value]
    for values in itertools.product(*lists.values()):
        content = dict(merged)
        if isinstance(sizes, dict):
            content["sizes"] = dict(sizes)
        for path, value in zip(lists, values, strict=True):
            (content if len(path) == 1 else content["sizes"])[path[-1]] = value
        yield content


def _origin(path: Sequence[str | int], layers: _Layers) -> list[str | int]:
    """The path of a setting in the file, from its path in a cell: in the layer that has the last word."""
    for place, layer in layers:
        at: Any = layer
        for step in path:
            if not isinstance(at, Mapping) or step not in at:
                break
            at = at[step]
        else:
            return [*place, *path]
    return [*next(place for place, _ in layers if place[0] == "groups"), *path]


def _cell(content: Mapping[str, Any], layers: _Layers) -> Cell:
    try:
        cell = Cell.model_validate(content, strict=True)
    except ValidationError as error:
        path, message = first_problem(Cell, error)
        raise Problem(_origin(path, layers), message) from error
    for path, message in impossible(cell):
        raise Problem(_origin(path, layers), message)
    return cell


# -- what a cell cannot be ---------------------------------------------------------------------------------


def impossible(cell: Cell) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with a cell, as (path in the cell, message); not what only a strategy can tell."""
    searched_for = [cell.search.quantity] if cell.search is not None else []
    named: list[tuple[tuple[str, ...], str, list[str], Iterable[str]]] = [
        (("model",), "model", [cell.model], sorted(models())),
        (("strategy",), "strategy", [cell.strategy], sorted(strategies())),
        (("engine",), "engine", [cell.engine], engines()),
        (("meters",), "meter", cell.meters, meters()),
        (("search", "quantity"), "quantity", searched_for, quantities()),
        (("training", "backend"), "backend", [cell.training.backend], sorted(backends())),
    ]
    for path, kind, names, known in named:
        for name in names:
            if name not in known:
                yield path, f"unknown {kind} {name!r}{suggestion(name, known)}"
    try:
        load_cluster(cell.cluster)
    except UserError as error:
        yield ("cluster",), str(error)
    yield from _impossible_sizes(cell)
    if cell.learning is not None and cell.search is not None:
        yield ("learning",), "cannot be together with a search; leave one out"
    for quantity in ("batch", "seq_len"):
        searched = cell.search is not None and cell.search.quantity == quantity
        given = getattr(cell, quantity) is not None
        if searched and given:
            yield (quantity,), f"is what the search is to find; leave out {quantity} or the search"
        if not searched and not given:
            yield (quantity,), "is missing; give it, or a search for it"
    yield from _impossible_options("model_options", cell.model_options, models()[cell.model])
    of_strategy = strategies()[cell.strategy].options_type()
    yield from _impossible_options("strategy_options", cell.strategy_options, of_strategy)
    of_backend, settings = (
        backends()[cell.training.backend].options_type(),
        list(TrainingOptions.model_fields),
    )
    yield from _impossible_options("training", cell.training.backend_options, of_backend, settings)


def _impossible_sizes(cell: Cell) -> Iterator[tuple[tuple[str, ...], str]]:
    cls = strategies()[cell.strategy]
    for axis in cls.unused_axes(cell.sizes.by_axis):
        n = cell.sizes.by_axis[axis]
        mend = f"write sizes: {{{cls.axes[0]}: {n}}}" if cls.axes else "leave it out"
        yield ("sizes", axis), f"{n}: the strategy {cls.name} does not use the axis {axis}; {mend}"


def _impossible_options(
    kind: str, given: Mapping[str, Any], defaults: Any, others: Sequence[str] = ()
) -> Iterator[tuple[tuple[str, ...], str]]:
    """What is wrong with the options given under the key ``kind``.

    Args:
        defaults: the options as they are by default, a frozen dataclass.
        others: further keys that may stand there.
    """
    known, hints = [*others, *(f.name for f in fields(defaults))], get_type_hints(type(defaults))
    for name, value in given.items():
        if name not in known:
            what = "unknown key" if others else "unknown option"
            yield (kind, name), what + (suggestion(name, known) or "; there are none")
        try:
            TypeAdapter(hints.get(name, Any)).validate_python(value, strict=True)
        except ValidationError as error:
            yield (kind, name), first_problem(BaseModel, error)[1]
        if type(value) is int:
            # a whole number is a count of something, and of none only where that is the default
            least = 0 if getattr(defaults, name) == 0 else 1
            if value < least:
                yield (kind, name), f"must be at least {least}, not {value}"
    try:
        replace(defaults, **given)
    except ValueError as error:
        yield (kind,), str(error)
