"""Cells with some of their settings changed by name, as the command line's --set says them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.measure.scenarios.expand import impossible
from spbench.bench.setting_values import with_suffix
from spbench.bench.yaml_files import dotted, first_problem
from spbench.bench.yaml_text import YAMLProblem, load

T = TypeVar("T")

#: the flag, for messages
FLAG = "--set"
#: what a cell has that is not set
_NOT_SET = ("variant", "model_config_json", "meters", "learning", "search", "timing", "device")


def given(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Settings by dotted name, such as ``training.backend``, their values read as YAML; lengths and batches
    may end in K, M or G, and ``mesh`` is axes with spaces between. UserError for a setting given twice."""
    texts = given_once(FLAG, pairs)
    return {
        name: text.split() if name == "mesh" else with_suffix(_value(f"{FLAG} {name}", text))
        for name, text in texts.items()
    }


def option_values(flag: str, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Values by name that a flag gives, read as YAML; UserError for a name given twice, or no value."""
    return {name: _value(f"{flag} {name}", text) for name, text in given_once(flag, pairs).items()}


def given_once(flag: str, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """What a flag gives, by name; UserError for a name given twice, of which the last would win unsaid."""
    by_name: dict[str, T] = {}
    for name, value in pairs:
        if name in by_name:
            raise UserError(f"{flag} {name} is given twice; leave one out")
        by_name[name] = value
    return by_name


def _value(where: str, text: str) -> Any:
    try:
        return load(text)
    except YAMLProblem as error:
        raise UserError(f"{where}: {shown(text)} is no value: {error.message}") from error


def changed(cell: Cell, settings: Mapping[str, Any]) -> Cell:
    """The cell with other values of some settings, by dotted name; a search for one of them is left out.
    UserError, with the name, for a setting or a value that cannot be."""
    content = cell.model_dump(exclude_defaults=True)
    content["timeout_s"] = cell.timeout_s
    settable = [name for name in Cell.model_fields if name not in _NOT_SET]
    for name, value in settings.items():
        first, *rest = name.split(".")
        if first not in settable:
            raise UserError(f"{FLAG} {name}: unknown setting{suggestion(first, settable)}")
        if cell.search is not None and name == cell.search.quantity:
            content.pop("search", None)
        if name == "model":
            content.pop("model_config_json", None)
        at = content
        for part in [first, *rest][:-1]:
            at = at.setdefault(part, {})
            if not isinstance(at, dict):
                raise UserError(f"{FLAG} {name}: unknown setting; {part} has no parts")
        at[[first, *rest][-1]] = value
    try:
        changed_cell = Cell.model_validate(content, strict=True)
    except ValidationError as error:
        path, message = first_problem(Cell, error)
        raise UserError(f"{FLAG} {dotted(path)}: {message}") from error
    for path, message in impossible(changed_cell):
        raise UserError(f"{FLAG} {dotted(path)}: {message}")
    return changed_cell


def written(settings: Mapping[str, Any]) -> str:
    """The settings as the command line takes them: ``name=value,name=value``."""
    return ",".join(f"{name}={_text(value)}" for name, value in settings.items())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
