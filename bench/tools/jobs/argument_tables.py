"""The arguments that a program takes, from the program's table.

A table is a YAML file in this folder. Each word of a table is an argument::

    NAME[,SPELLING...][:TYPE[/TYPE...][?][+|*[COUNT]]][=DEFAULT][@VERSIONS]

TYPE is int, float, bool, str, list, map, any, or choices with ``|`` between them; ``?``: null too; ``+``: one
value or more; ``*``: any number of values, or COUNT. An argument without a TYPE is a switch. Groups of words
have one outcome each: ``mapped``, ``no_effect`` with a reason, ``not_modelled`` with what the argument may
move, ``refused`` with what spbench lacks for the argument; a group that only ``--strict`` refuses has both.
The section ``settings`` says which argument is which setting of a scenario: :meth:`Account.map` goes from
argument to setting, :meth:`ArgumentTable.values_of` back.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from spbench.bench.tools.jobs.job import Outcome
from spbench.bench.yaml_files import read_yaml

_WORD = re.compile(
    r"(-{0,2}\w[\w.-]*(?:,--[\w-]+)*)(?::([^=@?+*]+)(\?)?(\+|\*\d*)?)?(?:=([^@]*))?(?:@(\w+))?"
)
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
#: prefixes of the keys of DeepSpeed in the table of another program, and of the Trainer's arguments
OF_DEEPSPEED, OF_TRAINER = "deepspeed.", "TrainingArguments."
#: the most characters of a value that a message repeats
_LONGEST = 40


@dataclass(frozen=True)
class ProgramArgument:
    """An argument that a program takes.

    Attributes:
        spellings: the argument's names, of which the first is the one that tables and accounts use.
        takes: types of the value, with ``/`` between them; "": the argument is a switch.
        optional: whether null is a value too.
        count: how many values: "" (one), "+", "*", or "*" and a number.
        default: the default value; False for a switch, None where the argument has no default.
        outcome: "mapped" where a setting may come from the argument.
        detail: why a value other than the default has no effect, what it may move, or what spbench lacks.
        beside: other arguments; if the job gives none of them, this argument has no effect.
        missing: what ``--strict`` refuses the argument for; "": nothing.
    """

    spellings: tuple[str, ...]
    takes: str
    optional: bool
    count: str
    default: Any
    outcome: Outcome
    detail: str = ""
    beside: tuple[str, ...] = ()
    missing: str = ""

    @property
    def name(self) -> str:
        return self.spellings[0]

    def wrong(self, value: Any) -> str:
        """What is wrong with a value; "" if nothing is."""
        if value is None and self.optional:
            return ""
        if self.outcome != "mapped" and isinstance(value, str) and "$" in value:
            return ""  # a value that only a run could tell, of an argument that is not read
        kinds = self.takes.split("/")
        if "any" in kinds or any(_is(kind, value) for kind in kinds):
            return ""
        needed = " or ".join(_NAMES.get(kind, f"one of {kind.replace('|', ', ')}") for kind in kinds)
        return f"{shown(value)} is not {needed}"

    def parsed(self, word: str) -> Any:
        """A command line's word as an int or a float, if that is the argument's type; else the word."""
        try:
            return {"int": int, "float": float}.get(self.takes, str)(word)
        except ValueError:
            return word

    def is_default(self, value: Any) -> bool:
        """Whether a value equals the default: 1e9 equals 1000000000, but 1 does not equal true."""
        value = None if self.count and value == "" else value
        return bool(value == self.default) and isinstance(value, bool) == isinstance(self.default, bool)


def _is(kind: str, value: Any) -> bool:
    if kind not in _TYPES:
        return isinstance(value, str) and value in kind.split("|")
    return isinstance(value, _TYPES[kind]) and isinstance(value, bool) == (kind == "bool") and value == value


@dataclass(frozen=True)
class Conversion:
    """The setting that an argument sets, and the values that correspond.

    Attributes:
        path: the setting's path, such as ``model_options.norm``.
        values: pairs of the argument's value and the setting's; (): the two values are equal.
    """

    path: str
    values: Sequence[tuple[Any, Any]] = ()

    def setting(self, value: Any) -> Any:
        """The setting's value for an argument's ``value``; KeyError where the table has no such value."""
        return dict(self.values)[value] if self.values else value

    def argument(self, value: Any) -> Any:
        """The argument's value for a setting's ``value``; None where the table has no such value."""
        return {theirs: ours for ours, theirs in self.values}.get(value) if self.values else value


@dataclass(frozen=True)
class ArgumentTable:
    """The arguments of a program.

    Attributes:
        program: the program's name, with the version whose arguments and defaults these are.
        arguments: each argument by each of its spellings, in the order of the table.
        settings: the conversion of each argument that sets one setting directly, by the argument's name.
        content: the whole content of the file; its key ``trains`` names the program that trains, one of
            :data:`~spbench.bench.setting_values.PROGRAMS`.
    """

    program: str
    arguments: Mapping[str, ProgramArgument]
    settings: Mapping[str, Conversion]
    content: Mapping[str, Any]

    def values_of(self, settings: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
        """The arguments that set these settings, each as (name, value, path of the setting)."""
        for name, conversion in self.settings.items():
            if conversion.path in settings:
                yield name, conversion.argument(settings[conversion.path]), conversion.path


@cache
def table_content(name: str) -> Mapping[str, Any]:
    """The content of the table in the file NAME.yaml of this folder."""
    return read_yaml(Path(__file__).with_name(f"{name}.yaml"))


@cache
def argument_table(name: str, version: str = "") -> ArgumentTable:
    """The argument table in the file NAME.yaml, in one ``version`` if the file has several."""
    content = table_content(name)
    arguments: dict[str, ProgramArgument] = {}
    for words, outcome, detail, beside, missing in _groups(content):
        main = [*arguments_of(words, version, outcome, detail)]
        names = tuple(each.name for each in main)
        for each in [*main, *arguments_of(beside, version, outcome, detail, names)]:
            assert not arguments.keys() & {*each.spellings}, f"{name}.yaml has {each.name} twice"
            arguments |= dict.fromkeys(each.spellings, replace(each, missing=missing))
    program = content["versions"][version] if version else content["program"]
    settings = {name: _conversion(text) for name, text in content.get("settings", {}).items()}
    return ArgumentTable(str(program), arguments, settings, content)


def program_table(name: str, version: str = "") -> ArgumentTable:
    """The argument table in the file NAME.yaml, together with the keys of DeepSpeed and the arguments of
    Hugging Face's Trainer if the table's line ``beside`` names them, by version where there are several."""
    table = argument_table(name, version)
    beside = table.content.get("beside", "")
    words = (beside.get(version, "") if isinstance(beside, Mapping) else beside).split()
    others: dict[str, ProgramArgument] = {}
    for long, each in argument_table("deepspeed").arguments.items() if words else ():
        if not long.startswith((OF_TRAINER, "accelerate.")):
            others |= {f"{OF_DEEPSPEED}{long}": each} if "deepspeed" in words else {}
        elif long.startswith(OF_TRAINER) and each.outcome != "mapped":
            others |= {long.removeprefix(OF_TRAINER): each} if "trainer" in words else {}
    named = {name: replace(each, spellings=(name,)) for name, each in others.items()}
    return replace(table, arguments={**named, **table.arguments})


def outcome_groups(content: Mapping[str, Any]) -> Iterator[tuple[str, Outcome, str]]:
    """The groups of a table's words that have no effect or are approximated: (words, outcome, reason)."""
    for group in content["no_effect"]:
        yield group["arguments"], "no effect", group["reason"]
    for group in content["not_modelled"]:
        yield group["arguments"], "approximated", may_move(group["may_move"], group["because"])


