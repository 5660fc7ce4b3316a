"""Result rows: their cells' fields, and how they are grouped into panels and lines."""

import json
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from spbench.impls.folding import world_ranks
from spbench.plots.style import backend_name, engine_name, model_name

Row = Mapping[str, Any]
Key = TypeVar("Key", bound=Hashable)
Item = TypeVar("Item")

#: the fields of a cell by whose values lines are told apart
_FIELDS = ("variant", "cluster", "engine", "precision", "batch", "seq_len")
#: the settings whose values are understood without their names
_SPEAKING = ("variant", "cluster", "engine", "precision", "sizes")


def gpus(row: Row) -> int:
    """The number of GPUs of a row's cell."""
    return world_ranks(row["cell"].get("sizes") or {})


def gpu_counts(rows: Iterable[Row]) -> list[int]:
    """The distinct numbers of GPUs of rows, ascending."""
    return sorted({gpus(row) for row in rows})


def gpus_of(cluster: str, *counts: int) -> str:
    """The text of a machine in titles: "16 GPUs (dgx-h100)", "8 to 64 GPUs (dgx-h100)"."""
    ends = dict.fromkeys(str(n) for n in (min(counts), max(counts)))
    return f"{' to '.join(ends)} GPU{'s' * (max(counts) != 1)} ({cluster})"


def strategy(row: Row) -> str:
    """The name of the strategy of a row's cell."""
    return str(row["cell"]["strategy"])


def model(row: Row) -> str:
    """The name of the model of a row's cell."""
    return str(row["cell"]["model"])


def engine(row: Row) -> str:
    """The name of the engine that ran a row's cell."""
    return str(row["cell"].get("engine", "virtual"))


def backend(row: Row) -> str:
    """The name of the data-parallel backend of a row's cell."""
    return str(row["cell"]["training"]["backend"])


def option(row: Row, group: str, name: str, default: Any = None) -> Any:
    """An option of a row's cell; ``group`` is "model_options" or "strategy_options"."""
    return (row["cell"].get(group) or {}).get(name, default)


def searches_for(row: Row, field: str) -> bool:
    """Whether a row's cell is a search for the largest value of a field."""
    return (row["cell"].get("search") or {}).get("quantity") == field


def but_length(row: Row) -> str:
    """The settings of a row's cell without batch, length and search, as JSON: equal for a search for the
    longest sequence and for a step of any length."""
    left_out = ("batch", "seq_len", "search")
    return json.dumps({k: v for k, v in row["cell"].items() if k not in left_out}, sort_keys=True)


def grouped(items: Iterable[Item], by: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """The items (for example, rows) by their value of ``by``, in the order in which values first appear."""
    groups: dict[Key, list[Item]] = {}
    for item in items:
        groups.setdefault(by(item), []).append(item)
    return groups


def by_model(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of each model, by the model's name in figures, sorted by the presets' names."""
    return {model_name(name): some for name, some in sorted(grouped(rows, model).items())}


def shared(rows: Iterable[Row], name: str) -> Any:
    """The value of a field of rows' cells if all rows have the same value, else None."""
    values = {str(row["cell"].get(name)): row["cell"].get(name) for row in rows}
    return next(iter(values.values())) if len(values) == 1 else None


def title(rows: Sequence[Row], default: str) -> str:
    """The title of the rows' scenario (``default`` if rows name none), and the settings that rows share."""
    named = next((row["scenario"] for row in rows if row.get("scenario")), None)
    scenario = named.get("title") if isinstance(named, Mapping) else named
    common = [shared(rows, name) for name in ("cluster", "precision", "variant")]
    ran_by = {engine_name(engine(row)) for row in rows}
    text = ", ".join([str(value) for value in common if value] + [*ran_by] * (len(ran_by) == 1))
    return f"{scenario or default}{f' ({text})' if text else ''}"


def differing_settings(
    rows: Sequence[Row],
    ignored: Sequence[str] = (),
    at: Callable[[Row], int] = gpus,
    of: Callable[[Row], Mapping[str, Any]] = lambda row: settings(row),
) -> Callable[[Row], str]:
    """A function from a row to a text of the settings in which it differs from others of its strategy; "" for
    strategies with at most one row at each place.

    Args:
        ignored: settings that do not distinguish rows.
        at: a function from a row to its place on the x axis.
        of: a function from a row to its settings.
    """
    names = {
        name: [each for each in differing(list(map(of, some))) if each not in ignored]
        for name, some in grouped(rows, strategy).items()
        if len(set(map(at, some))) < len(some)
    }

    def text(row: Row) -> str:
        of_row = of(row)
        words = (setting_text(name, of_row.get(name)) for name in names.get(strategy(row), ()))
        return ", ".join(filter(None, words))

    return text


def setting_text(name: str, value: Any) -> str:
    """A setting in words: "2 layers", "placement zigzag", "recomputed"; "" for a setting without a value."""
    if name == "checkpointing":
        return "recomputed" if value else ""
    if value is None or name in _SPEAKING:
        return str(value or "")
    if name == "backend":
        return backend_name(value)
    if name == "layers":
        return f"{value} layer{'s' * (value != 1)}"
    return f"{name.replace('_', ' ')} {value}"


def settings(row: Row) -> dict[str, Any]:
    """The settings of a row's cell on one level, without the model, the strategy and most sizes of axes."""
    cell = row["cell"]
    of_cell = {name: cell.get(name) for name in _FIELDS}
    of_cell |= {axis: (cell.get("sizes") or {}).get(axis, 1) for axis in ("dp", "pp")}
    of_cell["mesh"] = " ".join(cell.get("mesh") or ["default"])
    for group in ("model_options", "strategy_options", "training"):
        of_cell |= cell.get(group) or {}
    return of_cell


def differing(items: Sequence[Mapping[str, Any]]) -> list[str]:
    """The keys whose values, as texts, differ between items, in the order in which keys first appear."""
    names = dict.fromkeys(name for item in items for name in item)
    return [name for name in names if len({str(item.get(name)) for item in items}) > 1]
