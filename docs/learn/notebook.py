"""The chapters of docs/learn as one notebook, docs/notebooks/learn.ipynb.

    python docs/learn/notebook.py          # write it again and run it, which takes some minutes
    python docs/learn/notebook.py --text   # write its text again, where no code has changed
    python docs/learn/notebook.py CHAPTER  # likewise, and run the cells of this chapter, which may be new

Text becomes Markdown cells, commands cells of Bash, and blocks with a title are written to their files.
"""

from __future__ import annotations

import re
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

HERE = Path(__file__).parent
NOTEBOOK = HERE.parent / "notebooks" / "learn.ipynb"
_FENCE = re.compile(r'^```(\w+)(?: title="(.+?)")?\n(.*?)^```\n', re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!-- .*? -->\n")
_LINK = re.compile(r"(?<!!)\[([^\]]+)\]\((?!https?:)[^)]+\)")
#: its first cell: the commands beside this Python, and a folder for the files that cells write
SETUP = """import os
import sys
import tempfile
from pathlib import Path

os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
os.chdir(tempfile.mkdtemp())"""
#: of a long output, the part that a chapter is about, by the command
SHOWN = {
    "verify": " | sed -n '/^Where it goes wrong/,/^$/p; /^([0-9]*) /p; /^exit code/p'",
    "advise": " | head -8 | cut -c1-130",
    "trace": " | head -1 | cut -d, -f1",
}


def chapters() -> list[Path]:
    """The pages in the order in which the index names them."""
    index = HERE / "index.md"
    return [
        index,
        *(HERE / name for name in re.findall(r"^\d+\. \[.+?\]\((\w+\.md)\)", index.read_text(), re.M)),
    ]


def cells(pages: Sequence[Path]) -> Iterator[NotebookNode]:
    """The cells of these pages, without outputs."""
    for page in pages:
        rest = _COMMENT.sub("", page.read_text())
        for before, language, title, code in _parts(rest):
            text = _LINK.sub(r"\1", before).replace("](images/", "](../learn/images/").strip()
            if text:
                yield new_markdown_cell(text)
            if code:
                yield from _of_block(language, title, code)
        if page.name == "index.md":
            yield new_code_cell(SETUP)


def _parts(text: str) -> Iterator[tuple[str, str, str, str]]:
    """(text before it, language, title, code) of each block, and the text behind the last."""
    end = 0
    for block in _FENCE.finditer(text):
        yield text[end : block.start()], block[1], block[2] or "", block[3].rstrip()
        end = block.end()
    yield text[end:], "", "", ""


def _of_block(language: str, title: str, code: str) -> Iterator[NotebookNode]:
    if language == "sh":
        yield new_markdown_cell(f"```sh\n{code}\n```")
    elif language == "console":
        for command in re.findall(r"^\$ (.+)$", code, re.MULTILINE):
            yield new_code_cell(f"%%bash --no-raise-error --err progress\n{_shortened(command)}")
    elif title:
        yield new_code_cell(f"%%writefile {title}\n{code}")
    else:
        # what the last line returns is shown only if nothing follows it
        last = code.splitlines()[-1]
        yield new_code_cell(f"{code};" if last.startswith("Path(") else code)


def _shortened(command: str) -> str:
    """The command with a filter of its output, if it is a long one."""
    shown = next((part for name, part in SHOWN.items() if f"spbench {name}" in command), "")
    return f"({command}){shown}" if "||" in command else command + shown


def written(pages: Sequence[Path]) -> NotebookNode:
    """The notebook of these pages without outputs; the ids of its cells are their numbers, so that it changes
    little."""
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    notebook = new_notebook(cells=[*cells(pages)], metadata=kernel)
    for number, cell in enumerate(notebook.cells):
        cell.id = f"cell-{number}"
    return notebook


def differs() -> bool:
    """Whether the committed notebook has other cells than the pages."""
    committed = nbformat.read(NOTEBOOK, as_version=4).cells
    return [(c.cell_type, c.source) for c in committed] != [
        (c.cell_type, c.source) for c in cells(chapters())
    ]


def kept(notebook: NotebookNode, chapter: str = "") -> None:
    """Give its cells the outputs of the committed notebook; those of a chapter are run.

    Raises:
        SystemExit: others have other code.
    """
    pages = chapters()
    names = [page.stem for page in pages]
    if chapter and chapter not in names:
        sys.exit(f"no chapter {chapter}: {', '.join(names)}")
    parts = [[c for c in cells([page]) if c.cell_type == "code"] for page in pages]
    of_page = [name for name, part in zip(names, parts, strict=True) for _ in part]
    new = [c for c in notebook.cells if c.cell_type == "code"]
    old = [c for c in nbformat.read(NOTEBOOK, 4).cells if c.cell_type == "code"]
    if len(old) == len(new):  # with the chapter as it was
        old = [c for c, name in zip(old, of_page, strict=True) if name != chapter]
    others = [c for c, name in zip(new, of_page, strict=True) if name != chapter]
    if [c.source for c in old] != [c.source for c in others]:
        sys.exit("the code has changed: run the notebook, without arguments")
    ran = list(old)
    if chapter:
        alone = written([pages[names.index(chapter)]])
        alone.cells.insert(0, new_code_cell(SETUP))
        run(alone)
        ran += [c for c in alone.cells if c.cell_type == "code"][1:]
    own = [c for c, name in zip(new, of_page, strict=True) if name == chapter]
    for cell, before in zip([*others, *own], ran, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    for number, cell in enumerate(new, 1):
        cell.execution_count = number


def run(notebook: NotebookNode) -> None:
    """Run all cells, in a folder of their own.

    Raises:
        SystemExit: a command printed nothing, so it failed.
    """
    from nbclient import NotebookClient

    with tempfile.TemporaryDirectory() as folder:
        resources = {"metadata": {"path": folder}}
        options = {"timeout": 1500, "kernel_name": "python3", "coalesce_streams": True}
        NotebookClient(notebook, resources=resources, **options).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.source.startswith("%%bash") and not cell.outputs:
            sys.exit(f"no output: {cell.source}")


if __name__ == "__main__":
    notebook, named = written(chapters()), sys.argv[1:]
    if named:
        kept(notebook, "" if named == ["--text"] else named[0])
    else:
        run(notebook)
    nbformat.write(notebook, NOTEBOOK)
