"""An account of a job's arguments: the settings made from the arguments, and each argument's outcome."""

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from spbench.bench.errors import UserError, listed
from spbench.bench.tools.jobs.argument_tables import ArgumentTable, ProgramArgument, may_move, shown
from spbench.bench.tools.jobs.job import (
    APPROXIMATED,
    MOST_NAMED,
    Argument,
    Job,
    Outcome,
    Setting,
    ordered,
    short,
)
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.yaml_files import parse_yaml

#: characters of a setting's value that an argument's detail repeats
_LONGEST_SETTING = 200


@dataclass(frozen=True)
class Given:
    """An argument of a job.

    Attributes:
        name: the argument's name, as the job spells it.
        value: the value, as the program reads it.
        text: the value as the job writes it, in one line.
        wrong: what is wrong with the value; "" if nothing is.
        source: the words that name the argument as the source of a setting; "": name and text do.
    """

    name: str
    value: Any
    text: str
    wrong: str = ""
    source: str = ""

    def __str__(self) -> str:
        return self.source or f"{self.name} {self.text}".rstrip()


@dataclass(kw_only=True)
class Account:
    """The arguments of a job, the settings that were made from the arguments, and each argument's outcome.

    Attributes:
        table: the arguments that the program takes.
        given: arguments of the job, by their first spelling.
        environment: variables that are set when the job runs.
        by_default: the source that a setting from no argument names; "": the key whose default the value is.
        unasked: why an argument from which no setting was made is refused, unless there are problems.
        made_of: by argument or variable, the settings and other effects that came from the argument.
        idle: by argument without effect in this job that may have one in another, the reason.
        approximated: by argument that is modelled only closely, or not at all, what may move for that reason.
        strictly: by approximated argument that ``--strict`` refuses, what spbench lacks to model it.
        missing: by refused argument, what spbench lacks to model it.
        problems, remarks: the same as the attributes of :class:`Job`.
        facts: values that the reader computed, by name; a rule of a table writes the name with a ``$``.
        calls: functions of the reader that rules of the table may call, by name.
        flags: arguments that ask the program for a cell, each as (name, value, path of the setting).
    """

    table: ArgumentTable
    given: Mapping[str, Given]
    environment: Mapping[str, str] = field(default_factory=dict)
    by_default: str = ""
    unasked: str = ""
    settings: list[Setting] = field(default_factory=list)
    made_of: dict[str, list[str]] = field(default_factory=dict)
    idle: dict[str, str] = field(default_factory=dict)
    approximated: dict[str, str] = field(default_factory=dict)
    strictly: dict[str, str] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    calls: Mapping[str, Callable[[Self], None]] = field(default_factory=dict)
    flags: list[tuple[str, Any, str]] = field(default_factory=list)

    @property
    def program_arguments(self) -> Mapping[str, ProgramArgument]:
        return self.table.arguments

    def has(self, name: str) -> bool:
        """Whether the job gives an argument."""
        return name in self.given

    def given_of(self, *names: str) -> tuple[str, ...]:
        """The names, among ``names``, that the job gives."""
        return tuple(filter(self.has, names))

    def value(self, name: str) -> Any:
        """The value of an argument; its default if the argument is not given, or its value is wrong."""
        given = self.given.get(name)
        return self.program_arguments[name].default if given is None or given.wrong else given.value

    def known(self, name: str) -> Any:
        """The value of an argument (``*`` in ``name`` matches any characters), of a ``$FACT``, or of a
        variable of the environment (an int if the text is a whole number); None for an unknown name."""
        if name.startswith("$"):
            return self.facts.get(name[1:])
        if "*" in name:
            name = next(iter(fnmatch.filter(self.program_arguments, name)), name)
        if name in self.program_arguments:
            return self.value(name)
        text = self.environment.get(name)
        return int(text) if text is not None and re.fullmatch(r"\d{1,9}", text) else text

    def chosen(self, *names: str) -> tuple[Any, str]:
        """The value and the name of the first of these keys that the job gives other than null or "auto";
        else the default and the name of the last key."""
        there = (name for name in names if name in self.given and self.value(name) not in (None, "auto"))
        first = next(there, names[-1])
        self.took(f"taken from {first}", *(n for n in names[: names.index(first)] if n in self.given))
        return self.value(first), first

    def count(self, name: str, least: int = 1) -> int:
        """The value of an argument that is a count; one below ``least`` is a problem, read as ``least``."""
        value = self.value(name)
        if value is None or value < least:
            self.problems.append(f"{name}: {shown(value)} is less than {least}")
            return least
        return int(value)

    def is_default(self, name: str) -> bool:
        """Whether the job gives an argument with its default value."""
        return self.program_arguments[name].is_default(self.given[name].value)

    def ignore(self, reason: str, *names: str) -> None:
        """Note why the arguments ``names`` have no effect in this job."""
        for name in names:
            self.idle.setdefault(name, reason)

    def leave(self, what: str, because: str, *names: str) -> None:
        """Note that arguments ``names`` are left out, which may move "time", "memory", both or "nothing"."""
        for name in names:
            self.approximated.setdefault(name, may_move(what, because))

    def stand_in(self, missing: str, what: str, because: str, *names: str) -> None:
        """Note, as :meth:`leave` does, that spbench models the arguments ``names`` only closely; ``--strict``
        refuses these arguments because ``missing`` is not modelled. A job without them gets a remark."""
        if not any(map(self.has, names)):
            self.remarks.append(f"{missing}: {may_move(what, because)}")
        self.leave(what, because, *names)
        for name in names:
            self.strictly.setdefault(name, missing)

    def took(self, detail: str, *names: str) -> None:
        """Note a setting or another effect that came from the arguments ``names``."""
        for name in names:
            self.made_of.setdefault(name, []).append(detail)

    def approximate(self, remark: str, *names: str) -> None:
        """Add a remark on an approximation of the scenario that the arguments ``names`` make necessary."""
        self.remarks.append(remark)
        for name in names:
            self.approximated.setdefault(name, remark)

    def refuse(self, missing: str, *names: str) -> None:
        """Refuse the arguments ``names``, because ``missing`` is not modelled; where the job gives none of
        these arguments, the refusal is a problem of the job, because their defaults ask for the same."""
        if not any(map(self.has, names)):
            self.problems.append(f"{' and '.join(names)} (by default): {missing}: not modelled")
        self.refuse_given(f"{missing}: not modelled", *names)

    def refuse_given(self, missing: str, *names: str) -> None:
        """Refuse the arguments ``names`` where the job gives them, with the reason ``missing``."""
        for name in names:
            self.missing.setdefault(name, missing)

    def add(self, path: str, value: Any, source: str, note: str = "", given: bool = True) -> None:
        """Add a setting that comes from ``source``; a scenario has ``note`` behind the source."""
        self.settings.append(Setting(path, value, ": ".join(filter(None, [source, note])), given))

    def set(self, path: str, value: Any, *names: str, note: str = "") -> None:
        """Add a setting whose source are the arguments or variables ``names``, or their defaults if the job
        gives none of ``names``; a scenario has ``note`` behind the source."""
        there = [name for name in names if name in self.given or name in self.environment]
        source = ", ".join(map(self.spelled, there)) or (
            "" if note and not names else self._default_of(names)
        )
        self.add(path, value, source, note, bool(there))
        self.took(f"{path}: {shown(value, _LONGEST_SETTING)}", *there)

    def map(self, *names: str) -> None:
        """Add the settings that the table derives from the arguments ``names``, whose defaults count too."""
        for name in names:
            conversion = self.table.settings[name]
            self.set(conversion.path, conversion.setting(self.value(name)), name)

    def map_given(self, *names: str) -> None:
        """Add the settings that the table derives from those arguments ``names`` that the job gives."""
        self.map(*filter(self.has, names))

    def first_steps(self, *, one: bool = False) -> None:
        """Add the settings of a job that begins without Adam's moments; it runs two steps, or ``one``."""
        self.set("training.moments", "later", note="a first step, before Adam has its moments,")
        self.set("training.steps", 1 if one else 2, note="and the only one" if one else "and one after it")

    def _default_of(self, names: Sequence[str]) -> str:
        if self.by_default:
            return self.by_default
        return f"default of {names[0]}" if names else f"as {self.table.program.split(' ')[0]} has it"

    def spelled(self, name: str) -> str:
        """An argument with its value, or ``NAME=VALUE`` of a variable, as the job spells it."""
        return str(self.given[name]) if name in self.given else f"{name}={self.environment[name]}"

    def arguments(self) -> Iterator[Argument]:
        """Every argument of the job with its outcome."""
        for name, given in self.given.items():
            outcome, detail = self._outcome(name, given)
            argument = self.program_arguments.get(name)
            missing = self.strictly.get(name) or (argument.missing if argument else "")
            missing = missing if outcome == APPROXIMATED else ""
            yield Argument(given.name, given.text, outcome, detail, missing)

    def _outcome(self, name: str, given: Given) -> tuple[Outcome, str]:
        argument = self.program_arguments.get(name)
        if argument is None:
            return "unknown", self._close_to(name)
        if name in self.missing:
            return "refused", self.missing[name]
        if argument.outcome == "no effect":
            return "no effect", argument.detail
        if name in self.approximated and (name in self.strictly or name not in self.made_of):
            return APPROXIMATED, self.approximated[name]
        if name in self.made_of:
            return "mapped", "; ".join(dict.fromkeys(self.made_of[name]))
        if name in self.idle:
            return "no effect", self.idle[name]
        if self.is_default(name):
            return "no effect", "is so by default"
        if argument.beside and not any(map(self.has, argument.beside)):
            return "no effect", f"of {argument.missing or argument.detail}, which the job has not"
        if argument.outcome == APPROXIMATED:
            return APPROXIMATED, argument.detail
        if argument.outcome == "refused":
            return "refused", f"{argument.detail}: not modelled"
        if self.problems:
            return "mapped", "not before the job is right"
        return "refused", self.unasked or "nothing here has it"

    def _close_to(self, name: str) -> str:
        """The end of an error about an unknown argument: `` (did you mean ...?)``, or nothing."""
        close = difflib.get_close_matches(name, self.program_arguments, n=1, cutoff=0.8)
        close = close or [each for each in self.program_arguments if each.startswith(name)][:1]
        return f" (did you mean {close[0]}?)" if close else ""

    def job(
        self, kind: str, files: JobFiles, arguments: Iterable[Argument], problems: Sequence[str] = ()
    ) -> Job:
        """The job on the cluster ``files.cluster``; ``problems`` of the files follow the account's own."""
        if files.cluster is not None:
            self.add("cluster", files.cluster, "", "--cluster")
        trains = self.table.content.get("trains")
        if trains and not any(setting.path == "program" for setting in self.settings):
            self.set("program", trains, note="intervals are as wide as its steps erred")
        every = [*arguments]
        return Job(
            kind=kind,
            program=self.table.program,
            title=files.title,
            arguments=every,
            settings=ordered(self.settings),
            problems=[*self.problems, *problems],
            remarks=[*self.remarks, *_approximated(every)],
        )


