"""Declarations: YAML files checked against pydantic models, with errors that fit in one line; and what
several kinds of file declare alike: published numbers, and the settings that were chosen by looking at them.

Nothing here imports torch, so that listing what is declared is quick.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files
from os import PathLike, fspath
from os.path import isdir, lexists
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.files import decoded, read_file
from spbench.bench.yaml_text import YAMLProblem, load

Path_ = Sequence[str | int]
ModelT = TypeVar("ModelT", bound=BaseModel)

SUFFIXES = (".yaml", ".yml")

#: words that older YAML takes for true and false
_SWITCHES = ("yes", "no", "on", "off", "y", "n")


class StrictModel(BaseModel):
    """A part of a file: unknown keys, NaN and infinities are refused, and nothing can be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping that a YAML file holds; UserError if the file cannot be read, is not YAML, or holds
    something else than a mapping."""
    return parse_yaml(path, read_file(path))


def parse_yaml(path: Path, content: bytes) -> dict[str, Any]:
    """The mapping that the content of a YAML file is; UserError, which names ``path``, if it is not YAML in
    UTF-8, or something else than a mapping."""
    try:
        loaded = load(decoded(path, content))
    except YAMLProblem as error:
        at = "" if error.line is None else f":{error.line}:{error.column}"
        raise UserError(f"{path}{at}: malformed YAML: {error.message}") from error
    if not isinstance(loaded, dict):
        found = "is empty" if loaded is None else f"holds a {type(loaded).__name__}"
        raise UserError(f"{path}: {found}, but a mapping of keys is needed")
    wrong = next((key for key in loaded if not isinstance(key, str)), None)
    if wrong is not None:
        raise UserError(f"{path}: {shown(wrong)}: a key must be a word")
    return loaded


@cache
def packaged(package: str) -> Mapping[str, Path]:
    """The YAML files that are data of a package, by their names; listed once in a process."""
    folder = Path(str(files(package)))
    return {
        path.stem: path
        for path in sorted(folder.iterdir(), key=lambda path: path.stem)
        if path.suffix in SUFFIXES
    }


def merge(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of both mappings; where both have a value, mappings are merged too, else ``above`` wins."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = merge(merged[key], value) if both else value
    return merged


def find_file(name: str | PathLike[str], package: str, kind: str) -> Path:
    """The packaged file of that name, or the user's own file where ``name`` is a path; UserError, with
    the names there are, if there is neither."""
    name, files = fspath(name), packaged(package)
    if name in files:
        return files[name]
    if "/" in name or name.endswith(SUFFIXES):
        path = Path(name).expanduser()
        with suppress(OSError, ValueError):  # of a name that no file can have
            if lexists(path):  # a link that leads nowhere is told when it is read
                return path
        raise UserError(f"no {kind} file {name}")
    if isdir(name):
        raise UserError(f"{shown(name)} is a folder; give the path of a YAML file in it")
    hint = suggestion(name, files, f"spbench list {kind}s")
    raise UserError(f"unknown {kind} {shown(name)}{hint}; or give the path of a YAML file")


def dotted(path: Path_) -> str:
    """A path of keys as people write it: groups[0].sizes.tp."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def validate(model: type[ModelT], content: Mapping[str, Any], where: str) -> ModelT:
    """The content as an instance of that model; nothing is converted (the text "4" is not the number 4).
    UserError with ``where``, the key path, what is wrong and how to mend it."""
    try:
        return model.model_validate(content, strict=True)
    except ValidationError as error:
        path, message = first_problem(model, error)
        raise UserError(": ".join(filter(None, (where, dotted(path), message)))) from error


def first_problem(model: type[BaseModel], error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """The key path and a description of the first thing that a model found wrong."""
    problems = error.errors(include_url=False)
    problem = problems[0]
    path = problem["loc"]
    given, more = shown(problem["input"]), f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
    match problem["type"]:
        case "extra_forbidden":
            message = "unknown key" + suggestion(path[-1], _known_keys(model, path[:-1]))
        case "missing":
            message = "is missing"
        case "bool_type" | "bool_parsing" if str(problem["input"]).lower() in _SWITCHES:
            message = f"must be true or false, not {given}"
        case "literal_error":
            message = f"must be {problem['ctx']['expected']}, not {given}"
            message += suggestion(
                problem["input"], re.findall(r"'([^']*)'", problem["ctx"]["expected"])
            ).split(" (")[0]
        case "too_short":
            message = "is empty; give at least one"
        case "value_error":
            message = str(problem["ctx"]["error"])
        case "model_type" | "model_attributes_type":
            message = f"must be a mapping of keys, not {given}"
        case _:
            message = problem["msg"].replace("Input should", "must") + f", not {given}"
    return path, message + more


def _known_keys(model: type[BaseModel], path: Path_) -> list[str]:
    """The keys that may stand at a path within a model."""
    for step in path:
        if isinstance(step, str) and step in model.model_fields:
            inner = _model_in(model.model_fields[step].annotation)
            if inner is None:
                return []
            model = inner
    return list(model.model_fields)


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((model for inner in get_args(annotation) if (model := _model_in(inner))), None)


Scalar = str | int | float | bool


@dataclass(frozen=True)
class PublishedNumber:
    """One number that was published, or the position where a paper shows a run without one.

    Attributes:
        source: its identity, FILE:ROW:COLUMN, the same in every scenario that compares it.
        quantity: what was counted or measured, in the words of its answer (a table's column, "ratio", ...).
        value: None where no number was published.
        text: the columns of its row, as they stand in the file.
    """

    source: str
    quantity: str
    value: float | None
    text: Mapping[str, str] = field(default_factory=dict)

    def has(self, selector: Mapping[str, Scalar]) -> bool:
        """Whether the row has these values."""
        return all(
            column in self.text and stands_for(self.text[column], value) for column, value in selector.items()
        )


def stands_for(text: str, value: Any) -> bool:
    """Whether a published word is a value of ours: 4 is "4" and "4.0", True is "true", None is ""."""
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return text == ("" if value is None else str(value))


def finite(text: str) -> float:
    """The finite number that a text stands for.

    Raises:
        ValueError: the text is no number, or NaN or infinite.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"no finite number: {text}")
    return number


class InferredSetting(StrictModel):
    """A setting that a paper leaves out, and the published numbers that decided it, which are no predictions.

    Attributes:
        setting: what was chosen.
        answers: the names of the claims and tables that were looked at.
        quantities: the quantities of the answers that were looked at; empty: all.
        rows: the rows of the answers that were looked at, by column and value (any of them); empty: all.
        variants: the scenario's variants that have the setting; empty: all.
        reason: one line: why this value.
    """

    setting: str
    answers: list[str] = Field(min_length=1)
    quantities: list[str] = []
    rows: list[dict[str, Scalar]] = []
    variants: list[str] = []
    reason: str

    def covers(self, answer: str, number: PublishedNumber, variant: str) -> bool:
        """Whether this number of this answer was looked at when the setting of the variant was chosen."""
        return (
            answer in self.answers
            and (not self.quantities or number.quantity in self.quantities)
            and (not self.rows or any(number.has(row) for row in self.rows))
            and (not self.variants or variant in self.variants)
        )
