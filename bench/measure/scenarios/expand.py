"""Make cells from the settings of a scenario file, and check them.

Some settings have an effect only in some cells: the device, the rank, and settings for certain engines or
steps. Such a setting is refused where it has an effect in no cell of its group, or of all groups.
"""

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter
from os.path import lexists
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError

from spbench.bench.cell import OWN_STEP, Cell, strategy_axes
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.engine import engine_class
from spbench.bench.measure.scenarios import choices
from spbench.bench.setting_values import DOCUMENTS, names_a_file, read_model_file, with_documents
from spbench.bench.yaml_files import SUFFIXES, dotted, first_problem, merge
from spbench.impls import unused_axes

Path_ = tuple[str, ...]


_PARTLY_HEEDED, _OF_PIPELINES, _NOT_LEARNING = (
    choices.NAMES[kind] for kind in ("partly_heeded", "of_pipelines", "not_learning")
)
_DEFAULTS = Cell(model="", strategy="", batch=1, seq_len=1)


def _unheeded(cell: Cell, name: str) -> str:
    """Why a setting has no effect in a cell; "" if it has one."""
    if name in _OF_PIPELINES:
        return "" if cell.sizes.pp > 1 else "there are no pipeline stages to schedule"
    if name not in engine_class(cell.engine).heeds:
        return f"the engine {cell.engine} does not heed it"
    if name in _NOT_LEARNING and cell.learning is not None:
        return "a training run gives losses alone, and does not heed it"
    inference = name == "training.moments" and cell.training.step != "training"
    return "an inference step has no optimizer" if inference else ""


def ignored(cells: Sequence[Cell]) -> Iterator[tuple[Path_, str]]:
    """The settings of some cells that have an effect in no cell, each with the reason and the remedy."""
    for name in _PARTLY_HEEDED:
        of = attrgetter(name)
        reasons = [_unheeded(cell, name) for cell in cells if of(cell) != of(_DEFAULTS)]
        if reasons and all(reasons):
            yield tuple(name.split(".")), f"{reasons[0]}; leave it out"
    for cell in cells:
        if cell.rank is not None and cell.rank >= cell.sizes.world:
            yield ("rank",), f"there is no rank {cell.rank}: give one from 0 to {cell.sizes.world - 1}"
            break


#: "available": CUDA where this machine has it, else the CPU
Asked = Literal["cpu", "cuda", "available"]


def on_device(cells: Sequence[Cell], asked: Asked) -> list[Cell]:
    """The cells with the device ``asked`` for; cells of engines that use no device stay on the CPU. UserError
    if CUDA is asked for and this machine has none, or no cell could use it."""
    real = [engine_class(cell.engine).on_devices for cell in cells]
    if asked == "cuda" and cells and not any(real):
        engines = ", ".join(dict.fromkeys(cell.engine for cell in cells))
        raise UserError(f"--device cuda: the engine {engines} uses no device; name one that does by --engine")
    device = chosen_device(asked) if any(real) else "cpu"
    return [
        cell.model_copy(update={"device": device if uses else "cpu"})
        for cell, uses in zip(cells, real, strict=True)
    ]


def chosen_device(asked: Asked) -> Literal["cpu", "cuda"]:
    """The device for ``asked``, "cpu" or "cuda"; UserError if CUDA is asked for and this machine has none."""
    if asked != "cpu" and torch.cuda.is_available():
        return "cuda"
    if asked != "cuda":
        return "cpu"
    built = "sees no GPU" if torch.version.cuda else "is built for the CPU alone"
    raise UserError(f"--device cuda: torch {torch.__version__} {built}; leave out --device, or use cpu")


def playing_rank(cells: Sequence[Cell], rank: int | None) -> list[Cell]:
    """The cells with their ``rank`` set, unless it is None; UserError if a cell's engine runs all ranks, or
    the cell has no such rank."""
    if rank is None:
        return list(cells)
    for cell in cells:
        if "rank" not in engine_class(cell.engine).heeds:
            raise UserError(f"--rank {rank}: the engine {cell.engine} does not play one alone; leave it out")
        if rank >= cell.sizes.world:
            raise UserError(
                f"--rank {rank}: {cell.key} has ranks 0 to {cell.sizes.world - 1}; "
                "name one of these, or more ranks by --world-size"
            )
    return [cell.model_copy(update={"rank": rank}) for cell in cells]


#: keys of a group whose value may be a list; each axis of sizes may be one too, and mesh a list of lists
MULTIPLYING = ("step", "model", "strategy", "batch", "seq_len", "precision", "cluster", "engine")

