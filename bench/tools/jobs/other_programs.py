"""Files of programs that are known and not read, so that they are taken for no other's."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spbench.bench.errors import UserError
from spbench.bench.yaml_files import parse_yaml, read_yaml

if TYPE_CHECKING:
    from spbench.bench.tools.jobs.job_files import JobFile

_FILE = Path(__file__).with_suffix(".yaml")
_MOST_NESTED = 3
_CONFIGURATIONS = (".yaml", ".yml", ".json", ".toml")


@cache
def _programs() -> Mapping[str, Mapping[str, Any]]:
    return read_yaml(_FILE)


def keyed_program(file: JobFile) -> str:
    """Which program's configuration it is that is not read, and what to give in its place; "" where none is
    known by its keys."""
    keys = {*_keys(_content(file), "", 1)}
    return _told(
        name
        for name, program in _programs().items()
        if any({*words.split()} <= keys for words in program.get("keys", ()))
    )


def started_program(file: JobFile, *, unread: bool) -> str:
    """The same of a script, by what it starts; ``unread``: no program that is read is started in it."""
    if file.path.suffix in _CONFIGURATIONS:
        return ""
    names = ("text", "even_then") if unread else ("even_then",)
    return _told(
        name
        for name, program in _programs().items()
        if any(re.search(program[key], file.text, re.MULTILINE) for key in names if key in program)
    )


def _told(found: Iterator[str]) -> str:
    name = next(found, None)
    if name is None:
        return ""
    article = "" if name.startswith("a ") else "a job of "
    return f"{article}{name}, which is not read here: {_programs()[name]['instead']}"


def _content(file: JobFile) -> Any:
    """What a YAML, JSON or TOML holds; None for another file, or a damaged one, whose reader will say so."""
    try:
        if file.path.suffix == ".toml":
            return tomllib.loads(file.text)
        if file.path.suffix in _CONFIGURATIONS:
            return parse_yaml(file.path, file.content)
    except (UserError, ValueError, RecursionError):
        pass
    return None


def _keys(content: Any, above: str, depth: int) -> Iterator[str]:
    if isinstance(content, Mapping) and depth <= _MOST_NESTED:
        for key, value in content.items():
            yield f"{above}{key}"
            yield from _keys(value, f"{above}{key}.", depth + 1)
