"""Tables for people, and the bar of progress on a terminal, drawn by rich. On a terminal the columns are
fitted to its width: no word is broken and no row wraps. Elsewhere tables are Markdown with all columns."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
from rich.table import Column
from rich.table import Table as Drawing
from rich.text import Text

from spbench.bench.command_line.output import GAP, Table, View, wrapped

#: the least width, in characters, of a column in which sentences are broken
_NARROW = 28


def text_of(value: Any) -> str:
    """The text of a value in a table: "" for None; a sign that would control a terminal becomes "?"."""
    text = "" if value is None else str(value)
    return text if text.isprintable() else "".join(c if c.isprintable() or c == "\n" else "?" for c in text)


def filled(lines: Sequence[Mapping[str, Any]]) -> list[str]:
    """The names of columns in which at least one line has a value, in order."""
    return [name for name in (lines[0] if lines else ()) if any(text_of(line[name]) for line in lines)]


def is_number(lines: Sequence[Mapping[str, Any]], name: str) -> bool:
    """Whether all values of a column are numbers or blank, so that the column is aligned to the right."""
    values = [line[name] for line in lines]
    texts = [value for value in values if isinstance(value, str)]
    others = (int, float, str, type(None))
    return "".join(texts).strip("+-%x,.0123456789") == "" and all(isinstance(v, others) for v in values)


@dataclass(frozen=True)
class TableLayout:
    """A table fitted to a terminal.

    Attributes:
        lines: the lines that are shown.
        same: the columns with the same value in all shown lines, with this value, which is printed once.
        beside: the columns of rows, in order, with their widths in characters; a longer value is broken
            between words.
        below: the columns whose values are printed below each row, a line each.
        joined: further columns whose values are printed below each row, in one line.
        left_out: the columns that are not shown.
        folded: the number of lines that each text replaces (:attr:`Table.folded`).
        cut: the number of lines that are left out because there are too many.
    """

    lines: Sequence[Mapping[str, Any]]
    same: Mapping[str, str]
    beside: Mapping[str, int]
    below: Sequence[str]
    joined: Sequence[str]
    left_out: Sequence[str]
    folded: Mapping[str, int]
    cut: int


def layout(table: Table, width: int, view: View) -> TableLayout:
    """Fit a table to a width in characters: the important columns get room first, each as wide as its longest
    value and the longest word of its name."""
    kept, folded = _kept(table, view)
    lines = kept if view.details or table.most is None else kept[: table.most]
    names = filled(lines)
    texts = {name: {text_of(line[name]) for line in lines} for name in names if name}
    same = {name: text for name, (text, *others) in texts.items() if not others}
    if len(lines) < 2 or len(same) == len(names):
        same = {}
    names = [name for name in names if name not in same]
    beside = _with_room(table, lines, names, width)
    others = [name for name in names if name not in beside]
    # the most important column is never left out, because it names the row
    first = next(iter(_by_importance(table, names)), None)
    below = [name for name in others if name in table.below or name == first]
    rest = [name for name in others if name not in below]
    joined, left_out = (rest, []) if view.wide else ([], rest)
    return TableLayout(lines, same, beside, below, joined, left_out, folded, len(kept) - len(lines))


def _kept(table: Table, view: View) -> tuple[list[Mapping[str, Any]], dict[str, int]]:
    """The lines that are shown as rows, and the number of lines that each text replaces."""
    folded = {} if view.details else table.folded
    kept = [line for index, line in enumerate(table.lines) if index not in folded]
    return kept, Counter(folded.values())


def _by_importance(table: Table, names: Sequence[str]) -> list[str]:
    """The columns, the most important first; columns of sentences that are not important come last."""
    order = [*table.important, *(name for name in names if name not in table.below), *names]
    return [name for name in dict.fromkeys(order) if name in names]


def _with_room(
    table: Table, lines: Sequence[Mapping[str, Any]], names: Sequence[str], width: int
) -> dict[str, int]:
    """The columns of a row with their widths. A column of sentences gets the remaining room, if most rows
    have a sentence; other remaining room goes to heads of several words, so that they fit one line."""
    taken: dict[str, int] = {}
    left = width + len(GAP)
    for name in _by_importance(table, names):
        texts = [text_of(line[name]) for line in lines]
        needed = max([*map(len, texts), *map(len, name.split())])
        narrow = max([_NARROW, *(len(word) for text in texts for word in text.split())])
        is_usual = sum(map(bool, texts)) > len(texts) / 2
        if name in table.below and is_usual and needed + len(GAP) > left >= narrow + len(GAP):
            needed = left - len(GAP)
        if needed + len(GAP) <= left:
            taken[name] = needed
            left -= needed + len(GAP)
    for name in taken:
        more = max(len(name) - taken[name], 0)
        if more <= left:
            taken[name] += more
            left -= more
    return {name: taken[name] for name in names if name in taken}


#: the most texts that are shown in place of folded lines
_FOLDED = 3
_BELOW = "    "


class Screen:
    """Formats tables and paragraphs for a terminal's width, as text with escape sequences for its colours."""

    def __init__(self, out: TextIO, view: View):
        self._console = Console(file=out, highlight=False)
        self._view = view
        self.width = self._console.width

    def paragraph(self, text: str) -> str:
        """A text with lines broken between words, so that they fit the terminal's width."""
        return "\n".join(wrapped(text, self.width))

    def aside(self, text: str) -> str:
        """A dimmed remark on a table, with lines broken between words."""
        return self._styled(wrapped(text, self.width, further=GAP), "dim")

    def table(self, table: Table) -> str:
        """The text of a table: its title, the values that all rows share, the rows, and a remark on columns
        and rows that are not shown."""
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
    """The lines of a row; a broken value takes several lines, and a head is aligned to the last line."""
    texts = {name: wrapped(text_of(values[name]), width, further="") for name, width in widths.items()}
    height = max(map(len, texts.values()), default=0)
    for name, width in widths.items():
        blank = [""] * (height - len(texts[name]))
        lines = [*blank, *texts[name]] if is_head else [*texts[name], *blank]
        texts[name] = [text.rjust(width) if name in right else text.ljust(width) for text in lines]
    for number in range(height):
        yield GAP.join(lines[number] for lines in texts.values()).rstrip()


