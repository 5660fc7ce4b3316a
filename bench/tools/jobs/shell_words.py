"""The words of a shell script: quotes, comments, continued lines and the expansions within words."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal


class ShellError(ValueError):
    """Text that is no shell script, or not one that is read: its line, and what is wrong."""

    def __init__(self, line: int, problem: str):
        super().__init__(problem)
        self.line = line


@dataclass(frozen=True)
class Part:
    """A part of a word.

    Attributes:
        text: as written; of an expansion without its ``$`` and brackets.
        kind: "parameter" is ``$NAME`` or ``${...}``, "arithmetic" ``$((...))``, "command" ``$(...)``.
        quoted: what it becomes is not split at spaces.
    """

    text: str
    kind: Literal["text", "parameter", "arithmetic", "command"]
    quoted: bool


@dataclass
class Word:
    """A word of a command, or an operator such as ``&&``, ``|`` or the end of a line (``;``).

    Attributes:
        array: the words in the brackets of ``NAME=(...)``.
    """

    line: int
    parts: list[Part] = field(default_factory=list)
    operator: str = ""
    array: list[Word] | None = None

    @property
    def plain(self) -> str:
        """The word, where nothing of it is quoted or expanded; else ""."""
        (part,) = self.parts if len(self.parts) == 1 else (None,)
        return part.text if part and part.kind == "text" and not part.quoted else ""

    def split_assignment(self) -> tuple[str, bool, Word] | None:
        """The name of an assignment, whether it appends, and the word that is assigned; None: it is none."""
        first = self.parts[0] if self.parts else None
        if first is None or first.quoted or first.kind != "text":
            return None
        match = re.match(r"([A-Za-z_]\w*)(\+?)=", first.text)
        if match is None:
            return None
        rest = Part(first.text[match.end() :], "text", False)
        return match[1], bool(match[2]), Word(self.line, [rest, *self.parts[1:]], array=self.array)


_OPERATORS = ("&&", "||", ";;", "&>", "|", "&", ";", "(", ")")
_NAME = re.compile(r"[A-Za-z_]\w*|[0-9@*#?$!-]")


def words(text: str) -> Iterator[Word]:
    """The words of a script, each line's end as the operator ``;``. ShellError where quotes or brackets do
    not close, or for a here-document."""
    yield from _Lexer(text).words()


def parts_of(text: str, line: int, quoted: bool) -> list[Part]:
    """The parts of a text that was within ``${...}``."""
    lexer = _Lexer(text, line)
    return lexer.in_quotes(None, quoted)


class _Lexer:
    """A place in a script."""

    def __init__(self, text: str, line: int = 1):
        self.text, self.at, self.line = text, 0, line

    def words(self, closing: str = "") -> Iterator[Word]:
        """The words up to the end, or to the bracket that closes an array."""
        while self.at < len(self.text):
            if self._blank():
                continue
            char = self.text[self.at]
            if char == "\n":
                if not closing:
                    yield Word(self.line, operator=";")
                self._take(1)
            elif closing and char == closing:
                self._take(1)
                return
            elif self.text.startswith("<<", self.at) and not self.text.startswith("<<<", self.at):
                raise ShellError(self.line, "a here-document (<<) is not read; write its lines as a script")
            elif operator := next((o for o in _OPERATORS if self.text.startswith(o, self.at)), ""):
                yield Word(self.line, operator=operator)
                self._take(len(operator))
            else:
                yield self._word()
        if closing:
            raise ShellError(self.line, "an array's ( is not closed")

    def _blank(self) -> bool:
        """Skip spaces, a continued line or a comment; whether there was one."""
        rest = re.compile(r"(?:[ \t\r]|\\\r?\n)+|#[^\n]*").match(self.text, self.at)
        if rest is None:
            return False
        self._take(len(rest[0]))
        return True

    def _take(self, count: int) -> str:
        taken = self.text[self.at : self.at + count]
        self.at += count
        self.line += taken.count("\n")
        return taken

    def _word(self) -> Word:
        word = Word(self.line)
        plain = ""
        while self.at < len(self.text):
            char = self.text[self.at]
            if char in " \t\r\n;|)" or (char == "&" and not plain.endswith((">", "<"))):
                break
            if self.text.startswith(("\\\n", "\\\r\n"), self.at):
                self._take(2 + (self.text[self.at + 1] == "\r"))
                continue
            if char == "(":
                if not re.fullmatch(r"[A-Za-z_]\w*\+?=", plain) or word.parts:
                    break
                self._take(1)
                word.array = list(self.words(")"))
                break
            if char in "'\"$`":
                if plain:
                    word.parts.append(Part(plain, "text", False))
                    plain = ""
                word.parts += self._quoted_or_expanded()
            else:
                plain += self._take(2)[1:] if char == "\\" else self._take(1)
        if plain:
            word.parts.append(Part(plain, "text", False))
        if not word.parts:
            self._take(1)  # a lone bracket, which the next word starts after
        return word

    def _quoted_or_expanded(self) -> list[Part]:
        char, line = self.text[self.at], self.line
        if char in "$`":
            return [self._expansion(False)]
        self._take(1)
        if char == '"':
            return self.in_quotes('"', True) or [Part("", "text", True)]
        end = self.text.find("'", self.at)
        if end < 0:
            raise ShellError(line, "a ' is not closed")
        text = self._take(end - self.at)
        self._take(1)
        return [Part(text, "text", True)]

    def in_quotes(self, closing: str | None, quoted: bool) -> list[Part]:
        """The parts up to the closing quote, or to the end."""
        parts, text, line = [], "", self.line
        while True:
            if self.at >= len(self.text):
                if closing is None:
                    break
                raise ShellError(line, f"a {closing} is not closed")
            char = self.text[self.at]
            if char == closing:
                self._take(1)
                break
            if char in "$`":
                parts.append(Part(text, "text", quoted))
                text = ""
                parts.append(self._expansion(quoted))
            elif char == "\\" and self.text[self.at + 1 : self.at + 2] in ('"', "\\", "$", "`", "\n"):
                text += self._take(2)[1:].replace("\n", "")
            elif closing is None and char in "'\"":
                self._take(1)
            else:
                text += self._take(1)
        return [part for part in [*parts, Part(text, "text", quoted)] if part.text]

    def _expansion(self, quoted: bool) -> Part:
        if self.text[self.at] == "`":
            line, end = self.line, self.text.find("`", self.at + 1)
            if end < 0:
                raise ShellError(line, "a ` is not closed")
            return Part(self._take(end + 1 - self.at)[1:-1], "command", quoted)
        self._take(1)
        if self.text.startswith("((", self.at):
            inner = self._bracketed("(", ")")
            if inner.startswith("(") and inner.endswith(")"):
                return Part(inner[1:-1], "arithmetic", quoted)
            return Part(inner, "command", quoted)
        if self.text.startswith("(", self.at):
            return Part(self._bracketed("(", ")"), "command", quoted)
        if self.text.startswith("{", self.at):
            return Part(self._bracketed("{", "}"), "parameter", quoted)
        name = _NAME.match(self.text, self.at)
        if name is None:
            return Part("$", "text", quoted)
        return Part(self._take(len(name[0])), "parameter", quoted)

    def _bracketed(self, opening: str, closing: str) -> str:
        """What is between the bracket here and the one that closes it."""
        depth, start, line = 0, self.at, self.line
        for at in range(start, len(self.text)):
            depth += (self.text[at] == opening) - (self.text[at] == closing)
            if depth == 0:
                return self._take(at + 1 - start)[1:-1]
        raise ShellError(line, f"a ${opening} is not closed")
