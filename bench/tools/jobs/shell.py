"""What the commands of a shell script are, running none: variables, arrays and arithmetic are expanded.

What only a run could tell (what ``$(...)`` prints, variables that are set elsewhere, branches) is a mark in
the words that have it; :func:`unknown_in` says what it stands for.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from spbench.bench.tools.jobs.shell_words import Part, ShellError, Word, parts_of, words

_MARK = re.compile("\ue000([^\ue001]*)\ue001")
_SPACE, _NO_BREAK = re.compile(r"\s+"), "\ue002"
_OPENING = {"if", "while", "until", "for", "case", "select", "{"}
_CLOSING = {"fi", "done", "esac", "}"}
_BETWEEN = {"then", "else", "elif", "do", "!", "time"}
_DECLARING = {"export", "declare", "local", "readonly", "typeset"}
_MOST_DIGITS = 30
#: how often variables may stand in each other's values, and characters that a word may become
_MOST_DEPTH = 50
_MOST_CHARACTERS = 10**6
_ARITHMETIC: dict[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.floordiv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def mark(what: str) -> str:
    """The mark of what is not known, in a word, which is not split in it."""
    return f"\ue000{_SPACE.sub(_NO_BREAK, what)}\ue001"


def unknown_in(text: str) -> list[str]:
    """What of a word only a run could tell, as it stands in the script: ``$DATA_PATH``."""
    return [what.replace(_NO_BREAK, " ") for what in _MARK.findall(text)]


def shown(text: str) -> str:
    """A word as the script has it, without marks."""
    return _MARK.sub(lambda match: match[1].replace(_NO_BREAK, " "), text)


@dataclass(frozen=True)
class Command:
    """A command of a script.

    Attributes:
        words: its words, expanded.
        environment: the variables that are exported when it runs.
        branch: it is part of a condition, a loop or a function.
    """

    line: int
    words: list[str]
    environment: Mapping[str, str]
    branch: bool


@dataclass
class Shell:
    """The state of a shell while a script is read.

    Attributes:
        variables: text, or the elements of an array.
        commands: those that were met, in order.
    """

    variables: dict[str, str | list[str]]
    exported: set[str] = field(default_factory=set)
    commands: list[Command] = field(default_factory=list)

    def read(self, text: str) -> None:
        """Read a script. ShellError where it cannot be read."""
        depth, chained, command = 0, False, list[Word]()
        for word in [*words(text), Word(0, operator=";")]:
            if not word.operator:
                command.append(word)
                continue
            if command:
                depth = self._command(command, depth, chained)
            chained = word.operator in ("&&", "||") or (chained and word.operator == "|")
            depth += (word.operator == "(") - (word.operator == ")" and depth > 0)
            command = []

    def _command(self, command: list[Word], depth: int, chained: bool) -> int:
        """Note a command, or do its assignments. Returns how many branches it leaves open."""
        while command and (plain := command[0].plain) in _OPENING | _CLOSING | _BETWEEN | {"function"}:
            depth = max(0, depth + (plain in _OPENING) - (plain in _CLOSING))
            if plain in ("for", "case", "select", "function"):
                if plain == "for" and len(command) > 1:
                    self.variables[command[1].plain] = mark(f"${command[1].plain}, of a loop")
                return depth
            command = command[1:]
        branch = depth > 0 or chained
        own: dict[str, str] = {}
        declares = bool(command) and command[0].plain in _DECLARING
        exports = declares and command[0].plain == "export"
        rest = [w for w in command[1:] if not w.plain.startswith("-")] if declares else command
        while rest and (assignment := rest[0].split_assignment()):
            name, appends, value = assignment
            own[name] = self._assigned(name, appends, value, branch)
            rest = rest[1:]
        if declares:
            self.exported |= {w.plain for w in rest if exports} | (own.keys() if exports else set())
        elif rest:
            for name in own:
                self.variables.pop(name, None)
            expanded = [text for word in rest for text in self.expand(word)]
            environment = {n: v for n in sorted(self.exported) if isinstance(v := self.variables.get(n), str)}
            self.commands.append(Command(rest[0].line, expanded, {**environment, **own}, branch))
        return depth

    def _assigned(self, name: str, appends: bool, word: Word, branch: bool) -> str:
        """Assign to a variable; returns its value as one text."""
        before = self.variables.get(name, [] if word.array is not None else "")
        value: str | list[str]
        if word.array is not None:
            value = [t for each in word.array if not each.operator for t in self.expand(each)]
            if branch:
                value = [mark(f"${name}, which line {word.line} sets under a condition")]
            if appends:
                value = [*([before] if isinstance(before, str) else before), *value]
        else:
            value = " ".join(self.expand(Word(word.line, [Part(p.text, p.kind, True) for p in word.parts])))
            if branch:
                value = mark(f"${name}, which line {word.line} sets under a condition")
            if appends:
                value = [*before, value] if isinstance(before, list) else before + value
        self.variables[name] = value
        return value if isinstance(value, str) else " ".join(value)

    def expand_text(self, text: str) -> str:
        """What a text becomes in which only variables are expanded."""
        return " ".join(self.expand(Word(1, parts_of(text, 1, True))))

    def expand(self, word: Word, depth: int = 0) -> list[str]:
        """What a word becomes: several words, or none."""
        fields: list[str] = []
        current: str | None = None
        for part in word.parts:
            values = self._values(part, word.line, depth)
            if part.quoted or part.kind == "text":
                pieces = values
            else:  # split at spaces, of which one at an end parts it from its neighbours
                joined = " ".join(values)
                pieces = joined.split()
                if current is not None and joined[:1].isspace():
                    fields.append(current)
                    current = None
            if not pieces:
                continue
            current = (current or "") + pieces[0]
            for piece in pieces[1:]:
                fields.append(current)
                current = piece
            if sum(map(len, pieces)) > _MOST_CHARACTERS:
                raise ShellError(word.line, f"a word becomes longer than {_MOST_CHARACTERS} characters")
        return fields if current is None else [*fields, current]

    def _values(self, part: Part, line: int, depth: int) -> list[str]:
        """What a part becomes: one text, or the elements of an array."""
        if depth > _MOST_DEPTH:
            raise ShellError(line, "variables stand in each other's values without end")
        if part.kind == "text":
            return [part.text]
        if part.kind == "command":
            return [mark(f"$({part.text.strip()})")]
        if part.kind == "arithmetic":
            return [self._arithmetic(part.text, line, depth)]
        if part.text in ("@", "*"):
            return []  # the script is read as one without arguments
        match = re.fullmatch(r"(\w+)(\[[@*]\])?(?:(:?[-=+?])(.*))?", part.text, re.DOTALL)
        if match is None:
            return [mark(f"${{{part.text}}}")]
        name, index, how, otherwise = match.groups()
        value = self.variables.get(name)
        elements = value if isinstance(value, list) else None if value is None else [value]
        there = elements is not None and (elements != [""] or not (how or "").startswith(":"))
        if how and how[-1] == "+":
            return self._inner(otherwise, line, part.quoted, depth) if there else []
        if how and how[-1] in "-=" and not there:
            return self._inner(otherwise, line, part.quoted, depth)
        if elements is None:
            return [mark(f"${name}")]
        return elements if index or not isinstance(value, list) else elements[:1]

    def _inner(self, text: str, line: int, quoted: bool, depth: int) -> list[str]:
        return self.expand(Word(line, parts_of(text, line, quoted)), depth + 1)

    def _arithmetic(self, text: str, line: int, depth: int) -> str:
        names = re.sub(r"(?<![\w$}])\$?\b([A-Za-z_]\w*)\b(?!\})", r"${\1}", text)
        expanded = " ".join(self.expand(Word(line, parts_of(names, line, True)), depth + 1))
        if unknown := unknown_in(expanded):
            return mark(f"$(({text.strip()})), where {unknown[0]} is not known")
        try:
            return str(_computed(ast.parse(expanded.strip(), mode="eval").body))
        except (SyntaxError, ValueError, ZeroDivisionError, RecursionError, MemoryError):
            return mark(f"$(({text.strip()}))")


def _computed(node: ast.expr) -> int:
    """A whole number that +, -, *, / and % make; ValueError for anything else."""
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) < 10**_MOST_DIGITS:
        return node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _ARITHMETIC:
        value = _ARITHMETIC[type(node.op)](_computed(node.left), _computed(node.right))
        if abs(value) < 10**_MOST_DIGITS:
            return value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        return -_computed(node.operand)
    raise ValueError("no arithmetic of whole numbers")
