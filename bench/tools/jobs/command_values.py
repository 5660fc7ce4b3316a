"""The arguments of a command line as values by name, as the keys of a configuration."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from spbench.bench.tools.jobs.account import scalar_of
from spbench.bench.tools.jobs.argument_tables import ArgumentTable
from spbench.bench.tools.jobs.shell_syntax import given_flag, shown_word, unknown_in


def overrides_of(
    words: Sequence[str], table: ArgumentTable, problems: list[str]
) -> Iterator[tuple[str, Any]]:
    """The values of words KEY=VALUE, as Hydra takes them; the problems of the others are added."""
    for word in words:
        name, equals, text = word.partition("=")
        if not equals or unknown_in(name):
            _stray(word, problems)
            continue
        yield from _value(name.lstrip("+~"), text, table, problems)


def options_of(words: Sequence[str], table: ArgumentTable, problems: list[str]) -> Iterator[tuple[str, Any]]:
    """The values of words --NAME VALUE..., as argparse takes them, under their names without dashes."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            _stray(word, problems)
            continue
        name, equals, text = word[2:].partition("=")
        texts = [text] if equals else []
        while not equals and rest and not rest[0].startswith("--"):
            texts.append(rest.pop(0))
        name = name.replace("-", "_")
        yield from _value(name, "true" if not texts else " ".join(texts), table, problems)


def _stray(word: str, problems: list[str]) -> None:
    """Only what a script hands on (``"$@"``) may be left out: nothing is there unless it is given."""
    unknown = unknown_in(word)
    if not unknown:
        problems.append(f"{shown_word(word)!r} belongs to no argument")
    elif unknown[0] not in ("$@", "$*", "${@}", '"$@"'):
        problems.append(f"what arguments {unknown[0]} adds is not known; {given_flag(unknown[0])}")


def _value(name: str, text: str, table: ArgumentTable, problems: list[str]) -> Iterator[tuple[str, Any]]:
    argument = table.arguments.get(name)
    if unknown := unknown_in(text):
        if argument is not None and argument.outcome in ("mapped", "refused"):
            problems.append(
                f"{name}={shown_word(text)}: {unknown[0]} is not set in the script; {given_flag(unknown[0])}"
            )
            return
        yield name, shown_word(text)
        return
    plain = argument is not None and argument.takes in ("str", "str?")
    value = text if plain else scalar_of(text)
    kinds = argument.takes.split("/") if argument else []
    if "bool" in kinds and "int" not in kinds and value in (0, 1):
        value = bool(value)  # as transformers' HfArgumentParser takes it
    if "float" in kinds and isinstance(value, str):  # 1e-4 is a text in YAML
        try:
            value = float(value)
        except ValueError:
            value = text
    if "list" in kinds and isinstance(value, str):
        value = text.split()
    yield name, value
