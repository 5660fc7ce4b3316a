"""The lines of `spbench list` on classes and models; to read them, the modules and torch are imported."""

from __future__ import annotations  # names of the doors, in annotations too, import torch

import inspect
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from spbench import impls
from spbench.bench import measure
from spbench.bench.command_line.output import Table
from spbench.bench.errors import listed
from spbench.bench.units import three_digits
from spbench.bench.yaml_files import read_yaml
from spbench.plots.series import grouped


def of_classes(kind: str) -> dict[str, str]:
    """The line about each class of a kind, by the class's name."""
    from spbench.bench.tools.papers.answer import answer_kinds  # imports torch

    by_kind = {measure.LISTED[name]: classes for name, classes in measure.OF_CLASSES.items()}
    by_kind["answers"] = answer_kinds
    about = _ABOUT.get(kind, _first_sentence)
    texts = {name: about(each) for name, each in sorted(by_kind[kind]().items())}
    if kind == "models":
        texts |= {
            each.name: f"{each.parameters or 'an uncited number of'} parameters, by its config.json"
            for each in impls.published_models()
        }
    return texts


def that_fit(kind: str, text: str) -> Collection[str] | None:
    """If ``kind`` is "strategies", the names of those that support the model called ``text``; if "models", of
    those that the strategy ``text`` supports, whatever their sizes; None if nothing is called ``text``, and
    for other kinds."""
    if kind == "models":
        if (cls := impls.all_strategies().get(text)) is None:
            return None
        return [name for name, model in impls.all_models().items() if not cls.lacking(_sites(model))]
    if kind != "strategies":
        return None
    configs = dict.fromkeys(impls.all_models()) | {
        each.name: each.config for each in impls.published_models()
    }
    if text not in configs:
        return None
    sites = _sites(impls.model_preset(text, config=configs[text]))
    return [name for name, cls in impls.all_strategies().items() if not cls.lacking(sites)]


def _sites(model: Any) -> list[impls.Site]:
    """The sites at which a model's step uses a strategy, at the longest sequence up to 4096 that it supports
    (a model on grids does not support every length)."""
    for length in range(_LENGTH, 0, -1):
        try:
            return list(model.sites(1, length))
        except impls.Unsupported:
            continue
    return []


def _about_strategy(cls: type[impls.Strategy]) -> str:
    axes = f"{'axis' if len(cls.axes) == 1 else 'axes'} {', '.join(cls.axes)}" if cls.axes else ""
    around = f"{cls.name}+S: around a strategy S" if cls.can_enclose else ""
    needs = f"needs {' and '.join(cls.requires)}" if cls.requires else ""
    notes = [axes, around, needs, cls.source]
    return f"{cls.summary} ({', '.join(n for n in notes if n)})".replace(" ()", "")


def _about_model(model: Any) -> str:
    """A text of a model's sizes and its whole numbers that are no defaults: "layers 32, hidden 4096"."""
    always = {names[0] for names in _SIZES.values()}
    sizes = {field.name: (getattr(model, field.name), field.default) for field in fields(model)}
    return ", ".join(
        f"{name} {value}"
        for name, (value, usual) in sizes.items()
        if type(value) is int and (value != usual or (value and name in always))
    )


def _first_sentence(documented: object) -> str:
    paragraph = (inspect.getdoc(documented) or "").split("\n\n")[0]
    return _ROLE.sub(r"\1", " ".join(paragraph.split()).split(". ")[0].rstrip("."))


_LENGTH = 4096
#: a role around a name in a docstring, such as :class:`Name`
_ROLE = re.compile(r":[a-z]+:`~?([^`]+)`")
#: the functions that describe classes of a kind; other kinds are described by a docstring's first sentence
_ABOUT: dict[str, Callable[[Any], str]] = {
    "strategies": _about_strategy,
    "peers": _about_strategy,
    "as-published": lambda cls: f"{_about_strategy(cls)}: {cls.departs}",
    "models": _about_model,
    "engines": lambda cls: cls.summary,
}


#: for each column, the names of its field in a preset and in files config.json
_SIZES: Mapping[str, Sequence[str]] = read_yaml(Path(__file__).with_name("tables.yaml"))["sizes"]
_IMPORTANT = ("name", "parameters", "layers", "hidden", "heads", "experts", "kv heads", "vocabulary")
#: the names of presets for tests, and the text that a terminal shows instead of them
_SMALL = re.compile(r"-(tiny|mini)\b")
FOLDED = "small sizes, for verification and tests"
#: the units of numbers of parameters, the smallest first
_UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}
#: the part of a model's name after its family: a size, a version, or a kind of tuning
_MEMBER = re.compile(r"[-_](?:v?\d|[A-Z]\d|Instruct).*")


def tables_of_models(names: Sequence[str], *, each: bool) -> list[Table]:
    """A table of the sizes of presets, and a table of the models on Hugging Face.

    Args:
        names: the names of the models that are shown.
        each: whether each model on Hugging Face has a line; else each owner has one.
    """
    wanted = {*names}
    ours = {name: model for name, model in sorted(impls.all_models().items()) if name in wanted}
    theirs = [model for model in impls.published_models() if model.name in wanted]
    tables = []
    if ours:
        lines = [{"name": name, **_sizes(vars(model))} for name, model in ours.items()]
        folded = {} if each else {i: FOLDED for i, name in enumerate(ours) if _SMALL.search(name)}
        tables.append(Table("Presets", lines, _IMPORTANT, folded=folded))
    if theirs:
        of_each = ({"name": of.name, "parameters": _range([of]), **_sizes(of.config)} for of in theirs)
        lines = [*of_each] if each else [*_owners(theirs)]
        tables.append(Table("By name on Hugging Face", lines, _IMPORTANT, below=("families",)))
    return tables


def _sizes(values: Mapping[str, Any]) -> dict[str, Any]:
    """A model's sizes by column; None for a size that the preset or config.json does not have."""
    return {
        column: next((values[name] for name in names if values.get(name)), None)
        for column, names in _SIZES.items()
    }


def _owners(models: Sequence[impls.Published]) -> Iterator[dict[str, Any]]:
    """A line for each owner of models: the number of names, the range of parameters, and four families."""
    owners = grouped(models, lambda model: model.name.partition("/")[0])
    for owner, own in sorted(owners.items(), key=lambda item: item[0].lower()):
        families = {(name := _MEMBER.sub("", model.name.partition("/")[2])).lower(): name for model in own}
        yield {
            "owner": owner,
            "names": len(own),
            "parameters": _range(own),
            "families": listed(sorted(families.values()), 4),
        }


def _range(models: Sequence[impls.Published]) -> str:
    """The numbers of parameters of the smallest and the largest model ("7B to 70B"); "" if not published."""
    counts = sorted(_count(model.parameters) for model in models if model.parameters)
    return " to ".join(dict.fromkeys(map(_rounded, counts[:1] + counts[-1:])))


def _count(text: str) -> float:
    """The number that a text means: "671B" is 671e9, and a text of digits is the number itself."""
    return float(text[:-1]) * _UNITS[text[-1]] if text[-1] in _UNITS else float(text)


def _rounded(count: float) -> str:
    unit = next(unit for unit in reversed(_UNITS) if count >= _UNITS[unit])
    return f"{three_digits(count / _UNITS[unit])}{unit}"
