"""Lines for a terminal, broken between words. Nothing but the standard library is imported."""

from __future__ import annotations

import shutil
import textwrap
from typing import TextIO

#: between columns
GAP = "  "


def wrapped(text: str, width: int, indent: str = "", further: str | None = None) -> list[str]:
    """A text's lines, those that are longer than the width broken between words; a word that is longer stays
    whole.

    Args:
        indent: before the first line of each of the text's.
        further: before the lines that continue one; None: as far as the line is indented itself, or as what
            comes after its first gap of two spaces.
    """
    lines = []
    for line in text.splitlines():
        deeper = _hanging(line, width) if further is None else further
        lines += textwrap.wrap(
            line,
            width,
            initial_indent=indent,
            subsequent_indent=indent + deeper,
            break_long_words=False,
            break_on_hyphens=False,
        ) or [""]
    return lines


def _hanging(line: str, width: int) -> str:
    start = len(line) - len(line.lstrip())
    gap = line.find(GAP, start)
    if gap == -1:
        return " " * start
    after = gap + len(line[gap:]) - len(line[gap:].lstrip())
    return " " * (after if after <= width // 2 else start + 2)


def for_stream(text: str, stream: TextIO) -> str:
    """A text as it is written to a stream: broken between words where that is a terminal."""
    return "\n".join(wrapped(text, shutil.get_terminal_size().columns)) if stream.isatty() else text
