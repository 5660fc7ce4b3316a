"""The names and option values that a cell may have, and messages on wrong ones."""

import ast
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal

from spbench import impls
from spbench.bench.cell import OWN_STEP, Cell, TrainingOptions, requirements
from spbench.bench.errors import UserError, shown, suggestion
from spbench.bench.files import read_file, resolved
from spbench.bench.measure.engines.engine import Candidates, engine_class, engine_classes, quantities
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.steps.step_file import OwnStep
from spbench.bench.measure.trace.meter import meters
from spbench.bench.setting_values import names_a_step, read_model_file, remote_name
from spbench.bench.yaml_files import read_yaml

#: for each kind of name, the function that returns the classes or objects of that kind by name
OF_CLASSES: Mapping[str, Callable[[], Mapping[str, Any]]] = {
    "strategy": impls.all_strategies,
    "peer": impls.all_peers,
    "as-published": impls.all_as_published,
    "model": impls.all_models,
    "backend": impls.all_backends,
    "engine": engine_classes,
    "meter": meters,
    "quantity": quantities,
}


def names(kind: str) -> list[str]:
    """The names of all models, strategies, peers, code as published, engines, meters, quantities or
    backends, sorted."""
    every: Iterable[str] = OF_CLASSES[kind]()
    return list(every) if kind in ("engine", "meter", "quantity") else sorted(every)


#: words on kinds of names, which the file explains
NAMES = read_yaml(Path(__file__).with_name("names.yaml"))
LISTED: dict[str, str] = NAMES["listed"]


def unknown(kind: str, name: str, allowed: Iterable[str]) -> str:
    """The message on a name of this ``kind`` that does not exist, and on what to write instead."""
    if kind == "model":
        allowed = [*allowed, *(each.name for each in impls.published_models())]
    here = NAMES["elsewhere"].get(kind, {}).get(name.lower())
    listed = f"spbench list {LISTED[kind]}" if kind in LISTED else ""
    mend = f"; here that is {here}" if here else suggestion(name, allowed, listed)
    mend = (remote_name(name) if kind == "model" else "") or mend
    file = f"; or give the path of a {NAMES['files'][kind]}" if kind in NAMES["files"] else ""
    return f"unknown {kind} {shown(name)}{mend}{file}"


def check_known(kind: str, given: Iterable[str], allowed: Sequence[str] | None = None) -> None:
    """Raise UserError for the first name in ``given`` that is not ``allowed`` (None: any name of the
    kind)."""
    listed = names(kind) if allowed is None else allowed
    for name in given:
        if name not in listed:
            raise UserError(unknown(kind, name, listed))


def _may_have(kind: str, path: Path) -> bool:
    """Whether a Python file's text has the name PRESETS, or a class with a base and a ``name``. True for a
    file with wrong syntax, because importing it says what is wrong."""
    try:
        nodes = [*ast.walk(ast.parse(read_file(path)))]
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return True
    if kind == "model":
        fields = ("id", "name", "asname")
        return any(getattr(node, field, "") == "PRESETS" for node in nodes for field in fields)
    lines = (line for node in nodes if isinstance(node, ast.ClassDef) and node.bases for line in node.body)
    bound = (each for line in lines for each in getattr(line, "targets", [getattr(line, "target", None)]))
    return any(getattr(each, "id", "") == "name" for each in bound)


def cell_names(kind: Literal["strategy", "model"], text: str, folder: Path = Path()) -> list[str]:
    """The names in cells for a user's ``text``: FILE.py gives all strategies or models in that file,
    FILE.py:NAME gives one of them, and any other text is a name itself. A file without a definition of that
    kind, such as a training script, is not run. UserError for such a file, for a missing file, for one that
    cannot be imported, and for an unknown NAME.

    Args:
        text: a name or a file; for strategies also several nested ones, joined by plus signs.
        folder: the folder from which a relative path starts.
    """
    if impls.SUFFIX not in text:
        return [text]
    if kind == "strategy" and impls.PLUS in text:
        parts = [cell_names(kind, part, folder) for part in text.split(impls.PLUS)]
        return [impls.PLUS.join(each) for each in itertools.product(*parts)]
    file, _, name = text.partition(f"{impls.SUFFIX}:")
    path = resolved(folder / Path(file + impls.SUFFIX if name else file).expanduser())
    if path.suffix != impls.SUFFIX:
        return [text]
    if not path.is_file():
        raise UserError(f"unknown {kind} {shown(text)}: there is no file {path}")
    if not _may_have(kind, path):
        mend = "a script that trains is read by spbench import, beside its configuration"
        raise UserError(f"{path}: has no {NAMES['in_files'][kind]}, so it is not run; {mend}")
    try:
        module = impls.add_file(path)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise UserError(
            f"{impls.place_of_error(error, (path,)) or path}: cannot be imported: {impls.raised(error)}"
        ) from error
    if kind == "model":
        presets = vars(module).get("PRESETS")
        defined = list(presets) if isinstance(presets, Mapping) else []
    else:
        defined = [each for each, cls in impls.all_strategies().items() if cls.__module__ == module.__name__]
    if not defined:
        raise UserError(f"{path}: has no {NAMES['in_files'][kind]}")
    if name and name not in defined:
        raise UserError(f"{path}: {unknown(kind, name, defined)}")
    return [name] if name else defined


