"""A job of a training program: its arguments, each accounted for, and the settings of the cell they make."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from os.path import lexists, relpath
from pathlib import Path
from typing import Any, Final, Literal

from spbench.bench.cell import Cell
from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.errors import UserError
from spbench.bench.files import parse_json, read_file, resolved
from spbench.bench.measure import Problem, changed, expand, utilization
from spbench.bench.setting_values import CONFIG, names_a_file
from spbench.bench.units import claim
from spbench.bench.yaml_files import SUFFIXES, nested
from spbench.bench.yaml_text import comment, scalar
from spbench.impls import model_preset, nesting

#: the outcome of an argument that the scenario leaves out or replaces by something close
APPROXIMATED: Final = "approximated"
Outcome = Literal["mapped", "no effect", "approximated", "refused", "unknown"]

#: column of the scenario's comments, where a line leaves room for them
_COMMENT_COLUMN = 44
#: most arguments of one kind that a line names, and most characters of a job's word that a line repeats
MOST_NAMED, _LONGEST = 5, 80
TABLES = RecordForms(Path(__file__).with_name("tables.yaml"))


@dataclass(frozen=True)
class Argument:
    """One argument of a job, and its outcome.

    Attributes:
        name: the program's name of the argument: ``--hidden-size``, ``optimizer.name``.
        value: the value as the job gives it; "" for a switch.
        detail: the settings from the argument, why it has no effect, what it may move, or what spbench lacks.
        missing: why ``--strict`` refuses an approximated argument; "": ``--strict`` accepts the argument.
    """

    name: str
    value: str
    outcome: Outcome
    detail: str
    missing: str = ""

    def __str__(self) -> str:
        return f"{self.name} {self.value}".rstrip()


@dataclass(frozen=True)
class Setting:
    """One setting of the cell.

    Attributes:
        path: the setting's keys with dots between them: ``model_options.kv_heads``.
        source: the arguments from which the setting came, or whose default its value is.
        given: whether the job gives such an argument.
    """

    path: str
    value: Any
    source: str
    given: bool = True


#: the keys of a cell in the order in which a scenario lists them
_ORDER = (
    *("model", "strategy", "strategy_options", "sizes", "mesh", "batch", "seq_len", "precision", "cluster"),
    *("program", "model_options", "training"),
)


def ordered(settings: Sequence[Setting]) -> list[Setting]:
    """The settings, sorted into the order in which a scenario lists its keys."""
    return sorted(settings, key=lambda setting: _place(setting.path))


def _place(path: str) -> tuple[int, int]:
    key = path.split(".")[0]
    order = _ORDER.index(key)
    within = ("dp", "pp", "cp", "sp", "tp", "backend", "micro_batches")
    last = path.split(".")[-1]
    return order, within.index(last) if last in within else len(within)


@dataclass(frozen=True)
class Job:
    """The content of a job's files, as the settings of a cell.

    Attributes:
        program: the program's name, with the version whose arguments and defaults these are.
        settings: the settings in the order in which a scenario lists its keys.
        problems: reasons why the job as a whole is no cell, one line each.
        remarks: approximations of the scenario, one line each.
        strict: unknown arguments, and approximated ones with a ``missing``, are refused, not only warned of.
    """

    kind: str
    program: str
    title: str
    arguments: Sequence[Argument]
    settings: Sequence[Setting]
    problems: Sequence[str] = ()
    remarks: Sequence[str] = ()
    strict: bool = False

    def of(self, outcome: Outcome) -> list[Argument]:
        """The job's arguments that have this outcome."""
        return [argument for argument in self.arguments if argument.outcome == outcome]

    def refusal(self) -> str:
        """The reasons why the job is no scenario, in one line; "" if the job is a scenario."""
        missing: dict[str, list[str]] = {}
        for argument in self.arguments:
            if argument.outcome == "refused":
                missing.setdefault(argument.detail, []).append(short(str(argument)))
            elif argument.missing and self.strict:
                missing.setdefault(f"{argument.missing}: not modelled", []).append(short(str(argument)))
        reasons = [f"{', '.join(names)}: {detail}" for detail, names in missing.items()]
        if self.strict and (names := self._unknown_names()):
            leaves = f"without --strict {'they are' if len(names) > 1 else 'it is'} left out"
            reasons.append(f"{self.program} has no argument {', '.join(names)}; {leaves}")
        return "; ".join([*reasons, *self.problems])

    def _unknown_names(self) -> list[str]:
        """The names of the unknown arguments, of which a message lists at most ``MOST_NAMED``."""
        unknown = self.of("unknown")
        names = [f"{short(argument.name)}{argument.detail}" for argument in unknown[:MOST_NAMED]]
        if more := len(unknown) - len(names):
            names.append(f"nor {more} others (--explain)")
        return names

    @property
    def warnings(self) -> list[str]:
        """The arguments that the scenario leaves out, and its approximations, one line each."""
        unknown = self._unknown_names()
        left_out = [f"unknown to this version and left out: {', '.join(unknown)}"] if unknown else []
        return [*self.remarks, *left_out]

    def content(self) -> dict[str, Any]:
        """The settings, nested as in a group of a scenario. UserError if the job has a :meth:`refusal`."""
        if refusal := self.refusal():
            raise UserError(f"{self.title}: {refusal}")
        return nested((setting.path, setting.value) for setting in self.settings)

    def cell(self) -> Cell:
        """The job as a cell. UserError if an argument is refused or unknown, or the settings cannot be
        together."""
        group = self.content()
        try:
            (cell,) = expand({}, [group], {}, "", Path())
        except Problem as problem:
            raise UserError(f"{self.title}: {self._of_argument(str(problem))}") from problem
        return cell

    def _of_argument(self, problem: str) -> str:
        """A problem with a setting, with the argument from which the setting came."""
        path, _, message = problem.removeprefix("groups[0].").partition(": ")
        inner = [s for s in self.settings if path == s.path or path.startswith(f"{s.path}.")]
        source = f" ({inner[0].source})" if inner else ""
        return f"{path}{source}: {message}"

    def scenario_text(self, folder: Path = Path()) -> str:
        """The text of a scenario file with this cell; a comment on each line names the argument of the line.

        Args:
            folder: the folder of the file; paths of a model and a cluster in the file start from there.

        Raises:
            UserError: an argument is refused or unknown, or the settings cannot be together.
        """
        self.cell()
        lines = [comment(line) for line in self._heading()]
        lines += [f"title: {scalar(self.title)}", "groups:"]
        sources = {setting.path: setting.source for setting in self.settings}
        content = self.content()
        seen = {key: seen_from(folder, content[key]) for key in ("model", "cluster")}
        body = [*_lines(content | seen, "", sources)]
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
            yield remark if remark.startswith(APPROXIMATED) else f"approximate: {remark}"
        yield from (f"unknown to this version and left out: {each}" for each in self.of("unknown"))