def _approximated(arguments: Iterable[Argument]) -> Iterator[str]:
    """The remarks on approximated arguments: arguments that ``--strict`` refuses, with the reason, and then
    the names of the others by what they may move."""
    by_what: dict[str, list[str]] = {}
    by_reason: dict[str, list[str]] = {}
    for each in arguments:
        what, colon, _ = each.detail.partition(":")
        if each.missing:
            by_reason.setdefault(each.detail, []).append(short(str(each)))
        elif each.outcome == APPROXIMATED and colon and what.startswith(("may move", "does not move")):
            by_what.setdefault(what, []).append(short(str(each)))
    for detail, names in by_reason.items():
        yield f"{APPROXIMATED}: {listed(names, MOST_NAMED)}: {detail}"
    for what, names in by_what.items():
        yield f"{APPROXIMATED}, and {what}: {listed(names, MOST_NAMED)} (spbench import --explain says how)"


def scalar_of(text: str) -> Any:
    """The value of a command line's text, parsed as YAML; a text that is no YAML is its own value."""
    try:
        return parse_yaml(Path("--given"), f"value: {text}".encode())["value"]
    except UserError:
        return text


def key_account(
    table: ArgumentTable,
    values: Iterable[tuple[str, Any]],
    counts: Callable[[str], bool] = bool,
    overrides: Mapping[str, str] | None = None,
) -> Account:
    """The account, still without settings, of those keys of configuration files for which ``counts`` is true.

    Args:
        values: pairs of a key's dotted name and its value.
        overrides: texts of values that replace values of the files, by name, as --given has them.
    """
    given = {}
    chosen = {name: scalar_of(text) for name, text in (overrides or {}).items() if name in table.arguments}
    for name, value in [*((n, v) for n, v in values if n not in chosen), *chosen.items()]:
        if counts(name):
            argument = table.arguments.get(name)
            wrong = argument.wrong(value) if argument else ""
            if argument and argument.outcome == "mapped" and str(value).startswith("$("):
                wrong = f"{shown(value)} is a value that only a run has; --given {name}=VALUE"
            given[name] = Given(name, value, f"= {shown(value)}", wrong)
    problems = [f"{name}: {each.wrong}" for name, each in given.items() if each.wrong]
    return Account(table=table, given=given, problems=problems)
