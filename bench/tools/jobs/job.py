"""A job of a training program: its arguments, each accounted for, and the settings of the cell they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.expand import Problem, expand
from spbench.bench.yaml_text import comment, scalar

#: "not modelled": it may move time or memory, and what a scenario says is without it
NOT_MODELLED: Final = "not modelled"
Outcome = Literal["mapped", "no effect", "not modelled", "refused", "unknown"]

#: column of the scenario's comments, where a line leaves room for them
_COMMENT_COLUMN = 44
#: arguments of one kind that a line names, and characters of a word of the job that it repeats
MOST_NAMED, _LONGEST = 5, 80


@dataclass(frozen=True)
class Argument:
    """One argument of a job, and what became of it.

    Attributes:
        name: as its program calls it: ``--hidden-size``, ``optimizer.name``.
        value: as the job gives it; "" for a switch.
        detail: the settings that it sets, why it has no effect, what it may move, or what is missing for it.
    """

    name: str
    value: str
    outcome: Outcome
    detail: str

    def __str__(self) -> str:
        return f"{self.name} {self.value}".rstrip()


@dataclass(frozen=True)
class Setting:
    """One setting of the cell.

    Attributes:
        path: of its keys: ``model_options.kv_heads``.
        source: the arguments that it came from, or whose default it is.
    """

    path: str
    value: Any
    source: str


#: in the order in which a reader wants them
_ORDER = (
    *("model", "strategy", "strategy_options", "sizes", "mesh", "batch", "seq_len", "precision", "cluster"),
    *("model_options", "training"),
)


def ordered(settings: Sequence[Setting]) -> list[Setting]:
    """Settings in the order of a scenario."""
    return sorted(settings, key=lambda setting: _place(setting.path))


def _place(path: str) -> tuple[int, int]:
    key = path.split(".")[0]
    order = _ORDER.index(key)
    within = ("dp", "pp", "cp", "sp", "tp", "backend", "micro_batches")
    last = path.split(".")[-1]
    return order, within.index(last) if last in within else len(within)


@dataclass(frozen=True)
class Job:
    """What the files of a job say.

    Attributes:
        program: with the version whose arguments and defaults these are.
        settings: in the order in which a scenario has them.
        problems: what keeps the job as a whole from being a cell, one a line.
        remarks: what is approximate, one a line.
        allow_unknown: leave unknown arguments out, in place of refusing them.
    """

    kind: str
    program: str
    title: str
    arguments: Sequence[Argument]
    settings: Sequence[Setting]
    problems: Sequence[str] = ()
    remarks: Sequence[str] = ()
    allow_unknown: bool = False

    def of(self, outcome: Outcome) -> list[Argument]:
        """The arguments with that outcome."""
        return [argument for argument in self.arguments if argument.outcome == outcome]

    def refusal(self) -> str:
        """Why the job is no scenario, in one line; "" if it is one."""
        reasons = []
        if refused := self.of("refused"):
            missing: dict[str, list[str]] = {}
            for argument in refused:
                missing.setdefault(argument.detail, []).append(short(str(argument)))
            reasons += [f"{', '.join(names)}: {detail}" for detail, names in missing.items()]
        if (unknown := self.of("unknown")) and not self.allow_unknown:
            names = [f"{short(argument.name)}{argument.detail}" for argument in unknown[:MOST_NAMED]]
            if more := len(unknown) - len(names):
                names.append(f"nor {more} others (--explain)")
            reasons.append(
                f"{self.program} has no argument {', '.join(names)}; --allow-unknown leaves "
                f"{'them' if len(unknown) > 1 else 'it'} out"
            )
        return "; ".join([*reasons, *self.problems])

    def content(self) -> dict[str, Any]:
        """The settings, nested as in a group of a scenario. UserError as :meth:`refusal` says."""
        if refusal := self.refusal():
            raise UserError(f"{self.title}: {refusal}")
        nested: dict[str, Any] = {}
        for setting in self.settings:
            *above, key = setting.path.split(".")
            place = nested
            for name in above:
                place = place.setdefault(name, {})
            place[key] = setting.value
        return nested

    def cell(self) -> Cell:
        """The job as a cell.

        Raises:
            UserError: an argument is refused or unknown, or the settings cannot be together.
        """
        group = self.content()
        try:
            (cell,) = expand({}, [group], {}, "", Path())
        except Problem as problem:
            raise UserError(f"{self.title}: {self._of_argument(str(problem))}") from problem
        return cell

    def _of_argument(self, problem: str) -> str:
        """What is wrong with a setting, by the argument that it came from."""
        path, _, message = problem.removeprefix("groups[0].").partition(": ")
        inner = [s for s in self.settings if path == s.path or path.startswith(f"{s.path}.")]
        source = f" ({inner[0].source})" if inner else ""
        return f"{path}{source}: {message}"

    def scenario_text(self) -> str:
        """A scenario file with this cell, the argument that each line came from beside it.

        Raises:
            UserError: an argument is refused or unknown, or the settings cannot be together.
        """
        self.cell()
        lines = [comment(line) for line in self._heading()]
        lines += [f"title: {scalar(self.title)}", "groups:"]
        sources = {setting.path: setting.source for setting in self.settings}
        body = [*_lines(self.content(), "", sources)]
        for number, (text, source) in enumerate(body):
            line = ("  - " if number == 0 else "    ") + text
            lines.append(f"{f'{line} '.ljust(_COMMENT_COLUMN)}{comment(source)}" if source else line)
        return "\n".join(line.rstrip() for line in lines) + "\n"

    def _heading(self) -> Iterator[str]:
        yield f"{self.program}, as `spbench import {self.kind}` reads it, with the defaults of this version"
        idle = self.of("no effect")
        if idle:
            have = "argument has" if len(idle) == 1 else "arguments have"
            yield f"{len(idle)} {have} no effect on what is counted: --explain says why"
        for remark in self.remarks:
            yield remark if remark.startswith(NOT_MODELLED) else f"approximate: {remark}"
        yield from (f"unknown to this version and left out: {each}" for each in self.of("unknown"))


def short(text: str) -> str:
    """A word of a job as a message repeats it."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _lines(content: Mapping[str, Any], above: str, sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """The lines of a mapping in YAML, each with its source; a mapping that is a setting is one line."""
    for key, value in content.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and path not in sources:
            yield f"{key}:", ""
            for text, source in _lines(value, f"{path}.", sources):
                yield f"  {text}", source
        else:
            yield f"{key}: {scalar(value)}", sources[path]
