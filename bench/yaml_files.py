"""Declarations: YAML files checked against pydantic models, with errors in one line; and declarations that
several kinds of file share: published numbers, and settings that were chosen by looking at such numbers.

This module does not import torch, so that lists of declarations are quick.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
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

#: the words that YAML 1.1 takes for true and false
_SWITCHES = ("yes", "no", "on", "off", "y", "n")


class StrictModel(BaseModel):
    """A part of a file: unknown keys, NaN and infinities are refused, and fields cannot be changed."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; UserError if the file cannot be read, is not YAML, or is no mapping."""
    return parse_yaml(path, read_file(path))


def parse_yaml(path: Path, content: bytes) -> dict[str, Any]:
    """The mapping in the content of a YAML file; UserError, which names ``path``, if the content is not YAML
    in UTF-8, or no mapping."""
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
    """The paths of the YAML files in a package, by name without ending; listed once in a process."""
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


def nested(values: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """The mapping in which each value is at its path, a name with dots between the keys of mappings."""
    content: dict[str, Any] = {}
    for path, value in values:
        *above, key = path.split(".")
        place = content
        for name in above:
            place = place.setdefault(name, {})
        place[key] = value
    return content


def find_file(name: str | PathLike[str], package: str, kind: str) -> Path:
    """The path of the packaged file of that name, or of the user's own file if ``name`` is a path; UserError,
    with a suggestion, if there is neither."""
    name, files = fspath(name), packaged(package)
    if name in files:
        return files[name]
    if "/" in name or name.endswith(SUFFIXES):
        path = Path(name).expanduser()
        with suppress(OSError, ValueError):  # raised for a name that no file can have
            if lexists(path):  # a broken link is reported when it is read
                return path
        raise UserError(f"no {kind} file {name}")
    if isdir(name):
        raise UserError(f"{shown(name)} is a folder; give the path of a YAML file in it")
    hint = suggestion(name, files, f"spbench list {kind}s")
    raise UserError(f"unknown {kind} {shown(name)}{hint}; or give the path of a YAML file")


def dotted(path: Path_) -> str:
    """A path of keys as text: "groups[0].sizes.tp"."""
    text = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in path)
    return text.removeprefix(".")


def validate(model: type[ModelT], content: Mapping[str, Any], where: str) -> ModelT:
    """The content as an instance of a pydantic model, without conversions (the text "4" is not the number 4).
    UserError, with ``where``, the key path and the problem, if the content does not fit the model."""
    try:
        return model.model_validate(content, strict=True)
    except ValidationError as error:
        path, message = first_problem(model, error)
        raise UserError(": ".join(filter(None, (where, dotted(path), message)))) from error


def first_problem(model: type[BaseModel], error: ValidationError) -> tuple[tuple[str | int, ...], str]:
    """The key path and the description of the first problem in a model's validation error."""
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
    """The keys that a model allows at a path of keys; empty if the path leads to no model."""
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
    """One published number, or the position where a paper shows a run without a number.

    Attributes:
        source: the number's identity, FILE:ROW:COLUMN, the same in every scenario that compares the number.
        quantity: the counted or measured quantity, as its answer names it (a table's column, "ratio", ...).
        value: the number; None if no number was published.
        text: the texts of the number's row in the file, by column.
    """

    source: str
    quantity: str
    value: float | None
    text: Mapping[str, str] = field(default_factory=dict)

    def has(self, selector: Mapping[str, Scalar]) -> bool:
        """Whether the number's row has the selector's values, which are by column."""
        return all(
            column in self.text and stands_for(self.text[column], value) for column, value in selector.items()
        )


def stands_for(text: str, value: Any) -> bool:
    """Whether a published text means ``value``: "4" and "4.0" mean 4, "true" means True, "" means None."""
    if isinstance(value, bool):
        return text.lower() == str(value).lower()
    if isinstance(value, int | float):
        try:
            return float(text) == value
        except ValueError:
            return False
    return text == ("" if value is None else str(value))


def finite(text: str) -> float:
    """The finite number that a text means.

    Raises:
        ValueError: the text is no number, or NaN or infinite.
    """
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"no finite number: {text}")
    return number


class InferredSetting(StrictModel):
    """A setting that a paper leaves out, and the published numbers by which it was chosen, so that our values
    for these numbers are no predictions.

    Attributes:
        setting: the setting and its chosen value.
        answers: the names of the claims and tables with these numbers.
        quantities: only these quantities of the answers; empty: all.
        rows: only rows of the answers that match any of these selectors (value by column); empty: all.
        variants: the scenario's variants that have the setting; empty: all.
        reason: why this value, in one line.
    """

    setting: str
    answers: list[str] = Field(min_length=1)
    quantities: list[str] = []
    rows: list[dict[str, Scalar]] = []
    variants: list[str] = []
    reason: str

    def covers(self, answer: str, number: PublishedNumber, variant: str) -> bool:
        """Whether the variant's setting was chosen by looking at this number of this answer."""
        return (
            answer in self.answers
            and (not self.quantities or number.quantity in self.quantities)
            and (not self.rows or any(number.has(row) for row in self.rows))
            and (not self.variants or variant in self.variants)
        )
