"""Options that several commands have, and the kinds of their values.

This module imports neither torch nor pandas, so that help is quick.
"""

import dataclasses
import functools
import importlib
import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Literal, TypeVar

import click

from spbench.bench import measure
from spbench.bench.command_line.forms import FORMS
from spbench.bench.command_line.output import Output, View
from spbench.bench.command_line.progress import silence
from spbench.bench.errors import one_line, shown
from spbench.bench.setting_values import MOST_POSITIONS, MOST_SECONDS, no_size, size
from spbench.bench.units import WAYS_OF_BYTES, claim, nbytes_of

DEFAULT_FORM = "table"
_GIVEN = click.core.ParameterSource.COMMANDLINE
Function = Callable[..., Any]
Command = TypeVar("Command", bound=Function)


class Text(click.ParamType[Any]):
    """A kind of value: ``read`` converts the text of an option, or raises ValueError with the reason."""

    def __init__(self, name: str, read: Callable[[str], Any]):
        self.name, self.read = name, read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self.read(value) if isinstance(value, str) else value
        except ValueError as error:
            return self.fail(str(error), param, ctx)


def several(name: str, read: Callable[[str], Any] = str) -> Text:
    """The kind of values separated by commas; ``read`` converts each word, or raises ValueError."""

    def values(text: str) -> tuple[Any, ...]:
        words = tuple(read(word.strip()) for word in text.split(",") if word.strip())
        if not words:  # for example, a shell variable that is not set; all cells would run
            raise ValueError(f"{shown(text)} names nothing; leave the option out for all")
        return words

    return Text(name, values)


def numbers(least: int = 1) -> Text:
    """The kind of whole numbers of at least ``least``, separated by commas."""

    return several("n[,n...]", lambda word: whole(word, least))


def whole(word: str, least: int) -> int:
    """The whole number that a word writes; ValueError if it is none, or below ``least``."""
    count = size(word)
    if count is None or count < least:
        raise ValueError(f"{shown(word)} is not a whole number of at least {least}")
    return count


def _setting(word: str) -> tuple[str, str]:
    name, _, wanted = map(str.strip, word.partition("="))
    if not (name and wanted):
        raise ValueError(f"{shown(word)} is not SETTING=VALUE, such as training.backend=zero1")
    return name, wanted


WORDS = several("name[,name...]")
#: pairs of a setting's name and its value
SETTINGS = several("setting=value[,...]", _setting)


class WholeNumber(click.IntRange):
    """The kind of a whole number of at least ``min``."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter:
            given = one_line(str(value))
            self.fail(f"must be a whole number of at least {self.min}, not {given}", param, ctx)


def _length(text: str) -> int:
    number = size(text)
    if number is None:
        raise ValueError(no_size(text))
    if not 1 <= number <= MOST_POSITIONS:
        raise ValueError(f"{number} is not in the range 1 to {MOST_POSITIONS}")
    return number


def _bytes(text: str) -> int:
    if number := nbytes_of(text):
        return number
    raise ValueError(f"{shown(text)} is no number of bytes; write it {WAYS_OF_BYTES}")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError as error:
        raise ValueError(f"{shown(text)} is not a number of seconds") from error
    if not 0 < seconds <= MOST_SECONDS:  # NaN is neither
        raise ValueError(f"{text} is no time to wait: give seconds above 0, up to {MOST_SECONDS}")
    return seconds


def _counts(text: str) -> tuple[int, ...]:
    counts: list[int] = []
    for word in text.split(","):
        first, *last = (_length(end.strip()) for end in word.split("..", 1))
        counts.append(first)
        if last and last[0] < first:
            raise ValueError(f"{word}: write the smaller number first")
        while last and counts[-1] * 2 <= last[0]:
            counts.append(counts[-1] * 2)
    return tuple(dict.fromkeys(counts))


#: a size: a whole number of at least 1, which may end in K, M or G (powers of 1024)
LENGTH = Text("n", _length)
#: sizes separated by commas; ``8..512`` is 8 and its doublings up to 512
COUNTS = Text("n[,n...]", _counts)
#: a number of bytes with its unit
BYTES = Text("size", _bytes)
#: a time in seconds after which a cell is given up
LIMIT = Text("seconds", _seconds)


def refuse_given(names: Iterable[str], why: str) -> None:
    """Raise UsageError if the command line has one of the options whose parameters ``names`` lists, because
    the option would have no effect; ``why`` ends the message."""
    context = click.get_current_context()
    for parameter in context.command.params:
        if parameter.name in names and context.get_parameter_source(parameter.name) is _GIVEN:
            raise click.UsageError(f"{parameter.opts[0]} {why}")


def _joined(ctx: click.Context, param: click.Parameter, values: Sequence[tuple[Any, ...]]) -> tuple[Any, ...]:
    return tuple(dict.fromkeys(value for several in values for value in several))


def many(flag: str, kind: Text, text: str, *name: str) -> Callable[[Command], Command]:
    """An option that may be repeated, or get several values at once; ``name`` names the parameter."""
    return click.option(flag, *name, type=kind, multiple=True, callback=_joined, help=text)


def path_option(flag: str, text: str, folder: bool = False, **further: Any) -> Callable[[Command], Command]:
    """An option that is a path; ``text`` is its help. With ``folder``, a path of a file is refused before the
    command begins its work."""
    return click.option(flag, type=click.Path(path_type=Path, file_okay=not folder), help=text, **further)


def figure_option(text: str) -> Callable[[Command], Command]:
    """An option that is the path of a figure; the ending is checked before the command begins its work."""

    def check(ctx: click.Context, param: click.Parameter, path: Path | None) -> Path | None:
        if path is not None:
            from spbench.plots.paper import form_of  # matplotlib, which takes half a second

            try:
                form_of(path)
            except ValueError as error:
                raise click.BadParameter(str(error), ctx, param) from error
        return path

    return path_option("--figure", text, callback=check)


def with_options(*options: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Add several options to a command, which its help lists in this order."""
    return lambda command: functools.reduce(lambda inner, option: option(inner), reversed(options), command)


