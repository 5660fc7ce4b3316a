"""Checks of outputs on a terminal: no word is broken, no line goes past the edge, an answer has few lines.

:func:`screen_of` draws an output as a terminal of some width would show it, :func:`faults` checks the text of
a screen, and :func:`run_in_a_terminal` runs a command in a pseudo-terminal.
"""

import fcntl
import io
import os
import pty
import re
import struct
import subprocess
import termios
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TextIO
from unittest.mock import patch

from spbench.bench.command_line.drawn_tables import text_of
from spbench.bench.command_line.forms import as_table
from spbench.bench.command_line.output import Output, Verbatim, View

ROOT = Path(__file__).parents[1]
WIDTHS = (80, 100, 120)
_SHOW = as_table.show
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
#: words that the table form adds to an output
_OF_THE_FORM = {
    word
    for text in (
        "in each row: not shown: ; --wide shows all",
        "more rows row for other reasons reason --details shows all them files in and",
    )
    for word in text.split()
}
#: a number that counts or a time that was taken, which may differ from run to run
_COUNT = re.compile(r"\(?[\d.,/:%]+\)?[,;:]?")


class Terminal(io.StringIO):
    """A stream that claims to be a terminal and keeps the text that is written to it."""

    def isatty(self) -> bool:
        return True


def screen_of(output: Output, width: int, view: View | None = None) -> str:
    """The text that the table form draws for an output on a terminal of ``width`` columns, without escape
    sequences."""
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = str(width)
    try:
        terminal = Terminal()
        _SHOW(output if view is None else replace(output, view=view), terminal, terminal)
    finally:
        if before is None:
            del os.environ["COLUMNS"]
        else:
            os.environ["COLUMNS"] = before
    return plain(terminal.getvalue())


def plain(text: str) -> str:
    """A text without escape sequences and carriage returns."""
    return _ESCAPES.sub("", text).replace("\r\n", "\n")


def faults(
    screen: str,
    width: int,
    words: Collection[str],
    most_lines: int | None = None,
    whole: Collection[str] = (),
) -> list[str]:
    """The faults of a screen, one line each.

    Args:
        screen: the text on the screen, without escape sequences.
        words: all words of the output; any other word on the screen is a broken one.
        most_lines: the most lines that the screen may have; None: any number.
        whole: lines that are never broken, and may go past the edge.
    """
    lines = screen.splitlines()
    problems = [
        f"past the edge: {line!r}"
        for line in lines
        if len(line) > width and _can_be_broken(line) and line not in whole
    ]
    known = _OF_THE_FORM | {*words}
    for word in dict.fromkeys(text_of(_ESCAPES.sub("", screen)).split()):
        if not {word, word.rstrip(",;:")} & known and not set(word) <= {"─"} and not _COUNT.fullmatch(word):
            problems.append(f"a broken word: {word!r}")
    if most_lines is not None and len(lines) > most_lines:
        problems.append(f"{len(lines)} lines, at most {most_lines} are wanted")
    return problems


def _can_be_broken(line: str) -> bool:
    """Whether a line has more than one word; a single word, such as a long path, is never broken."""
    return len(line.split()) > 1


def words_of(output: Output) -> set[str]:
    """Every word that a screen may show of an output."""
    texts = (text_of(shown) for text in _texts(output) for shown in (text, _ESCAPES.sub("", text)))
    return {word for text in texts for raw in text.split() for word in (raw, raw.rstrip(",;:"))}


def _texts(output: Output) -> Iterator[str]:
    for section in (*output.sections, *output.details):
        if isinstance(section, str):
            yield section
            yield section.split(": ")[0].split(" (")[0]
            continue
        yield section.title
        yield section.title.split(": ")[0].split(" (")[0]
        yield from section.folded.values()
        for line in section.lines:
            for name, value in line.items():
                yield f"{name}: {name} {'' if value is None else value}"
    yield from output.notes
    for path in output.files:
        yield f"{path} {path.parent} {path.name}"


def faults_of(output: Output, most_lines: int | None = None, view: View | None = None) -> list[str]:
    """The faults of an output on terminals of all :data:`WIDTHS`, each with its width."""
    words = words_of(output)
    verbatim = [section for section in output.sections if isinstance(section, Verbatim)]
    whole = [line for text in verbatim for line in text.splitlines()]
    return [
        f"{width} columns: {fault}"
        for width in WIDTHS
        for fault in faults(screen_of(output, width, view), width, words, most_lines, whole)
    ]


@contextmanager
def outputs_checked() -> Iterator[None]:
    """Inside, check each output that is printed as tables for faults on terminals; AssertionError at the end
    if there was one."""
    problems: list[str] = []

    def checked(output: Output, out: TextIO, err: TextIO) -> None:
        _SHOW(output, out, err)
        problems.extend(faults_of(output))

    try:
        with patch.object(as_table, "show", checked):
            yield
    finally:  # not inside, because the command line turns errors into exit codes
        assert not problems, "\n".join(problems)


def run_in_a_terminal(
    command: Sequence[str], width: int, folder: Path, timeout_s: float = 900
) -> tuple[int, str]:
    """The exit code of a command, and the plain text that it wrote to a pseudo-terminal of ``width`` columns;
    standard error is dropped."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    environment |= {"TERM": "xterm", "PYTHONPATH": str(ROOT)}
    streams: dict[str, int] = {"stdin": theirs, "stdout": theirs, "stderr": subprocess.DEVNULL}
    with subprocess.Popen(command, cwd=folder, env=environment, **streams) as process:
        os.close(theirs)
        written = b"".join(_chunks(ours))
        os.close(ours)
        return process.wait(timeout_s), plain(written.decode())


def _chunks(descriptor: int) -> Iterator[bytes]:
    while True:
        try:
            chunk = os.read(descriptor, 65536)
        except OSError:  # Linux raises this when the other end is closed
            return
        if not chunk:
            return
        yield chunk
