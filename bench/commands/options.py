"""What the command line's options have in common: kinds of values, and the options that choose cells."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

FORMATS = click.Choice(["table", "csv", "json"])
Command = TypeVar("Command", bound=Callable[..., Any])


class Words(click.ParamType[tuple[str, ...]]):
    """Words separated by commas."""

    name = "name[,name...]"

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[str, ...]:
        return tuple(word.strip() for word in str(value).split(",") if word.strip())


class Numbers(click.ParamType[tuple[int, ...]]):
    """Whole numbers of at least ``least``, separated by commas."""

    name = "n[,n...]"

    def __init__(self, least: int = 1):
        self.least = least

    def convert(
        self, value: object, param: click.Parameter | None, ctx: click.Context | None
    ) -> tuple[int, ...]:
        words = [word.strip() for word in str(value).split(",") if word.strip()]
        for word in words:
            if not word.isdecimal() or int(word) < self.least:
                self.fail(f"{word!r} is not a whole number of at least {self.least}", param, ctx)
        return tuple(int(word) for word in words)


def _joined(ctx: click.Context, param: click.Parameter, values: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(value for several in values for value in several))


def many(flag: str, kind: click.ParamType[Any], text: str) -> Callable[[Command], Command]:
    """An option that may be repeated, or given several values at once."""
    return click.option(flag, type=kind, multiple=True, callback=_joined, help=text)


def choosing_cells(command: Command) -> Command:
    """The options that name a scenario and choose among its cells (:class:`Narrowing`)."""
    options = [
        click.option(
            "--scenario", required=True, help="Name (see spbench list), or path of a YAML file of your own."
        ),
        many("--strategy", Words(), "Only these strategies. Repeatable, or a comma list."),
        many("--model", Words(), "Only these models."),
        many("--cluster", Words(), "Run on these clusters instead of the scenario's."),
        many("--world-size", Numbers(), "Only these numbers of GPUs; one that the scenario lacks is made."),
        click.option(
            "--variant", help="A variant of the scenario's settings, or 'all'; the first if left out."
        ),
    ]
    for option in reversed(options):  # as if each stood above the next
        command = option(command)
    return command
