"""`spbench list`: what there is to run. Only strategies and models need torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from spbench.bench.commands.options import reported
from spbench.bench.commands.report import Report

Entries = Iterator[tuple[str, str]]


def _declared(package: str, key: str) -> Entries:
    from spbench.bench.config.files import packaged, read_yaml
    from spbench.bench.errors import UserError

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


_ENTRIES = {"scenarios": _scenarios, "strategies": _strategies, "models": _models, "clusters": _clusters}


@click.command("list")
@click.argument("kind", type=click.Choice(list(_ENTRIES)), required=False)
@reported
def command(kind: str | None) -> Report:
    """List scenarios, strategies, models or clusters; all of them if none is named."""
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