device = click.option(
    "--device",
    type=click.Choice(["cpu", "cuda"]),
    help="Device of real ranks' tensors; by default CUDA if torch sees a GPU, else the CPU.",
)
fresh = click.option("--fresh", is_flag=True, help="Start again; earlier results are renamed.")
jobs = click.option("--jobs", type=WholeNumber(min=1), help="Cells at once; by default the usable cores.")
executor = click.option(
    "--executor",
    metavar="ADDRESS",
    help="Spread the cells of virtual ranks over the workers of a Dask scheduler at dask://HOST:PORT (under "
    "Slurm, for example, of dask-jobqueue). Needs the extra 'cluster'.",
)
variant = click.option(
    "--variant", help="A variant of the scenario's settings, or 'all'; by default the first."
)
_ANOTHER = "Change a setting of all cells, for example strategy_options.placement=zigzag."
changes = many("--set", SETTINGS, _ANOTHER, "changes")
_SAID = "Say whether the cards can do this: 104.7 s, 38% MFU, 430 TFLOP/s, 25388 tokens/s."
measured = many("--measured", several("text[,text...]", lambda text: (text, claim(text))[0]), _SAID)
given = click.option(
    "--given", multiple=True, metavar="NAME=VALUE", help="A value that a job's files lack, such as TP=8."
)
quiet = click.option(
    "--quiet", is_flag=True, expose_value=False, callback=silence, help="Show no progress, only the result."
)


def scenario(command: Command) -> Function:
    """Add SCENARIO and --scenario, two ways to name one scenario; the command gets ``scenario``."""

    @functools.wraps(command)
    def named(placed: str | None, scenario: str | None, **arguments: Any) -> Any:
        if (placed is None) == (scenario is None):
            context = click.get_current_context()
            wrong = "name a scenario" if placed is None else "name one scenario, once"
            usage = [context.command_path, *context.command.collect_usage_pieces(context)[1:]]
            words = " ".join(usage).replace("[SCENARIO]", "SCENARIO")
            raise click.UsageError(f"{wrong}: {words} (see spbench list scenarios)")
        return command(scenario=scenario if placed is None else placed, **arguments)

    text = "Name (see spbench list) or path of a scenario; you may also write it as SCENARIO."
    return click.argument("placed", metavar="[SCENARIO]", required=False)(
        click.option("--scenario", help=text)(named)
    )


