"""`spbench list`: what there is to run. Only strategies and models need torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click


def list_kind(kind: str) -> None:
    """Print the names of one kind and what they are: scenarios, strategies, models or clusters."""
    entries = list(_ENTRIES[kind]())
    width = max((len(name) for name, _ in entries), default=0)
    click.echo(f"{kind}:")
    for name, text in entries:
        click.echo(f"  {name:<{width}}  {text}".rstrip())
    if not entries:
        click.echo("  none")


def _declared(package: str, key: str) -> Iterator[tuple[str, str]]:
    from spbench.bench.config.files import packaged, read_yaml
    from spbench.bench.errors import UserError

    for name, path in packaged(package).items():
        try:
            text: Any = read_yaml(path).get(key, "")
        except UserError as error:
            text = str(error)
        yield name, str(text)


def _scenarios() -> Iterator[tuple[str, str]]:
    return _declared("spbench.scenarios", "title")


def _clusters() -> Iterator[tuple[str, str]]:
    return _declared("spbench.scenarios.clusters", "about")


def _strategies() -> Iterator[tuple[str, str]]:
    from spbench.impls.strategies.registry import strategies

    for name, cls in sorted(strategies().items()):
        axes = f"{'axis' if len(cls.axes) == 1 else 'axes'} {', '.join(cls.axes)}" if cls.axes else ""
        notes = [axes, cls.source]
        yield name, f"{cls.summary} ({', '.join(n for n in notes if n)})".replace(" ()", "")


def _models() -> Iterator[tuple[str, str]]:
    from dataclasses import fields

    from spbench.impls.models.model import models

    for name, model in sorted(models().items()):
        sizes = {f.name: getattr(model, f.name) for f in fields(model)}  # type: ignore[arg-type]
        numbers = [f"{key} {value}" for key, value in sizes.items() if type(value) is int]
        yield name, ", ".join(numbers)


_ENTRIES = {"scenarios": _scenarios, "strategies": _strategies, "models": _models, "clusters": _clusters}