def strategy_problem(name: str) -> str:
    """The message on a wrong name of a strategy, or of several joined by "+", or on a peer whose package is
    not installed; "" if the name is right."""
    listed = [*names("strategy"), *names("peer")]
    for part in name.split(impls.PLUS):
        if part not in listed and part not in names("as-published"):
            return unknown("strategy", part, listed)
    try:
        impls.nesting(name)
    except ValueError as error:
        return str(error)
    missing = impls.absent(requirements(name))
    return f"strategy {name} needs {' and '.join(missing)}; {impls.INSTALL}" if missing else ""


def refusal(cell: Cell) -> str:
    """Why a cell cannot run, by its sizes and closed forms alone; "" if these do not refuse it. A search is
    refused if neither the smallest nor the largest value that it may try can run."""
    reason = ""
    try:
        engine_class(cell.engine)().check(cell)
        search = Candidates(cell) if cell.search is not None else None
        for tried in [cell] if search is None else [search.at(search.values[at]) for at in (-1, 0)]:
            try:
                plan(tried)
            except impls.Unsupported as error:
                reason = str(error)
            else:
                return ""
    except impls.Unsupported as error:
        reason = str(error)
    return reason


def option_mistakes(
    section: str, name: str, given: Mapping[str, Any], config: Mapping[str, Any] | None = None
) -> list[tuple[list[str], str]]:
    """Mistakes in options, each as (path below ``section``, message).

    Args:
        section: the key of the options in a cell: model_options, strategy_options or training.
        name: the name of the model, strategy or backend that has the options.
        config: the config.json from which a model is made.
    """
    others: list[str] = []
    defaults: Any
    if section == "model_options":
        defaults = impls.unchanged_model(name, config)
    elif section == "strategy_options":
        defaults = impls.nesting(name).options_type()
    else:
        defaults, others = impls.all_backends()[name].options_type(), list(TrainingOptions.model_fields)
    own = [field.name for field in fields(defaults)]
    keys = [*others, *own]
    what = "unknown key" if others else "unknown option"
    mistakes = [
        ([name], what + (suggestion(name, keys) or "; there are none")) for name in given if name not in keys
    ]
    here = {name: value for name, value in given.items() if name in own}
    mistakes += [([name], message) for name, message in impls.wrong_values(defaults, here)]
    if mistakes:
        return mistakes
    try:
        options = replace(defaults, **here)
    except ValueError as error:
        return [([], str(error))]
    mistakes += [([name], message) for name, message in impls.values_without_effect(options, here)]
    return mistakes + [([], problem) for problem in getattr(options, "problems_of_sizes", ())]


def with_step(content: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The settings of a cell of a user's step, which the key ``step`` names in place of a model; UserError if
    it is no step. The step's file is looked for in ``folder``."""
    if not names_a_step(step := str(content["step"])):
        raise UserError(f"{step}: write FILE.py:FUNCTION, such as step.py:train")
    others = {name: value for name, value in content.items() if name != "step"}
    own = {"model": Path(step).name, "model_config_json": read_model_file(step, folder), "strategy": OWN_STEP}
    return {"precision": "bf16", **others, **own}


def step_mistakes(cell: Cell) -> Iterator[tuple[tuple[str, ...], str]]:
    """The mistakes in the cell of a user's step, each as (path in the cell, message)."""
    settings = cell.model_dump(exclude_defaults=True)
    for section, may in NAMES["of_steps"].items():
        for name in {*(settings.get(section, {}) if section else settings)} - {*may}:
            path = tuple(filter(None, (section, name)))
            yield path, "a step of your own makes its own model, batch and layout of ranks; leave it out"
    if not engine_class(cell.engine).runs_steps:
        yield ("engine",), f"the engine {cell.engine} runs no steps of users' own"
    try:
        OwnStep.of(cell)
    except UserError as error:
        yield ("step",), str(error)