def _below(line: Mapping[str, Any], fitted: TableLayout) -> Iterator[str]:
    """The texts that are printed below a row."""
    if texts := [f"{name}: {text}" for name in fitted.joined if (text := text_of(line[name]))]:
        yield "; ".join(texts)
    for name in fitted.below:
        if text := text_of(line[name]):
            yield f"{name}: {text}" if name else text


def _asides(fitted: TableLayout) -> Iterator[str]:
    """Remarks on rows and columns that are not shown, with the option that shows them."""
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
    """A table in Markdown: numbers are aligned to the right, columns without values are left out."""
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


class Share(ProgressColumn):
    """The share of the work that is done, and the remaining time if the rest is as fast, which counts down
    until the share grows; before the first share is known, the elapsed time."""

    def render(self, task: Task) -> Text:
        taken = task.elapsed or 0.0
        if not task.total or not task.completed:
            return Text(_spelled(taken))
        whole_s = task.fields.setdefault(str(task.completed), taken / task.completed)
        left = f", {_spelled(whole_s - taken)} left" if whole_s >= taken else ""
        return Text(f"{task.completed:.0%}{left}")


def new_bar() -> Progress:
    """A bar on standard error: the share that is done, the time left, and the present work."""
    one_line = Column(no_wrap=True, overflow="ellipsis", ratio=1)
    return Progress(
        BarColumn(bar_width=16),
        Share(),
        TextColumn("{task.description}", markup=False, table_column=one_line),
        console=Console(stderr=True, highlight=False),
        transient=True,
        expand=True,
        redirect_stdout=False,
    )


def _spelled(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"
