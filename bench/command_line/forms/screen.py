"""Tables drawn by rich: on a terminal, where no word is broken and no row wraps, and as Markdown."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Drawing
from rich.text import Text

from spbench.bench.command_line.forms.columns import TableLayout, filled, is_number, layout, text_of
from spbench.bench.command_line.output import Table, View
from spbench.bench.command_line.wrapping import GAP, wrapped

#: texts in the place of folded lines that are shown
_FOLDED = 3
_BELOW = "    "


class Screen:
    """Draws for a terminal, as text with its escape sequences.

    Args:
        out: the terminal, whose width and colours count.
        width: of the terminal, in characters; None: as it is.
    """

    def __init__(self, out: TextIO, view: View, width: int | None = None):
        self._console = Console(file=out, highlight=False, width=width)
        self._view = view
        self.width = self._console.width

    def paragraph(self, text: str) -> str:
        """A text, broken between words."""
        return "\n".join(wrapped(text, self.width))

    def aside(self, text: str) -> str:
        """A remark on what is shown."""
        return self._styled(wrapped(text, self.width, further=GAP), "dim")

    def table(self, table: Table) -> str:
        """A table: its title, what all rows have in common, the rows, and what is not shown."""
        fitted = layout(table, self.width, self._view)
        lines = [self._styled(wrapped(table.title, self.width, further=GAP), "bold")] if table.title else []
        if fitted.same:
            common = ", ".join(f"{name} {value}" for name, value in fitted.same.items())
            lines.append(self.aside(f"in each row: {common}"))
        lines += self._rows(fitted)
        if asides := list(_asides(fitted)):
            lines.append(self.aside("\n".join(asides)))
        return "\n".join(lines)

    def _rows(self, fitted: TableLayout) -> Iterator[str]:
        if not fitted.lines:
            return
        widths = fitted.beside
        right = {name for name in widths if is_number(fitted.lines, name)}
        for text in _cells({name: name for name in widths}, widths, right, is_head=True):
            yield self._styled([text], "bold")
        if widths:
            yield "─" * (sum(widths.values()) + len(GAP) * (len(widths) - 1))
        for line in fitted.lines:
            yield from _cells(line, widths, right)
            for text in _below(line, fitted):
                yield from wrapped(text, self.width, _BELOW, GAP)

    def _styled(self, lines: list[str], style: str) -> str:
        with self._console.capture() as drawn:
            self._console.print(Text("\n".join(lines)), style=style, soft_wrap=True, end="")
        return drawn.get()


def _cells(
    values: Mapping[str, Any], widths: Mapping[str, int], right: set[str], *, is_head: bool = False
) -> Iterator[str]:
    """The lines of a row, of which a value that is broken takes several; a head stands at the bottom."""
    texts = {name: wrapped(text_of(values[name]), width, further="") for name, width in widths.items()}
    height = max(map(len, texts.values()), default=0)
    for name, width in widths.items():
        blank = [""] * (height - len(texts[name]))
        lines = [*blank, *texts[name]] if is_head else [*texts[name], *blank]
        texts[name] = [text.rjust(width) if name in right else text.ljust(width) for text in lines]
    for number in range(height):
        yield GAP.join(lines[number] for lines in texts.values()).rstrip()


def _below(line: Mapping[str, Any], fitted: TableLayout) -> Iterator[str]:
    """What stands below a row."""
    if texts := [f"{name}: {text}" for name in fitted.joined if (text := text_of(line[name]))]:
        yield "; ".join(texts)
    for name in fitted.below:
        if text := text_of(line[name]):
            yield f"{name}: {text}" if name else text


def _asides(fitted: TableLayout) -> Iterator[str]:
    """What is not shown, and how to see it."""
    texts = [*fitted.folded.items()]
    for text, count in texts[:_FOLDED]:
        yield f"{count} more: {text}"
    if rest := texts[_FOLDED:]:
        count = sum(number for _, number in rest)
        yield f"{count} more for {len(rest)} other reason{'s' * (len(rest) > 1)}; --details shows them"
    if fitted.cut:
        yield f"{fitted.cut} more row{'s' * (fitted.cut > 1)}; --details shows all"
    if fitted.left_out:
        yield f"not shown: {', '.join(fitted.left_out)}; --wide shows all"


def markdown(table: Table) -> str:
    """A table in Markdown: numbers are aligned to the right, columns without any value are left out."""
    console = Console(width=10_000, highlight=False, force_terminal=False, color_system=None)
    drawing = Drawing(box=box.MARKDOWN)
    columns = filled(table.lines)
    for name in columns:
        drawing.add_column(name, justify="right" if is_number(table.lines, name) else "left")
    for line in table.lines:
        drawing.add_row(*(escape(text_of(line[name])) for name in columns))
    with console.capture() as text:
        console.print(escape(table.title), soft_wrap=True)
        console.print(drawing)
    return "\n".join(line for line in text.get().splitlines() if line.strip())
