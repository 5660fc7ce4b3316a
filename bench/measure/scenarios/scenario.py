"""Scenarios: YAML files that declare cells. :mod:`tools.papers.answer` reads and checks the other sections of
a file: published numbers, with which the cells are compared.

Each group is a cell whose model, strategy, batch, seq_len, precision, cluster, engine and sizes may be lists,
and whose mesh, a list of axes, may be a list of such lists; lists multiply. Nested settings merge deeply:
defaults, then the group, then the variant.

The command line's --set changes settings of cells by name (:func:`changed`).
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from os import PathLike
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.measure.scenarios.choices import unknown
from spbench.bench.measure.scenarios.expand import Problem, checked, expand
from spbench.bench.setting_values import names_a_step, with_suffix
from spbench.bench.yaml_files import InferredSetting, dotted, find_file, read_yaml, validate
from spbench.bench.yaml_text import YAMLProblem, load
from spbench.plots import FIGURES

T = TypeVar("T")

#: the flag that sets settings, for messages
FLAG = "--set"
#: settings whose value is a list of words
_LISTS = ("mesh", "model_options.recompute_modules")
#: fields of a cell that --set cannot set
_NOT_SET = ("variant", "model_config_json", "meters", "learning", "search", "timing", "device")


def given(pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """Settings by dotted name, such as ``training.backend``, from pairs of name and YAML text; lengths and
    batches may end in K, M or G, and lists have spaces between words. UserError for a setting given twice."""
    texts = given_once(FLAG, pairs)
    return {
        name: text.split() if name in _LISTS else with_suffix(_value(f"{FLAG} {name}", text))
        for name, text in texts.items()
    }


def option_values(flag: str, pairs: Iterable[tuple[str, str]]) -> dict[str, Any]:
    """The values that a flag gives, by name, read as YAML; UserError for a name given twice, or no YAML."""
    return {name: _value(f"{flag} {name}", text) for name, text in given_once(flag, pairs).items()}


def given_once(flag: str, pairs: Iterable[tuple[str, T]]) -> dict[str, T]:
    """The values that a flag gives, by name; UserError for a name given twice, where only one would count."""
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
    """The cell with other values of some settings, by dotted name; a search for one of these settings is left
    out. UserError, with the name, for an unknown setting or an impossible value."""
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
    return checked(content, lambda path, message: UserError(f"{FLAG} {dotted(path)}: {message}"))


def written(settings: Mapping[str, Any]) -> str:
    """The settings in the form of the command line: ``name=value,name=value``."""
    return ",".join(f"{name}={_text(value)}" for name, value in settings.items())


def _text(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)


#: the package of the scenarios that come with spbench
PACKAGE = "spbench.scenarios"


class Document(BaseModel):
    """The content of a scenario file, without its sections of published numbers.

    Attributes:
        paper: the paper that the scenario reproduces, by name or source in results/papers/papers.csv; or
            "measured" (numbers measured on real machines), or "field" (step times published by others).
        published_in: the paper that the numbers are from, if not ``paper``, such as "LASP-2, arXiv
            2502.07563"; it is judged by itself on the pages of ``paper``.
        inferred_from: settings chosen by looking at published numbers, each with the numbers.
        not_reproduced: at most 25 words for REPRODUCE.md: which published numbers are not met, and why.
        unsaid_attention: the kernel of cells that name none: "usual", which programs run on the card
            (:func:`with_usual_attention`), or "file", the default of the cluster's file.
        figure: the name of a figure, as in `spbench list figures`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str
    paper: str = ""
    published_in: str = ""
    about: str = ""
    defaults: dict[str, Any] = {}
    groups: list[dict[str, Any]] = Field(min_length=1)
    variants: dict[str, dict[str, Any]] = {}
    inferred_from: list[InferredSetting] = []
    not_reproduced: str = ""
    unsaid_attention: Literal["usual", "file"] = "usual"
    figure: str | None = None


@dataclass(frozen=True)
class Scenario:
    """A scenario file, checked except for its sections of published numbers.

    Attributes:
        cells: the declared cells of each variant; a scenario without variants has one, named "".
        content: the whole content of the file, unchecked.
    """

    name: str
    path: Path
    document: Document
    cells: Mapping[str, Sequence[Cell]]
    content: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def has_answers(self) -> bool:
        """Whether the file has sections of published numbers, which :mod:`tools.papers.answer` checks."""
        return not self.content.keys() <= Document.model_fields.keys()


def load_scenario(name: str | PathLike[str]) -> Scenario:
    """The packaged scenario of that name, or the scenario in the YAML file at that path; or the scenario of a
    user's step, such as "step.py:train".

    Raises:
        UserError: the scenario does not exist or has a mistake; names the file, the key and the remedy.
    """
    content: Mapping[str, Any]
    if names_a_step(str(name)):
        path = Path(name)
        content = {"title": path.name, "groups": [{"step": path.name}]}
    else:
        path = find_file(name, PACKAGE, "scenario")
        content = read_yaml(path)
    fields = Document.model_fields
    own = {key: each for key, each in content.items() if key in fields or not isinstance(each, list)}
    document = validate(Document, own, str(path))
    if document.figure is not None and document.figure not in FIGURES:
        raise UserError(f"{path}: figure: {unknown('figure', document.figure, FIGURES.names())}")
    if "all" in document.variants:
        raise UserError(f"{path}: variants.all: 'all' stands for every variant; choose another name")
    try:
        cells = {
            variant: expand(document.defaults, document.groups, document.variants, variant, path.parent)
            for variant in document.variants or [""]
        }
    except Problem as problem:
        raise UserError(f"{path}: {problem}") from problem
    return Scenario(path.stem, path, document, cells, content)
