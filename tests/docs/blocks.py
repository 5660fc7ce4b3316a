"""The code blocks of the Markdown pages, and the marks before them that say when they are run.

``<!-- slow: HOW LONG -->`` before a block: it is run by ``pytest -m slow``. ``<!-- not run: WHY -->``: it is
checked and not run. Further comments may stand between. Each row of a table whose head has the code
``$ COMMAND`` is a block too: the code below it ends the command, and the code to its right stands in the
output, in this order. A page's blocks are listed by

    python -m tests.docs.blocks
"""

import re
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

When = Literal["default", "slow", "not run"]
_MARK = re.compile(r"<!-- (slow|not run): (.+?) -->")
_TITLE = re.compile(r'title="(.+?)"')
PROMPT = "$ "


@dataclass(frozen=True)
class Command:
    """A command line of a block, and what the page quotes as its output; None: nothing."""

    line: str
    output: str | None = None


@dataclass(frozen=True)
class Block:
    """A fenced block of code.

    Attributes:
        line: number of its first line in the page.
        title: the file that it is written to; "" if it is none.
        when: in which test run it is run, with the reason in ``why``.
    """

    page: Path
    line: int
    language: str
    title: str
    text: str
    when: When = "default"
    why: str = ""

    def __str__(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    def commands(self) -> list[Command]:
        """The command lines of a shell block, without comments; continued lines are one, and so is a block
        with a file within it."""
        if self.language == "sh" and "<<" in self.text:
            return [Command(self.text)]
        if self.language == "sh":
            text = self.text.replace("\\\n", " ")
            return [Command(line) for line in text.splitlines() if shlex.split(line, comments=True)]
        text = re.sub(r"(?m)^\$ (.*\\\n)+", lambda command: command[0].replace("\\\n", " "), self.text)
        found: list[Command] = []
        for line in text.splitlines(keepends=True):
            if line.startswith(PROMPT):
                found.append(Command(line.removeprefix(PROMPT).strip()))
            else:
                command, output = found[-1].line, found[-1].output or ""
                found[-1] = Command(command, output + line)
        return found


def blocks(page: Path) -> Iterator[Block]:
    """The fenced blocks of a page in order, those in lists too, and the rows of tables that are commands."""
    marks: list[tuple[When, str]] = []
    table: list[Token] | None = None
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        when, why = marks[-1] if marks else ("default", "")
        if token.type == "html_block":
            marks += _MARK.findall(token.content)
        elif token.type == "table_open":
            table = []
        elif token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = _TITLE.search(rest)
            line = (token.map or [0])[0] + 1
            yield Block(page, line, language, title[1] if title else "", token.content, when, why)
            marks = []
        elif table is not None:
            table.append(token)
            if token.type == "table_close":
                rows = [Block(page, *row, when=when, why=why) for row in _rows(table)]
                assert rows or not marks, f"{page}: a mark stands before a table without commands: {marks}"
                yield from rows
                marks, table = [], None
        elif token.type != "html_inline":
            assert not marks, f"{page}: a mark stands before no block: {marks}"


def _rows(table: Sequence[Token]) -> Iterator[tuple[int, str, str, str]]:
    """The line, language, title and text of the block of each row of a table with commands."""
    line, cells, column, command = 0, list[list[str]](), 0, ""
    for token in table:
        if token.type == "tr_open":
            line, cells = (token.map or [0])[0] + 1, []
        elif token.type == "inline":
            cells.append([each.content for each in token.children or () if each.type == "code_inline"])
        elif token.type == "thead_close":
            heads = [(place, code) for place, codes in enumerate(cells) for code in codes]
            column, command = next((head for head in heads if head[1].startswith(PROMPT)), (0, ""))
        elif token.type == "tr_close" and command and cells[column]:
            output = [code for codes in cells[column + 1 :] for code in codes]
            yield line, "console", "", f"{command} {cells[column][0]}\n...{'...'.join(output)}...\n"


ALL_BLOCKS = [block for page in PAGES for block in blocks(page)]
SHELL_BLOCKS = [block for block in ALL_BLOCKS if block.language in ("sh", "console")]


def simple_commands(line: str) -> list[list[str]]:
    """The words of each command of a line of commands joined by && or |."""
    words = shlex.shlex(line, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    found: list[list[str]] = [[]]
    for word in words:
        if set(word) <= set("&|;"):
            found.append([])
        else:
            found[-1].append(word)
    return [command for command in found if command]


if __name__ == "__main__":
    counted = Counter((block.language, block.when) for block in ALL_BLOCKS)
    for (language, when), count in sorted(counted.items()):
        print(f"{language or 'no language'}, {when}: {count}")
    for block in ALL_BLOCKS:
        if block.when != "default":
            print(f"{block}: {block.when}: {block.why}")
