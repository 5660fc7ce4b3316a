"""The code blocks of the Markdown pages, and the marks before them that say when they are run.

``<!-- slow: HOW LONG -->`` before a block: it is run by ``pytest -m slow``. ``<!-- not run: WHY -->``: it is
checked and not run. Further comments may stand between. A page's blocks are listed by

    python -m tests.docs.blocks
"""

from __future__ import annotations

import re
import shlex
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from markdown_it import MarkdownIt

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
    """The fenced blocks of a page in order, those in lists too."""
    marks: list[tuple[When, str]] = []
    for token in MarkdownIt("commonmark").parse(page.read_text()):
        if token.type == "html_block":
            marks += _MARK.findall(token.content)
        elif token.type == "fence":
            language, _, rest = token.info.partition(" ")
            title = _TITLE.search(rest)
            when, why = marks[-1] if marks else ("default", "")
            line = (token.map or [0])[0] + 1
            yield Block(page, line, language, title[1] if title else "", token.content, when, why)
            marks = []
        elif token.type != "html_inline":
            assert not marks, f"{page}: a mark stands before no block: {marks}"


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
