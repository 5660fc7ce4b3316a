"""Tables for people: drawn on a terminal, Markdown elsewhere, which reads as plain text."""

from __future__ import annotations

from typing import Any, TextIO

from spbench.bench.commands.output import Output, Table


def show(output: Output, out: TextIO, err: TextIO) -> None:
    """Write sections, notes and paths of files to ``out``, with a blank line between."""
    terminal = out.isatty()
    blocks = [
        section if isinstance(section, str) else drawn(section, terminal) for section in output.sections
    ]
    blocks += ["\n".join(output.notes), "\n".join(map(str, output.files))]
    if text := "\n\n".join(block for block in blocks if block):
        print(text, file=out)


def drawn(table: Table, terminal: bool) -> str:
    """A table as text: numbers are aligned to the right, columns without any value are left out.

    Args:
        terminal: fit it to the width of the terminal, and draw lines rather than Markdown.
    """
    from rich import box
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table as Drawing

    console = Console(width=None if terminal else 10_000, highlight=False)
    names = list(table.lines[0]) if table.lines else []
    drawing = Drawing(box=box.SIMPLE_HEAD if terminal else box.MARKDOWN, show_edge=not terminal)
    columns = [name for name in names if any(line[name] not in (None, "") for line in table.lines)]
    for name in columns:
        number = all(_is_number(line[name]) for line in table.lines)
        drawing.add_column(name, justify="right" if number else "left", overflow="fold")
    for line in table.lines:
        drawing.add_row(*("" if line[name] is None else escape(str(line[name])) for name in columns))
    with console.capture() as text:
        console.print(escape(table.title), style="bold", soft_wrap=True)
        console.print(drawing)
    return "\n".join(line for line in text.get().splitlines() if line.strip())


def _is_number(value: Any) -> bool:
    """Whether a value is aligned as a number; a blank is."""
    if isinstance(value, str):
        return not value or value.strip("+-%x,.0123456789") == ""
    return isinstance(value, (int, float, type(None)))
