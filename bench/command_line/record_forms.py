"""Records and tables that a YAML file of a room describes, so that their fields stand together as data; the
table of memory, which several commands show; simulated times as text, with their intervals; and rows as flat
records, or as a pandas frame."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache, cached_property, partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import ChainableUndefined, Environment, Undefined
from jinja2.meta import find_undeclared_variables

from spbench import impls
from spbench.bench import measure, units
from spbench.bench.cell import OWN_STEP
from spbench.bench.command_line.output import Table
from spbench.bench.row import Row
from spbench.bench.setting_values import STOOD_IN
from spbench.bench.units import shown_time
from spbench.bench.yaml_files import read_yaml

if TYPE_CHECKING:
    from pandas import DataFrame


class RecordForms:
    """The forms of records in a YAML file, by name.

    A form is a mapping whose values are expressions of Jinja, or mappings and lists of these; numbers, null
    and the empty text stand as they are. The names in an expression are the values that a method gets,
    ``item``, keys or attributes of the item, and :meth:`record`, :meth:`records` and :meth:`text` with the
    same values.
    :func:`shown_band` and the functions of :mod:`bench.units` are filters, which leave None as it is. A
    missing value is None; an entry whose name ends with "?" is left out if it is None.
    """

    def __init__(self, path: Path):
        self.path = path

    @cached_property
    def forms(self) -> Mapping[str, Any]:
        """The content of the file."""
        return read_yaml(self.path)

    def record(self, form: str, item: Any = None, **values: Any) -> dict[str, Any]:
        """The record of an item, or of the values alone."""
        return dict(_filled(self.forms[form], item, self._names(item, values)))

    def records(self, form: str, items: Iterable[Any], **values: Any) -> list[dict[str, Any]]:
        """The record of each item."""
        return [self.record(form, item, **values) for item in items]

    def table(self, form: str, title: str, items: Iterable[Any], **values: Any) -> Table:
        """A table with a line for each item: ``lines`` of the form is that of a line; its other entries are
        attributes of :class:`Table`."""
        own = dict(self.forms[form])
        line = own.pop("lines")
        return Table(title, [_filled(line, item, self._names(item, values)) for item in items], **own)

    def document(self, form: str, **values: Any) -> str:
        """The lines of a form that is a template of Jinja, filled in with the values."""
        of_lines = _environment().overlay(trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True)
        return of_lines.from_string(self.forms[form]).render(values)

    def text(self, form: str, item: Any = None, **values: Any) -> str:
        """The text of an item: under ``texts`` the file has templates of Jinja, in which the end of a line is
        a blank; "": the template has nothing to say of the item."""
        template, names = _compiled(self.forms["texts"][form], of_text=True)
        return " ".join(template.render(_values(names, item, self._names(item, values))).split())

    def _names(self, item: Any, values: Mapping[str, Any]) -> dict[str, Any]:
        methods: tuple[Callable[..., Any], ...] = (self.record, self.records, self.text)
        further = {method.__name__: partial(method, **values) for method in methods}
        return {**further, **values, "item": item}


def _filled(part: Any, item: Any, values: Mapping[str, Any]) -> Any:
    """A part of a form with values in place of expressions."""
    if isinstance(part, dict):
        entries = ((name, _filled(each, item, values)) for name, each in part.items())
        return {n.removesuffix("?"): each for n, each in entries if each is not None or not n.endswith("?")}
    if isinstance(part, list):
        return [_filled(each, item, values) for each in part]
    if not isinstance(part, str) or not part:
        return part
    expression, names = _compiled(part)
    return expression(_values(names, item, values))


def _values(names: Iterable[str], item: Any, values: Mapping[str, Any]) -> dict[str, Any]:
    """The values of the names: of an item those that are no values by themselves."""
    of_item = item.get if isinstance(item, Mapping) else partial(getattr, item)
    return {name: values[name] if name in values else of_item(name) for name in names}


@cache
def _compiled(text: str, of_text: bool = False) -> tuple[Any, frozenset[str]]:
    """An expression, or a template if ``of_text``, and the names that it takes from values or an item."""
    environment = _environment()
    names = find_undeclared_variables(environment.parse(text if of_text else f"{{{{ {text} }}}}"))
    compiled = environment.from_string(text) if of_text else environment.compile_expression(text)
    return compiled, frozenset(names - environment.globals.keys())


@cache
def _environment() -> Environment:
    environment = Environment(undefined=ChainableUndefined)
    environment.globals |= {name: value for name, value in vars(units).items() if name.isupper()}
    functions = {**vars(units), "shown_band": shown_band}
    environment.filters |= {name: _if_there(f) for name, f in functions.items() if callable(f)}
    return environment


def _if_there(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with None as its result for None and for what is missing."""

    @wraps(function)
    def shown(value: Any, *further: Any) -> Any:
        return None if value is None or isinstance(value, Undefined) else function(value, *further)

    return shown


TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))


