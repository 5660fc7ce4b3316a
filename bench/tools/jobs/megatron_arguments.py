"""Megatron-LM's arguments: which there are, and those of a job, as its parser takes them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, Literal

from spbench.bench.tools.jobs.account import may_move
from spbench.bench.tools.jobs.shell import shown, unknown_in
from spbench.bench.yaml_files import read_yaml

_FILE = Path(__file__).with_suffix(".yaml")
#: NAME[,SPELLING...][:TYPE[+|*|COUNT]][=DEFAULT]
_SPECIFICATION = re.compile(r"(--[\w-]+(?:,--[\w-]+)*)(?::([^=+*]*?)([+*3])?)?(?:=(.*))?")

Class = Literal["mapped", "no effect", "not modelled", "refused"]
#: outcomes of arguments whose value need not be known
_WITHOUT_SETTING = ("no effect", "not modelled")


@dataclass(frozen=True)
class Known:
    """An argument that Megatron-LM has.

    Attributes:
        spellings: of which the first names it.
        takes: "int", "float", "str" or choices with ``|`` between them; "": it is a switch.
        count: "", "+" (one value or more), "*" (any number) or "3".
        outcome: "mapped" where a setting may come from it.
        detail: why it has no effect, what it may move, or what is missing.
        beside: arguments without one of which it has no effect.
    """

    spellings: tuple[str, ...]
    takes: str
    count: str
    default: str | None
    outcome: Class
    detail: str = ""
    beside: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.spellings[0]

    def wrong(self, value: str) -> str:
        """What is wrong with a value; "" if nothing is."""
        kinds: Mapping[str, Any] = {"int": int, "float": float}
        if self.takes in kinds:
            try:
                kinds[self.takes](value)
            except ValueError:
                return f"{value!r} is no {'whole ' if self.takes == 'int' else ''}number"
        elif "|" in self.takes and value not in self.takes.split("|"):
            return f"{value!r} is none of {', '.join(self.takes.split('|'))}"
        return ""


def _known(text: str, outcome: Class, detail: str = "", beside: tuple[str, ...] = ()) -> Iterator[Known]:
    for word in text.split():
        match = _SPECIFICATION.fullmatch(word)
        assert match, word
        names, takes, count, default = match.groups()
        yield Known(tuple(names.split(",")), takes or "", count or "", default, outcome, detail, beside)


@cache
def program() -> str:
    """The program and its version, whose arguments these are."""
    return str(read_yaml(_FILE)["program"])


@cache
def known_arguments() -> Mapping[str, Known]:
    """Every argument of Megatron-LM by each of its spellings."""
    content = read_yaml(_FILE)
    found = [*_known(content["mapped"], "mapped")]
    for group in content["no_effect"]:
        found += _known(group["arguments"], "no effect", group["reason"])
    for group in content["not_modelled"]:
        detail = may_move(group["may_move"], group["because"])
        found += _known(group["arguments"], "not modelled", detail)
    for group in content["refused"]:
        main = [*_known(group["arguments"], "refused", group["missing"])]
        names = tuple(known.name for known in main)
        found += [*main, *_known(group.get("beside", ""), "refused", group["missing"], names)]
    return {spelling: known for known in found for spelling in known.spellings}


@dataclass(frozen=True)
class Given:
    """An argument of a job.

    Attributes:
        name: as the job spells it.
        known: None: Megatron-LM has none of that name.
        values: the words that it has; none of a switch.
    """

    name: str
    known: Known | None
    values: Sequence[str]

    @property
    def text(self) -> str:
        """The values as the job has them."""
        return " ".join(map(shown, self.values))

    def __str__(self) -> str:
        return f"{self.name} {self.text}".rstrip()

    @property
    def is_default(self) -> bool:
        """Whether it says what is so without it."""
        known = self.known
        if known is None or not known.takes:
            return False
        if known.takes in ("int", "float") and known.default and not known.wrong(self.text):
            return float(self.text) == float(known.default)
        return self.text == (known.default or "")


@dataclass
class GivenArguments:
    """The arguments of a job.

    Attributes:
        by_name: the last of each, by the first spelling.
        problems: what Megatron-LM's parser would refuse, or what is not known before the job runs.
    """

    by_name: dict[str, Given] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def on(self, name: str) -> bool:
        """Whether a switch is given."""
        return name in self.by_name

    def text(self, name: str) -> str | None:
        """The value of an argument, or its default."""
        given = self.by_name.get(name)
        if given is not None and not self._wrong(given):
            return given.text
        return known_arguments()[name].default

    def number(self, name: str) -> int | None:
        """The value of an argument that takes a whole number, or its default."""
        text = self.text(name)
        return None if text is None else int(text)

    def share(self, name: str) -> float:
        """The value of an argument that takes a number and has a default."""
        return float(self.text(name) or 0)

    @staticmethod
    def _wrong(given: Given) -> bool:
        assert given.known
        return any(unknown_in(v) or given.known.wrong(v) for v in given.values) or not given.values


def parse(words: Sequence[str]) -> GivenArguments:
    """The arguments among the words of a command line, as argparse takes them: no abbreviations, the last of
    a name counts."""
    arguments = GivenArguments()
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if not word.startswith("--"):
            arguments.problems.append(_stray(word))
            continue
        name, equals, value = word.partition("=")
        values = [value] if equals else []
        known = known_arguments().get(name)
        while not equals and rest and not rest[0].startswith("--") and _takes_more(known, len(values)):
            values.append(rest.pop(0))
        given = Given(shown(name), known, values)
        arguments.problems += _problems(given, equals)
        key = known.name if known else given.name
        before = arguments.by_name.pop(key, None)
        counts = known is not None and known.outcome not in _WITHOUT_SETTING
        if before and counts and str(before) != str(given):
            arguments.problems.append(f"{before} and {given} are both given; leave one")
        arguments.by_name[key] = given
    return arguments


def _takes_more(known: Known | None, have: int) -> bool:
    if known is None or known.count in ("+", "*"):
        return True
    return have < (int(known.count) if known.count else 1 if known.takes else 0)


def _stray(word: str) -> str:
    if unknown := unknown_in(word):
        return f"what arguments {unknown[0]} adds is not known; write them out"
    return f"{shown(word)!r} belongs to no argument"


def _problems(given: Given, equals: str) -> Iterator[str]:
    known = given.known
    if known is None:
        return
    if not known.takes and equals:
        yield f"{given.name} takes no value, but has {given.text!r}"
    if known.takes and not given.values and known.count != "*":
        yield f"{given.name} has no value"
    if known.count == "3" and len(given.values) != 3:
        yield f"{given.name} takes 3 values, but has {len(given.values)}"
    for value in given.values:
        if unknown := unknown_in(value):
            if known.outcome not in _WITHOUT_SETTING:
                yield f"{given.name} {shown(value)}: {unknown[0]} is not set in the script; set it there"
        elif problem := known.takes and known.wrong(value):
            yield f"{given.name}: {problem}"


def close_to(name: str) -> str:
    """The end of an error about an unknown argument: `` (did you mean ...?)``, or nothing."""
    close = difflib.get_close_matches(name, known_arguments(), n=1, cutoff=0.8)
    close = close or [known for known in known_arguments() if known.startswith(name)][:1]
    return f" (did you mean {close[0]}?)" if close else ""