#: the most cells of a scenario with all variants: more would run for weeks and fill the memory
MOST_CELLS = 100_000


class Problem(ValueError):
    """An error in a scenario file, with its key path."""

    def __init__(self, path: Sequence[str | int], message: str):
        super().__init__(f"{dotted(path)}: {message}")


_Layers = list[tuple[tuple[str | int, ...], Mapping[str, Any]]]


def expand(
    defaults: Mapping[str, Any],
    groups: Sequence[Mapping[str, Any]],
    variants: Mapping[str, Mapping[str, Any]],
    variant: str,
    folder: Path,
) -> list[Cell]:
    """The cells of a scenario's groups under one of its variants ("" if it has none). Paths of models start
    in ``folder``, the folder of the scenario's file. Raises Problem for the first mistake."""
    group_of: dict[str, int] = {}
    cells: list[Cell] = []
    counted = 0
    for number, group in enumerate(groups):
        # the layer that wins comes first
        layers: _Layers = [(("groups", number), group), (("defaults",), defaults)]
        if variant:
            layers.insert(0, (("variants", variant), variants[variant]))
        merged: dict[str, Any] = {}
        for place, layer in reversed(layers):
            for key, instead in choices.NAMES["set_otherwise"].items():
                if key in layer:
                    raise Problem([*place, key], f"unknown key; {instead}")
            merged = merge(merged, layer)
        lists = _lists(merged, layers)
        counted += math.prod(map(len, lists.values()))
        if counted * max(1, len(variants)) > MOST_CELLS:
            raise Problem(["groups", number], f"there are more than {MOST_CELLS} cells; leave out values")
        for values in itertools.product(*lists.values()):
            cell = _cell(_content(merged, dict(zip(lists, values, strict=True)), variant), layers, folder)
            if cell.key in group_of:
                other = group_of[cell.key]
                where = "twice here" if other == number else f"in groups[{other}] too"
                raise Problem(["groups", number], f"the cell {cell.key} is declared {where}; leave one out")
            group_of[cell.key] = number
            cells.append(cell)
        of_group = [cell for cell in cells if group_of[cell.key] == number]
        for path, message in ignored(of_group):
            if (origin := _origin(path, layers))[0] == "groups":  # what all groups have may be for others
                raise Problem(origin, message)
    for path, message in ignored(cells):
        raise Problem(_origin(path, layers), message)
    return cells


def _lists(merged: Mapping[str, Any], layers: _Layers) -> dict[tuple[str, ...], list[Any]]:
    """The settings of a group that multiply cells: the list of values of each setting, by its path."""
    given: dict[tuple[str, ...], Any] = {(key,): merged[key] for key in MULTIPLYING if key in merged}
    if isinstance(sizes := merged.get("sizes"), dict):
        given |= {("sizes", axis): value for axis, value in sizes.items()}
    mesh = merged.get("mesh")
    if isinstance(mesh, list) and all(order is None or isinstance(order, list) for order in mesh):
        given["mesh",] = mesh
    for path, value in given.items():
        if value == []:
            raise Problem(_origin(path, layers), "is an empty list, which leaves no cell; give a value")
    return {path: value if isinstance(value, list) else [value] for path, value in given.items()}


def _content(
    merged: Mapping[str, Any], chosen: Mapping[tuple[str, ...], Any], variant: str
) -> dict[str, Any]:
    """The settings of a cell: the group's settings, in which the ``chosen`` value replaces each list."""
    content = {**merged, "variant": variant}
    for path, value in chosen.items():
        if len(path) == 1:
            content[path[0]] = value
        else:
            content["sizes"] = {**content["sizes"], path[1]: value}
    return content


def _origin(path: Sequence[str | int], layers: _Layers) -> list[str | int]:
    """The path of a cell's setting in the file: in the first layer that has the setting, else in the
    group."""
    said = (place for place, layer in layers if _at(layer, path) is not _NOTHING)
    return [*next(said, next(place for place, _ in layers if place[0] == "groups")), *path]


_NOTHING = object()


def _at(settings: Any, path: Sequence[str | int]) -> Any:
    """The value at a path of settings; _NOTHING if the path leads nowhere."""
    for step in path:
        if not isinstance(settings, Mapping) or step not in settings:
            return _NOTHING
        settings = settings[step]
    return settings


