"""The command line. Results go to standard output, progress and messages to standard error.

Exit codes: 0 done; 1 a cell failed or a strategy is not green; 2 an error that the user can mend, told in one
line; 70 a fault of the program; 130 interrupted; 141 the reader of the output went away. With
SPBENCH_DEBUG=1 errors keep their traceback.

The command NAME is the function ``command`` of the module NAME_command in a room of bench/tools, or an entry
point of the group ``spbench.commands``. Only the module of the command that the user calls is imported; help
on other commands is read from their files. A command's body may be a function elsewhere
(:func:`options.body`), which is imported when the command runs.
"""

import errno
import io
import os
import sys
import traceback
from collections.abc import Sequence
from contextlib import redirect_stdout
from typing import Any, TextIO

import click
from click.shell_completion import shell_complete

from spbench.bench import errors, measure
from spbench.bench.command_line.output import for_stream
from spbench.bench.measured_code import code_digest
from spbench.impls import DiscoveryError, FunctionModules, exits_refused, installed_version, place_of_error

COMMANDS = FunctionModules("spbench.bench.tools", "*/*_command", "command", "commands", "spbench.commands")

#: the environment variable by which a shell asks for the words that may follow
_COMPLETE = "_SPBENCH_COMPLETE"

_NO_MEMORY = "this process may use too little memory (ulimit -v, a container's limit)"
#: messages of the linker, and of an extension that cannot even make an exception, if memory is short
_SHORT = ("failed to map segment", "annot allocate memory", "error return without exception set")

#: the errors that only writing raises
_OF_WRITING = (errno.ENOSPC, errno.EFBIG, errno.EDQUOT, errno.EROFS)

#: the environment variables that launchers set for each process that they start; some clusters set all of
#: these variables but LOCAL_RANK for every process of a machine
_LAUNCHED = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"}


class _StreamError(Exception):
    """Standard output could not be written; the cause is the OSError. This class is no OSError, so that it is
    not taken for an error of a file, process or socket."""