def _groups(content: Mapping[str, Any]) -> Iterator[tuple[str, Outcome, str, str, str]]:
    yield content["mapped"], "mapped", "", "", ""
    for words, outcome, detail in outcome_groups(content):
        yield words, outcome, detail, "", ""
    for group in content["refused"]:
        words, beside, missing = group["arguments"], group.get("beside", ""), group["missing"]
        if "may_move" in group:
            yield words, "approximated", may_move(group["may_move"], group["because"]), beside, missing
        else:
            yield words, "refused", missing, beside, ""


def arguments_of(
    words: str, version: str, outcome: Outcome, detail: str = "", beside: tuple[str, ...] = ()
) -> Iterator[ProgramArgument]:
    """The arguments that the words of a table describe; words for other versions are left out."""
    for word in words.split():
        match = _WORD.fullmatch(word)
        assert match, word
        names, takes, optional, count, default, versions = match.groups()
        if version in (versions or version):
            is_json = takes and takes.split("/")[0] in ("int", "float", "bool", "list")
            value = json.loads(default) if is_json and default is not None else default if takes else False
            spellings = tuple(names.split(","))
            yield ProgramArgument(
                spellings, takes or "", bool(optional), count or "", value, outcome, detail, beside
            )


def _conversion(text: str | Mapping[str, Mapping[Any, Any]]) -> Conversion:
    """The conversion that a table writes as PATH, as ``not PATH``, or as PATH with a mapping of values."""
    if isinstance(text, Mapping):
        ((path, values),) = text.items()
        return Conversion(path, tuple(values.items()))
    negated = text.startswith("not ")
    return Conversion(text.removeprefix("not "), ((True, False), (False, True)) if negated else ())


def may_move(what: str, because: str) -> str:
    """The words on an approximated argument that may move ``what``: "time", "memory", both, or "nothing"."""
    moved = "does not move memory or time" if what == "nothing" else f"may move {what}"
    return f"{moved}: {because}"


def flat(
    content: Mapping[str, Any], arguments: Mapping[str, ProgramArgument], above: str = ""
) -> Iterator[tuple[str, Any]]:
    """Pairs of name and value in nested mappings, with dots between the keys of a name; a section that is
    null yields no pair."""
    for key, value in content.items():
        name = f"{above}{key}"
        as_one = name in arguments and {"map", "any"} & {*arguments[name].takes.split("/")}
        if isinstance(value, Mapping) and not as_one:
            yield from flat(value, arguments, f"{name}.")
        elif value is not None or name in arguments or not any(n.startswith(f"{name}.") for n in arguments):
            yield name, value


def shown(value: Any, longest: int = _LONGEST) -> str:
    """A value as JSON, or a printable text as it is, in one line of at most ``longest`` characters."""
    plain = isinstance(value, str) and value.isprintable()
    text = str(value) if plain else json.dumps(value, default=str)
    return text if len(text) <= longest else f"{text[: longest - 3]}..."