def _cell(content: Mapping[str, Any], layers: _Layers, folder: Path) -> Cell:
    for path in (("step",), ("strategy",), ("model",), ("cluster",), ("model_options", DOCUMENTS)):
        try:
            content = _with_file(content, path[-1], folder)
        except UserError as error:
            raise Problem(_origin(path, layers), str(error)) from error
    return checked(content, lambda at, said: Problem(_origin(at, layers), said + _sweep(content, at)))


def checked(content: Mapping[str, Any], problem: Callable[[Sequence[str | int], str], Exception]) -> Cell:
    """The cell with these settings; at the first mistake, raises ``problem(path, message)``."""
    try:
        cell = Cell.model_validate(content, strict=True)
    except ValidationError as error:
        raise problem(*first_problem(Cell, error)) from error
    for path, message in impossible(cell):
        raise problem(path, message)
    return cell


def _sweep(content: Mapping[str, Any], path: Sequence[str | int]) -> str:
    """The end of a message on a list for a setting that does not multiply: how to sweep it; else ""."""
    if not isinstance(_at(content, path), list) or not path or path[0] in (*MULTIPLYING, "mesh", "meters"):
        return ""
    return "; a list here is no sweep: write a group, or a variant, for each value"


def _with_file(content: Mapping[str, Any], key: str, folder: Path) -> Mapping[str, Any]:
    """The settings, in which the name of the strategy or model that a Python file defines replaces its path;
    the content of a config.json, or of a file of documents, is there as far as it counts; the path of a
    cluster's file starts from the working directory; and a user's step is a model."""
    if key == DOCUMENTS:
        return with_documents(content, folder)
    value = content.get(key)
    if key == "step" and value is not None:
        return choices.with_step(content, folder)
    if key == "cluster":
        path = folder / Path(str(value)).expanduser()
        return {**content, key: str(path)} if path.suffix in SUFFIXES and lexists(path) else content
    if key == "step" or not isinstance(value, str) or content.get("strategy") == OWN_STEP:
        return content
    name, *others = choices.cell_names("model" if key == "model" else "strategy", value, folder)
    if others:
        raise UserError(f"{value} has several: {', '.join([name, *others])}; write {value}:{name}")
    if key == "model" and names_a_file(name):
        return {**content, "model_config_json": read_model_file(name, folder)}
    return {**content, key: name}


def impossible(cell: Cell) -> Iterator[tuple[Path_, str]]:
    """The mistakes in a cell that need no strategy to find, each as (path in the cell, message)."""
    own = cell.strategy == OWN_STEP
    searched_for = [cell.search.quantity] if cell.search is not None else []
    named: list[tuple[tuple[str, ...], str, list[str]]] = [
        (("model",), "model", [cell.model] if cell.model_config_json is None else []),
        (("engine",), "engine", [cell.engine]),
        (("meters",), "meter", cell.meters),
        (("search", "quantity"), "quantity", searched_for),
        (("training", "backend"), "backend", [cell.training.backend]),
    ]
    for path, kind, wanted in named:
        for name in wanted:
            if name not in choices.names(kind):
                yield path, choices.unknown(kind, name, choices.names(kind))
    if not own and (problem := choices.strategy_problem(cell.strategy)):
        yield ("strategy",), problem
    try:
        load_cluster(cell.cluster)
    except UserError as error:
        yield ("cluster",), str(error)
    if own:
        yield from choices.step_mistakes(cell)
        return
    axes = strategy_axes(cell.strategy)
    for axis in unused_axes(axes, cell.sizes.by_axis):
        n = cell.sizes.by_axis[axis]
        mend = f"write sizes: {{{axes[0]}: {n}}}" if axes else "leave it out"
        yield ("sizes", axis), f"{n}: the strategy {cell.strategy} does not use the axis {axis}; {mend}"
    if cell.learning is not None and cell.search is not None:
        yield ("learning",), "cannot be together with a search; leave one out"
    for quantity in ("batch", "seq_len"):
        searched = cell.search is not None and cell.search.quantity == quantity
        given = getattr(cell, quantity) is not None
        if searched and given:
            yield (quantity,), f"is what the search is to find; leave out {quantity} or the search"
        if not searched and not given:
            yield (quantity,), "is missing; give it, or a search for it"
    for section, name, options in (
        ("model_options", cell.model, cell.model_options),
        ("strategy_options", cell.strategy, cell.strategy_options),
        ("training", cell.training.backend, dict(cell.training.backend_options)),
    ):
        config = cell.model_config_json if section == "model_options" else None
        for below, message in choices.option_mistakes(section, name, options, config) if options else ():
            yield (section, *below), message
