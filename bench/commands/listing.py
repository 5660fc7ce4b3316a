"""`spbench list`: what there is to run and to ask for.

Scenarios and clusters are read from their files. The rest is declared by code, which is imported, and torch
with it, if it has changed since it was listed last (:mod:`bench.declarations`).
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import click

from spbench.bench.commands.options import printed
from spbench.bench.commands.output import Output
from spbench.bench.declarations import declared

if TYPE_CHECKING:
    from spbench.impls.strategies.base import Strategy

Entries = Iterator[tuple[str, str]]


def _from_files(package: str, key: str) -> Entries:
    from spbench.bench.errors import UserError
    from spbench.bench.yaml_files import packaged, read_yaml

    for name, path in packaged(package).items():
        try:
            text: Any = read_yaml(path).get(key, "")
        except UserError as error:
            text = str(error)
        yield name, str(text)


def _scenarios() -> Entries:
    return _from_files("spbench.scenarios", "title")


def _clusters() -> Entries:
    return _from_files("spbench.scenarios.clusters", "about")


def _strategies() -> Entries:
    from spbench.impls.strategies.registry import strategies

    return _described_strategies(strategies())


def _peers() -> Entries:
    """Whether or not they are installed."""
    from spbench.impls.peers.registry import peers

    return _described_strategies(peers())


def _described_strategies(classes: Mapping[str, type[Strategy]]) -> Entries:
    for name, cls in sorted(classes.items()):
        axes = f"{'axis' if len(cls.axes) == 1 else 'axes'} {', '.join(cls.axes)}" if cls.axes else ""
        around = f"{name}+S: around a strategy S" if cls.can_enclose else ""
        needs = f"needs {' and '.join(cls.requires)}" if cls.requires else ""
        notes = [axes, around, needs, cls.source]
        yield name, f"{cls.summary} ({', '.join(n for n in notes if n)})".replace(" ()", "")


def _models() -> Entries:
    from dataclasses import fields

    from spbench.impls.models.model import models

    for name, model in sorted(models().items()):
        sizes = {f.name: getattr(model, f.name) for f in fields(model)}  # type: ignore[arg-type]
        numbers = [f"{key} {value}" for key, value in sizes.items() if type(value) is int]
        yield name, ", ".join(numbers)


def _engines() -> Entries:
    from spbench.bench.engines.engine import engines

    return ((name, cls.summary) for name, cls in sorted(engines().items()))


def _backends() -> Entries:
    from spbench.impls.backends.registry import backends

    return _described(backends())


def _meters() -> Entries:
    from spbench.bench.meters.registry import meters

    return _described(meters())


def _quantities() -> Entries:
    from spbench.bench.search.search import quantities

    return _described(quantities())


def _answers() -> Entries:
    from spbench.bench.published.answer import answer_kinds

    return _described(answer_kinds())


def _forms() -> Entries:
    from spbench.bench.commands.forms import form_names, load_form

    for name in form_names():
        yield name, _first_sentence(inspect.getmodule(load_form(name)))


def _exports() -> Entries:
    from spbench.bench.exports import export_names, load_export

    for name in export_names():
        yield name, _first_sentence(inspect.getmodule(load_export(name)))


def _described(classes: Mapping[str, type]) -> Entries:
    """Each class's name, with the first sentence of its docstring."""
    for name, cls in sorted(classes.items()):
        yield name, _first_sentence(cls)


def _first_sentence(documented: object) -> str:
    paragraph = (inspect.getdoc(documented) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).split(". ")[0].rstrip(".")


_OF_FILES = {"scenarios": _scenarios, "clusters": _clusters}
_OF_CODE = {
    "strategies": _strategies,
    "peers": _peers,
    "models": _models,
    "backends": _backends,
    "engines": _engines,
    "meters": _meters,
    "quantities": _quantities,
    "answers": _answers,
    "forms": _forms,
    "exports": _exports,
}
#: in the order in which they are printed
_KINDS = ("scenarios", "strategies", "peers", "models", "clusters", *list(_OF_CODE)[3:])


def _entries(kind: str) -> dict[str, str]:
    """What there is of a kind by name, each with a line about it."""
    return dict(_OF_FILES[kind]()) if kind in _OF_FILES else _declared_entries(kind)


@declared
def _declared_entries(kind: str) -> dict[str, str]:
    return dict(_OF_CODE[kind]())


@click.command(
    "list",
    help=f"List what there is of a KIND, or of every kind if none is named.\n\nKinds: {', '.join(_KINDS)}.",
)
@click.argument("kind", type=click.Choice(_KINDS), required=False, metavar="[KIND]")
@printed
def command(kind: str | None) -> Output:
    """The names of a kind, or of every kind, each with a line about it."""
    found = {name: _entries(name) for name in ([kind] if kind else _KINDS)}
    return Output(
        [_paragraph(name, entries) for name, entries in found.items()],
        found,
        [
            {"kind": name, "name": entry, "about": text}
            for name, entries in found.items()
            for entry, text in entries.items()
        ],
        ["kind", "name", "about"],
    )


def _paragraph(kind: str, entries: dict[str, str]) -> str:
    width = max(map(len, entries), default=0)
    lines = [f"  {name:<{width}}  {text}".rstrip() for name, text in entries.items()]
    return "\n".join([f"{kind}:", *(lines or ["  none"])])