def seen_from(folder: Path, text: str) -> str:
    """A path from the current folder, rewritten as a path from ``folder``; a name is unchanged."""
    path, start = Path(text).expanduser(), resolved(folder)
    is_path = (names_a_file(text) or path.suffix in SUFFIXES) and lexists(path) and not path.is_absolute()
    if not is_path or start == resolved(Path()):
        return text
    seen = relpath(resolved(path.parent) / path.name, start)
    return seen if names_a_file(seen) else f"./{seen}"


def beyond_positions(cell: Cell, folder: Path = Path()) -> str:
    """A remark if the sequences of a cell have more positions than the config.json of its model says, which
    with RoPE is no error; else "". The path of the model starts from ``folder``."""
    path = folder / Path(cell.model).expanduser()
    path = path / CONFIG if path.is_dir() else path
    is_there = names_a_file(cell.model) and path.is_file()
    content = parse_json(path, read_file(path)) if is_there else {}
    return TABLES.text("beyond", cell, content=content, path=path)


def short(text: str) -> str:
    """A job's word, cut to the most characters that a message repeats."""
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."


def _lines(content: Mapping[str, Any], above: str, sources: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """A mapping's lines in YAML, as pairs of line and source; a setting that is a mapping is one line."""
    for key, value in content.items():
        path = f"{above}{key}"
        if isinstance(value, dict) and path not in sources:
            yield f"{key}:", ""
            for text, source in _lines(value, f"{path}.", sources):
                yield f"  {text}", source
        else:
            yield f"{key}: {scalar(value)}", sources[path]


def beside_peak(cell: Cell, said: Sequence[str]) -> list[dict[str, Any]]:
    """Whether the cards of a cell can do what is said of its step: a record for each text of ``said``, such
    as ``104.7 s``, ``38% MFU``, ``430 TFLOP/s`` (of a GPU) or ``25388 tokens/s`` (of all GPUs).

    Raises:
        ValueError: a text says nothing of the kind (:func:`claim`).
        UserError: the cluster has no peak of the cell's precision.
    """
    (batch, seq_len), model = cell.shape, model_preset(*cell.model_arguments)
    if (of_a_flop := utilization(cell, 1.0, 1.0)) is None:
        raise UserError(f"--measured: cluster {cell.cluster} has no peak rate of {cell.precision}")
    ways = {"window": seq_len, "documents": [seq_len]}
    whole = {f"model_options.{name}": n for name, n in ways.items() if getattr(model, name, None)}
    halves = cell.model_copy(update={"seq_len": seq_len // 2, "batch": 2 * batch})
    least_s, halves_s, whole_s = (utilization(c, 1.0) or 0.0 for c in (cell, halves, changed(cell, whole)))
    seconds = {"least_s": least_s, "halves_s": halves_s, "whole_s": whole_s, "of_a_flop": of_a_flop}
    ranks = nesting(cell.strategy).sequence_ranks(cell.sizes.by_axis)
    facts, records = TABLES.record("facts", cell, sequence_ranks=ranks, **seconds), []
    for text in said:
        number, unit = claim(text)
        step_s = TABLES.record("seconds", {**facts, "number": number})[unit]
        if unit in ("s", "ms"):
            facts.setdefault("timed_s", step_s)
        records.append(TABLES.record("said", {**facts, "said": text, "unit": unit, "step_s": step_s}))
    return records