class _CheckedStream:
    """Standard output that raises its errors as :class:`_StreamError`."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError as error:
            raise _StreamError from error

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError as error:
            raise _StreamError from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class _Commands(click.Group):
    """The group of all commands; the module of a command is imported when the command is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return COMMANDS.names()

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        command = COMMANDS.load(cmd_name) if cmd_name in COMMANDS else None
        if not isinstance(command, click.Command | None):
            raise errors.UserError(f"{cmd_name}: its entry point names no click.Command; end it in :FUNCTION")
        return command

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[Any, Any, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"unknown command {errors.shown(args[0])}{errors.suggestion(args[0], COMMANDS.names())}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        helps = [click.Command(name, help=text) for name, text in COMMANDS.docstrings().items()]
        width = formatter.width - 6 - max(len(str(each.name)) for each in helps)
        with formatter.section("Commands"):
            formatter.write_dl([(str(each.name), each.get_short_help_str(width)) for each in helps])

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:  # a pipe to another process, but click would take it for the output
            raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _version(context: click.Context, parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        mine, torch = (installed_version(name) or "(not installed)" for name in ("spbench", "torch"))
        click.echo(f"spbench {mine}, code {code_digest()}, torch {torch}")
        context.exit()


@click.group(
    cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]}, invoke_without_command=True
)
@click.option(
    "--version", is_flag=True, expose_value=False, is_eager=True, callback=_version, help="Show the version."
)
@click.pass_context
def cli(context: click.Context) -> None:
    """Benchmark and reproduce sequence parallelism."""
    if context.invoked_subcommand is None:
        click.echo(context.get_help())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command `spbench`, and exit."""
    is_launched = os.environ.keys() >= _LAUNCHED
    sys.exit(launched_exit_code(arguments) if is_launched else exit_code(arguments))


def launched_exit_code(arguments: Sequence[str] | None) -> int:
    """Run a command line in a process that a launcher has started, and return the exit code; see
    :func:`run_launched`."""
    try:
        return measure.run_launched(lambda: exit_code(arguments))
    except errors.UserError as error:  # raised before the ranks have met
        return _complain(str(error), 2, traced=True)


def exit_code(arguments: Sequence[str] | None) -> int:
    """Run a command line, print an error as one line, and return the exit code."""
    _fill_closed_streams()
    output = sys.stdout
    if output is None:
        return _complain("standard output is closed; send it to a file, or to /dev/null", 2)
    if isinstance(output, io.TextIOWrapper):  # a character that the encoding lacks is written as a number
        output.reconfigure(errors="backslashreplace")
    try:
        os.getcwd()
    except OSError:
        return _complain("the working directory is gone; change to one that is there", 2)
    try:
        with redirect_stdout(_CheckedStream(output)), exits_refused():
            if instruction := os.environ.get(_COMPLETE):  # click's main would exit, which nothing here may
                code = shell_complete(cli, {}, "spbench", _COMPLETE, instruction)
            else:
                code = cli.main(arguments, prog_name="spbench", standalone_mode=False)
            sys.stdout.flush()
        return code or 0
    except _StreamError as error:
        cause = error.__cause__
        assert isinstance(cause, OSError)
        # buffered output is discarded, because writing it would fail again as the interpreter ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
        if isinstance(cause, BrokenPipeError):
            return 141
        return _complain(f"standard output: {cause.strerror}", 2, traced=True)
    except (KeyboardInterrupt, click.Abort, errors.Interrupted) as interrupt:
        return _complain(str(interrupt) or "interrupted", 130)
    except click.ClickException as error:
        return _complain(_without_long_words(error.format_message(), arguments), 2)
    except (errors.UserError, DiscoveryError) as error:
        return _complain(_without_long_words(str(error), arguments), 2, traced=True)
    except UnicodeEncodeError as error:
        around = errors.shown(error.object[max(0, error.start - 60) : error.end + 60])
        return _complain(f"{around} is no UTF-8; rename what has such a name", 2, traced=True)
    except MemoryError as error:
        return _complain(f"{_NO_MEMORY}: {error}".removesuffix(": "), 2, traced=True)
    except Exception as error:
        if isinstance(error, ImportError | SystemError) and any(words in str(error) for words in _SHORT):
            return _complain(f"{_NO_MEMORY}: {error}", 2, traced=True)
        if isinstance(error, OSError) and error.filename is not None:
            doing = "cannot write " if error.errno in _OF_WRITING else ""
            return _complain(
                f"{doing}{errors.shortened(str(error.filename))}: {error.strerror}", 2, traced=True
            )
        if at := place_of_error(error):
            return _complain(f"{at}: {errors.described(error)}", 2, traced=True)
        return _complain(
            f"internal error: {errors.described(error)} (SPBENCH_DEBUG=1 shows where)", 70, traced=True
        )
    except BaseException as error:  # SystemExit and the like, which no code of spbench raises
        *_, (frame, line) = traceback.walk_tb(error.__traceback__)
        at = place_of_error(error) or f"{frame.f_code.co_filename}:{line}"
        return _complain(f"{at}: {errors.described(error)}; nothing is taken for done", 2, traced=True)


def _without_long_words(text: str, arguments: Sequence[str] | None) -> str:
    """A message with its long words cut, because click repeats words of the command line in messages."""
    for word in sys.argv[1:] if arguments is None else arguments:
        for part in (word, word.partition("=")[2], " ".join(word.split())):
            if len(part) > errors.MOST_SHOWN:
                text = text.replace(part, errors.shortened(part)).replace(repr(part), errors.shown(part))
    return text


def _fill_closed_streams() -> None:
    """Open the null device for each closed stream of standard input, output and error, so that no other file
    takes its number; and set sys.stderr, because Python would else print errors to standard output."""
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(number)
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115


def _complain(text: str, code: int, *, traced: bool = False) -> int:
    if traced and os.environ.get("SPBENCH_DEBUG", "") not in ("", "0"):
        traceback.print_exc()
    print(for_stream(f"spbench: {errors.one_line(text)}", sys.stderr), file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