def files_of(kind: Literal["strategy", "model"], text: str) -> Callable[[Command], Command]:
    """An option that loads the strategies or models that the user's Python files define; the command itself
    gets no value."""

    def load(ctx: click.Context, param: click.Parameter, paths: Sequence[str]) -> None:
        for path in paths:
            if measure.cell_names(kind, path) == [path]:
                raise click.BadParameter(f"{path!r} is no path of a .py file", ctx, param)

    return click.option(
        f"--{kind}", metavar="FILE.py", multiple=True, callback=load, expose_value=False, help=text
    )


def choosing_cells(command: Function) -> Function:
    """Add the options that name a scenario and choose among its cells. The command gets ``scenario``, and the
    choice as ``narrowing``, a :class:`Narrowing`."""

    @functools.wraps(command)
    def narrowed(**arguments: Any) -> Any:
        strategy, model, cluster, world_size, variant, where, changes = map(
            arguments.pop, ("strategy", "model", "cluster", "world_size", "variant", "where", "changes")
        )
        places = strategy, model, cluster, (), world_size, variant
        chosen = measure.Narrowing(*places, where=where, changes=changes)
        return command(narrowing=chosen, **arguments)

    options = [
        scenario,
        many(
            "--strategy",
            WORDS,
            "Only these strategies. A strategy in a file of yours (FILE.py) replaces the strategies of "
            "the scenario that use the same axes.",
        ),
        many("--model", WORDS, "Only these models. A model of yours (FILE.py, config.json) replaces all."),
        many("--cluster", WORDS, "Run on these clusters instead of the scenario's."),
        many("--world-size", numbers(), "Only these numbers of GPUs; the scenario need not have them."),
        many("--where", SETTINGS, "Only cells with this setting, such as training.backend=zero1."),
        changes,
        variant,
    ]
    return with_options(*options)(narrowed)


def shape(command: Command) -> Function:
    """Add --batch and --seq-len; the command gets ``shape``, their values by the names of a cell's fields."""

    @functools.wraps(command)
    def shaped(batch: int | None, seq_len: int | None, **arguments: Any) -> Any:
        return command(shape={"batch": batch, "seq_len": seq_len}, **arguments)

    of_batch = click.option("--batch", type=LENGTH, help="Only this batch, also as a search's answer.")
    length = "Only this sequence length, for example 131072 or 128K, also as a search's answer."
    return of_batch(click.option("--seq-len", type=LENGTH, help=length)(shaped))


def body(place: str, *, starts_processes: bool = False) -> Callable[[Command], Function]:
    """Give a command a body: a function that is imported when the command runs, and not for its help.

    Args:
        place: the function's module below bench/tools, and its name: "run.step_trace:traced". The function
            gets the values of the options by their names.
        starts_processes: whether the body starts processes, unless it runs dry; their server has its imports.
    """

    def with_body(command: Command) -> Function:
        @functools.wraps(command)
        def run(**arguments: Any) -> Any:
            module, _, name = place.partition(":")
            starts = starts_processes and not arguments.get("dry_run")
            with measure.beginning_server() if starts else nullcontext():
                imported = importlib.import_module(f"spbench.bench.tools.{module}")
            return getattr(imported, name)(**arguments)

        vars(run)["body"] = place
        return run

    return with_body


def printed(command: Callable[..., Output | Iterable[Output]]) -> Function:
    """Add --format, --wide, --details and --quiet to a command that returns an :class:`Output` or yields
    several; print each output in the chosen form as soon as it exists. The new command returns the largest
    exit code of the outputs."""

    @click.option(
        "--format",
        "form",
        type=click.Choice(FORMS.names()),
        default=DEFAULT_FORM,
        show_default=True,
        help="Form of the output.",
    )
    @click.option("--wide", is_flag=True, help="On a terminal, show all columns, if need be below rows.")
    @click.option("--details", is_flag=True, help="On a terminal, show all sections, and all rows of tables.")
    @quiet
    @functools.wraps(command)
    def printed(form: str, wide: bool, details: bool, **arguments: Any) -> int:
        show = FORMS.load(form)
        result = command(**arguments)
        code = 0
        for output in [result] if isinstance(result, Output) else result:
            show(dataclasses.replace(output, view=View(wide, details)), sys.stdout, sys.stderr)
            code = max(code, output.code)
        return code

    return printed