def memory_table(measured: Mapping[str, Mapping[str, Any]]) -> Table | str:
    """A table of memory: for each class of ranks that run the same program, a line for the set-up (step 0)
    and for each traced step; a sentence if no cell has classes.

    Args:
        measured: the measurements of rows, by the keys of their cells.
    """

    def held(nbytes: Mapping[str, float]) -> str:
        ordered = sorted(nbytes.items(), key=lambda item: -item[1])
        return ", ".join(f"{name.replace('_', ' ')} {units.gib(of)}" for name, of in ordered)

    entries = []
    for key, measurement in measured.items():
        classes = measurement.get("by_class") or ()
        alike: dict[str, Any] = {} if any(entry["stage"] for entry in classes) else {"stage": None}
        entries += [{"cell": key if len(measured) > 1 else None, **entry, **alike} for entry in classes]
    if not entries:
        return "No cell has the memory of its rank classes: meters count it on virtual ranks and on CPUs."
    usable = {measurement.get("usable_memory_bytes") for measurement in measured.values()}
    only = next(iter(usable)) if len(usable) == 1 else None
    title = "Memory of each rank class at each step" + (f", of {units.gib(only)} GiB" if only else "")
    return TABLES.table("memory", title, entries, held=held)


#: the mark after a time that is a tie with the fastest
TIE = "≈"
TIE_LEGEND = (
    f"{TIE}: a tie, by the time of a sample, with the fastest of the same model, length and GPUs, of any "
    "batch; they differ by less than such predictions err"
)

#: the words after a time, by the class of the rates that priced it (:attr:`Measurement.rates`)
_MARKED = {"datasheet": ", uncalibrated", "fitted elsewhere": ", fitted to others"}


def shown_band(measured: Mapping[str, Any]) -> str:
    """The step time of a row's measurement as text, with its interval if it has one: "2.31 s ±9%", "2.31 s
    -12% +40%, uncalibrated", "2.31 s ±60%, no rate of forward attention by triton" or "2.31 s -15% +110%,
    DeepSpeed priced as fully_shard"; "" if there is no time."""
    step_time_s, low, high = (measured.get(f"step_time_{name}s") for name in ("", "low_", "high_"))
    if not step_time_s:
        return ""
    if low is None or high is None:
        return shown_time(step_time_s)
    rates, lacks = measured.get("rates") or "", measured.get("lacks")
    marked = _MARKED | {name: f", {name}" for name in STOOD_IN}
    word = f", no rate of {lacks}" if lacks and rates in measure.ErrorModel.NO_RATE else marked.get(rates, "")
    return f"{shown_time(step_time_s)} {_spread(low / step_time_s - 1, high / step_time_s - 1)}{word}"


def _spread(low: float, high: float) -> str:
    """The ends of an interval in percent of the time: "±9%" if both are equally far, else "-12% +40%"."""
    both = math.sqrt((1 + high) / (1 + low)) - 1
    balanced = math.isclose((1 + high) * (1 + low), 1, abs_tol=0.005)
    return f"±{both:.0%}" if balanced and both < 0.5 else f"{low:+.0%} {high:+.0%}"


#: fields of a measurement that describe its step time in words
_WORDS = ("bound", "calibration", "rates", "band", "lacks", "routing")


def flat(row: Row) -> dict[str, Any]:
    """A row as one level of plain values, with units in names: the cell's settings, then the measurement with
    the interval of a simulated time (:func:`with_band`) and the results of further meters that are one number
    or word, by METER.NAME; ``mesh`` is :attr:`Cell.mesh_text`."""
    cell, measured = row["cell"], measure.with_band(row)["measurement"]
    sizes, axes = cell.get("sizes", {}), cell.get("mesh") or impls.MESH_AXES
    searched = (cell.get("search") or {}).get("quantity", "")
    losses, errors = measured.get("losses"), measured.get("errors") or {}
    unmetered = losses or errors  # of a training run, or of lockstep ranks
    unknown = unmetered or cell.get("strategy") == OWN_STEP
    return {
        **{name: cell.get(name) for name in ("model", "strategy")},
        "world_size": math.prod(n for axis, n in sizes.items() if axis not in impls.FOLDED_AXES),
        "mesh": impls.spelled({axis: sizes.get(axis, 1) for axis in impls.union(axes, sizes)}),
        **{
            name: cell.get(name) for name in ("batch", "seq_len", "precision", "cluster", "engine", "variant")
        },
        "status": row["status"],
        "searched": searched,
        **{name: value for name, value in measured.items() if isinstance(value, (int, float, type(None)))},
        **(measured.get("breakdown") or {}),
        **(measured.get("parts") or {}),
        **{name: measured.get(name) or None for name in _WORDS},
        "priced_by": measure.priced_by_in_words([measured]) or None,
        **{f"last_{name}": loss for name, loss in (losses or [{}])[-1].items()},
        **{f"error_{name}": error for name, error in errors.items()},
        **{
            f"{meter}.{name}": value
            for meter, values in (measured.get("meters") or {}).items()
            for name, value in values.items()
            if isinstance(value, (int, float, str))
        },
        "sent_bytes": _sent(None if unmetered else measured.get("communication")),
        "formula_sent_bytes": _sent(None if unknown else measured.get("formula")),
        "reason": row.get("reason", ""),
        "elapsed_s": row.get("elapsed_s"),
        "key": row["key"],
    }


def _sent(entries: list[dict[str, Any]] | None) -> float | None:
    return sum(entry["sent_bytes"] for entry in entries) if entries is not None else None


def flat_rows(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows as by :func:`flat`, and ``tie``: whether a simulated time ties with the fastest."""
    return [{**flat(row), "tie": tie} for row, tie in zip(rows, measure.tied(rows), strict=True)]


def as_frame(rows: Iterable[Row]) -> DataFrame:
    """A pandas frame with a line for each row, whose columns are the fields of :func:`flat_rows`."""
    from pandas import DataFrame

    return DataFrame(flat_rows([*rows]))
