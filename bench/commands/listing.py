"""`spbench list`: what there is to run and to ask for. Scenarios, clusters and forms need no torch."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import click

from spbench.bench.commands.options import reported
from spbench.bench.commands.report import Report

Entries = Iterator[tuple[str, str]]


def _declared(package: str, key: str) -> Entries:
    from spbench.bench.errors import UserError
    from spbench.bench.files.yaml_files import packaged, read_yaml

    for name, path in packaged(package).items():
        try:
            text: Any = read_yaml(path).get(key, "")
        except UserError as error:
            text = str(error)
        yield name, str(text)


def _scenarios() -> Entries:
    return _declared("spbench.scenarios", "title")


def _clusters() -> Entries:
    return _declared("spbench.scenarios.clusters", "about")


def _strategies() -> Entries:
    from spbench.impls.strategies.registry import strategies

    for name, cls in sorted(strategies().items()):
        axes = f"{'axis' if len(cls.axes) == 1 else 'axes'} {', '.join(cls.axes)}" if cls.axes else ""
        notes = [axes, cls.source]
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
    from spbench.bench.config.answer import answer_kinds

    return _described(answer_kinds())


def _forms() -> Entries:
    from spbench.bench.commands.forms import form_names, load_form

    for name in form_names():
        yield name, _first_sentence(inspect.getmodule(load_form(name)))


def _described(classes: Mapping[str, type]) -> Entries:
    """Each class's name, with the first sentence of its docstring."""
    for name, cls in sorted(classes.items()):
        yield name, _first_sentence(cls)


def _first_sentence(documented: object) -> str:
    paragraph = (inspect.getdoc(documented) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).split(". ")[0].rstrip(".")


_ENTRIES = {
    "scenarios": _scenarios,
    "strategies": _strategies,
    "models": _models,
    "clusters": _clusters,
    "backends": _backends,
    "engines": _engines,
    "meters": _meters,
    "quantities": _quantities,
    "answers": _answers,
    "forms": _forms,
}


@click.command("list")
@click.argument("kind", type=click.Choice(list(_ENTRIES)), required=False)
@reported
def command(kind: str | None) -> Report:
    """List what there is of a kind, or of every kind if none is named."""
    found = {name: dict(_ENTRIES[name]()) for name in ([kind] if kind else _ENTRIES)}
    return Report(
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
