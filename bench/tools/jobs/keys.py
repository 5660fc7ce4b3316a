"""The keys of a job's configuration files: which a program has, and what becomes of those that are given."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from spbench.bench.tools.jobs.account import Account, may_move
from spbench.bench.tools.jobs.job import Argument, Outcome

#: NAME:TYPE[?][=DEFAULT][@VERSIONS]
_SPECIFICATION = re.compile(r"([\w.-]+):([^=@?]+)(\?)?(?:=([^@]*))?(?:@(\w+))?")
_TYPES: Mapping[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "str": (str,),
    "list": (list,),
    "map": (dict,),
}
_NAMES = {"int": "a whole number", "float": "a number", "bool": "true or false", "str": "a text"}
_NAMES |= {"list": "a list", "map": "a mapping"}
_LONGEST = 40


@dataclass(frozen=True)
class Key:
    """A key that a program has.

    Attributes:
        takes: "any", a key of _TYPES, or choices with ``|`` between them, and after ``or`` another such.
        outcome: "mapped" where a setting may come from it.
        detail: why it has no effect, what it may move, or what is missing, for other values than the default.
    """

    name: str
    takes: str
    optional: bool
    default: Any
    outcome: Outcome
    detail: str = ""

    def wrong(self, value: Any) -> str:
        """What is wrong with a value; "" if nothing is."""
        if value is None and self.optional:
            return ""
        kinds = self.takes.split("/")
        if "any" in kinds or any(self._is(kind, value) for kind in kinds):
            return ""
        needed = " or ".join(_NAMES.get(kind, f"one of {kind.replace('|', ', ')}") for kind in kinds)
        return f"{shown(value)} is not {needed}"

    @staticmethod
    def _is(kind: str, value: Any) -> bool:
        if kind not in _TYPES:
            return isinstance(value, str) and value in kind.split("|")
        is_flag = isinstance(value, bool)
        return isinstance(value, _TYPES[kind]) and is_flag == (kind == "bool") and value == value


def known_keys(content: Mapping[str, Any], version: str = "") -> dict[str, Key]:
    """The keys of a program, from a file of them (``mapped``, ``no_effect``, ``not_modelled``,
    ``refused``), in a version."""
    groups: list[tuple[str, Outcome, str]] = [(content["mapped"], "mapped", "")]
    groups += [(group["keys"], "no effect", group["reason"]) for group in content["no_effect"]]
    groups += [
        (group["keys"], "not modelled", may_move(group["may_move"], group["because"]))
        for group in content["not_modelled"]
    ]
    groups += [(group["keys"], "refused", group["missing"]) for group in content["refused"]]
    found = {}
    for words, outcome, detail in groups:
        for word in words.split():
            match = _SPECIFICATION.fullmatch(word)
            assert match, word
            name, takes, optional, default, versions = match.groups()
            if version in (versions or version):
                value = _default(takes, default)
                found[name] = Key(name, takes, bool(optional), value, outcome, detail)
    return found


def _default(takes: str, text: str | None) -> Any:
    if text is None:
        return None
    return json.loads(text) if takes.split("/")[0] in ("int", "float", "bool", "list") else text


def flat(content: Mapping[str, Any], known: Mapping[str, Key], above: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings by the names of their keys, with dots between."""
    for key, value in content.items():
        name = f"{above}{key}"
        whole = name in known and {"map", "any"} & {*known[name].takes.split("/")}
        if isinstance(value, Mapping) and not whole:
            yield from flat(value, known, f"{name}.")
        else:
            yield name, value


def shown(value: Any) -> str:
    """A value in one short line, as JSON has it."""
    plain = isinstance(value, str) and value.isprintable()
    text = str(value) if plain else json.dumps(value, default=str)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _same(value: Any, default: Any) -> bool:
    """Whether a value is the default: 1e9 is 1000000000, but 1 is not true."""
    return bool(value == default) and isinstance(value, bool) == isinstance(default, bool)


@dataclass
class Keys(Account):
    """The keys of a job, and the settings that were made of them.

    Attributes:
        program: with the version whose keys and defaults these are.
        known: the program's keys.
        given: values by key.
    """

    program: str
    known: Mapping[str, Key]
    given: Mapping[str, Any]

    def __post_init__(self) -> None:
        for name, value in self.given.items():
            if name in self.known and (wrong := self.known[name].wrong(value)):
                self.problems.append(f"{name}: {wrong}")

    def value(self, name: str) -> Any:
        """The value of a key, or its default; the default too where the value is wrong."""
        key = self.known[name]
        given = self.given.get(name, key.default)
        return key.default if name in self.given and key.wrong(given) else given

    def chosen(self, *names: str) -> tuple[Any, str]:
        """The first value that is there and not "auto", and its key; else the last key's default."""
        given = (name for name in names if name in self.given and self.value(name) not in (None, "auto"))
        found = next(given, names[-1])
        for name in names[: names.index(found)]:
            if name in self.given:
                self.took(f"taken from {found}", name)
        return self.value(found), found

    def count(self, name: str, least: int = 1) -> int:
        """The value of a key that counts something; ``least``, and a problem, where it is less."""
        value = self.value(name)
        if value is None or value < least:
            self.problems.append(f"{name}: {shown(value)} is less than {least}")
            return least
        return int(value)

    def set(self, path: str, value: Any, *names: str, note: str = "") -> None:
        """Set what comes from the keys of these names; from their defaults where none is given."""
        there = [name for name in names if name in self.given]
        source = ", ".join(map(self.spelled, there)) or ("" if note and not names else self.default_of(names))
        self.add(path, value, source, note)
        self.took(f"{path}: {shown(value)}", *there)

    def default_of(self, names: Sequence[str]) -> str:
        """What a setting is said to come from where no key is given."""
        return f"default of {names[0]}" if names else f"as {self.program.split(' ')[0]} has it"

    def spelled(self, name: str) -> str:
        """A key as the job has it."""
        return f"{name} = {shown(self.given[name])}"

    def approximate(self, remark: str, *names: str) -> None:
        """Say what is not as the program has it, by reason of keys."""
        self.remarks.append(remark)
        self.took("see what is approximate", *names)

    def refuse(self, missing: str, *names: str) -> None:
        """Say what is missing for keys; a problem of the job where none of them is given."""
        if not any(name in self.given for name in names):
            self.problems.append(f"{' and '.join(names)} (by default): {missing}: not modelled")
        for name in names:
            self.missing.setdefault(name, missing)

    def arguments(self) -> Iterator[Argument]:
        """What became of every key."""
        for name, value in self.given.items():
            yield Argument(name, f"= {shown(value)}", *self._outcome(name, value))

    def _outcome(self, name: str, value: Any) -> tuple[Outcome, str]:
        key = self.known.get(name)
        if key is None:
            close = difflib.get_close_matches(name, self.known, n=1, cutoff=0.8)
            return "unknown", f" (did you mean {close[0]}?)" if close else ""
        if name in self.missing:
            return "refused", f"{self.missing[name]}: not modelled"
        if key.outcome == "no effect":
            return "no effect", key.detail
        if name in self.made_of:
            return "mapped", "; ".join(dict.fromkeys(self.made_of[name]))
        if name in self.idle:
            return "no effect", self.idle[name]
        if _same(value, key.default):
            return "no effect", "is so by default"
        if name in self.unmodelled or key.outcome == "not modelled":
            return "not modelled", self.unmodelled.get(name, key.detail)
        if key.outcome == "refused":
            return "refused", f"{key.detail}: not modelled"
        if self.problems:
            return "mapped", "not before the job is right"
        return "refused", "nothing here has it"
