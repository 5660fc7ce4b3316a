"""Tables for people; lists without a table come without rich. The files stand before the notes, so that the
verdict is the last line."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

from spbench.bench.command_line.output import Output, Table, Verbatim
from spbench.bench.errors import listed

#: the most files of a folder, and the most hidden sections, that a terminal names
_NAMED = 3


def show(output: Output, out: TextIO, err: TextIO) -> None:
    """Write sections, details, paths of files and notes to ``out``, with a blank line between."""
    if out.isatty():
        blocks = _on_a_terminal(output, out)
    else:
        blocks = _elsewhere(output)
    if text := "\n\n".join(block for block in blocks if block):
        print(text, file=out)


def _elsewhere(output: Output) -> Iterator[str]:
    for section in (*output.sections, *output.details):
        if isinstance(section, Table):
            from spbench.bench.command_line.drawn_tables import markdown

            yield markdown(section)
        else:
            yield section
    yield "\n".join(map(str, output.files))
    yield "\n".join(output.notes)


def _on_a_terminal(output: Output, out: TextIO) -> Iterator[str]:
    from spbench.bench.command_line.drawn_tables import Screen

    screen = Screen(out, output.view)
    shown = [*output.sections, *(output.details if output.view.details else ())]
    for section in shown:
        if isinstance(section, Verbatim):
            yield section
        else:
            yield screen.paragraph(section) if isinstance(section, str) else screen.table(section)
    yield screen.paragraph("\n".join(_files_by_folder(output.files)))
    if output.details and not output.view.details:
        titles = [each.title if isinstance(each, Table) else each.split("\n")[0] for each in output.details]
        # a title up to its first colon or bracket
        names = [*dict.fromkeys(title.split(": ")[0].split(" (")[0].rstrip(":") for title in titles)]
        yield screen.aside(f"--details shows: {listed(names, _NAMED, '; ')}")
    yield screen.paragraph("\n".join(output.notes))


def _files_by_folder(files: Sequence[Path]) -> Iterator[str]:
    """A line for each file; a folder with many files has one line, which counts them and names the first."""
    by_folder: dict[Path, list[Path]] = {}
    for path in files:
        by_folder.setdefault(path.parent, []).append(path)
    for folder, paths in by_folder.items():
        if len(paths) <= _NAMED:
            yield from map(str, paths)
        else:
            yield f"{len(paths)} files in {folder}: {listed([path.name for path in paths], _NAMED)}"
