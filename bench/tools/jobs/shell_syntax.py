"""The syntax tree of a shell script, by tree-sitter-bash; marks for what only a run could tell, and the value
of arithmetic and conditions where it is known.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

_PARSER = Parser(Language(tree_sitter_bash.language()))
#: what begins a mark, and where its characters are: no script has these, and no word is split at them
_MARK, _PLANE = "\U00100000", 0xF0000
#: around what is not known in what is computed from it
_WHERE, _NOT_KNOWN = ", where ", " is not known"
#: parts the texts of a mark
_BETWEEN = "\0"
_MARKS = re.compile(f"{_MARK}([\U000f0000-\U000ffffd]*)")

#: nodes within a text that are not as they are written
EXPANDED = {
    *(
        "simple_expansion",
        "expansion",
        "arithmetic_expansion",
        "command_substitution",
        "process_substitution",
    ),
    *("string", "raw_string", "ansi_c_string", "translated_string"),
}
#: expands a word of a script
Word = Callable[[Node], str]
#: digits of a number
_MOST_DIGITS = 30
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    "+": operator.add,
    "-": operator.sub,
    "*": operator.mul,
    "/": operator.floordiv,
    "%": operator.mod,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    "<=": operator.le,
    ">": operator.gt,
    ">=": operator.ge,
}
#: operators that compare numbers in a condition, and the same in arithmetic
_COMPARED = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
#: nodes that are a word
_WORDS = {*EXPANDED, "word", "number", "concatenation", "extglob_pattern", "variable_name"} - {
    "ansi_c_string",
    "translated_string",
}


class ShellError(ValueError):
    """Text that is no shell script, or not one that is read: its line, and what is wrong."""

    def __init__(self, line: int, problem: str):
        super().__init__(problem)
        self.line = line


def mark(what: str, words: Sequence[str] = ()) -> str:
    """A mark that stands in a word for something unknown; for an array, ``words`` are what it may be."""
    texts = (what, *map(shown_word, words))
    return _MARK + "".join(chr(_PLANE + min(ord(c), 0xFFFD)) for c in _BETWEEN.join(texts))


def mark_for(what: str, unknown: str) -> str:
    """The mark for a value that is computed from an unknown one."""
    return mark(f"{what}{_WHERE}{unknown}{_NOT_KNOWN}")


def unknown_in(text: str) -> list[str]:
    """The parts of a word that only a run could tell, as they stand in the script, such as ``$DATA_PATH``."""
    return [texts[0] for texts in _marked(text)]


def words_in(text: str) -> list[str]:
    """The words for which the mark of an array may stand."""
    return [word for texts in _marked(text) for word in texts[1:]]


def _marked(text: str) -> list[list[str]]:
    return ["".join(chr(ord(c) - _PLANE) for c in what).split(_BETWEEN) for what in _MARKS.findall(text)]


def given_flag(unknown: str) -> str:
    """How the command line gives what the script leaves to its run: ``--given TP=N`` for ``$TP``, or for what
    is computed from that."""
    name = re.fullmatch(r"\$\{?(\w+|\d)[^}]*\}?", unknown.rpartition(_WHERE)[2].removesuffix(_NOT_KNOWN))
    return f"--given {name[1]}=VALUE" if name else "set it there"


def shown_word(text: str) -> str:
    """A word as the script has it, without marks."""
    return _MARKS.sub(lambda match: unknown_in(match[0])[0], text)


def syntax_tree(text: str, above: int = 0) -> Node:
    """The tree of a script that has lines above it. ShellError if the text is no script."""
    text = re.sub(r"\\\s*\Z", "", text.replace("\r\n", "\n"))  # a line that goes on where no line follows
    root = _PARSER.parse(text.encode()).root_node
    for node in below(root) if root.has_error else ():
        if node.is_missing:
            raise ShellError(above + node.start_point[0] + 1, f"a {node.type} is missing")
        if node.is_error:
            words = " ".join(source_of(node).split())
            raise ShellError(above + node.start_point[0] + 1, f"no shell script from here on: {words[:40]!r}")
    return root


def below(node: Node, kinds: set[str] | None = None) -> Iterator[Node]:
    """A node and those below it, from left to right; of some kinds those alone, and none below them."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        chosen = kinds is not None and each.type in kinds and each != node
        if kinds is None or chosen:
            yield each
        waiting += [] if chosen else reversed(each.children)


def source_of(node: Node) -> str:
    """The text of a node."""
    return (node.text or b"").decode(errors="replace")


def unescaped(text: bytes) -> str:
    """Text within double quotes, without the backslashes that have a meaning there."""
    return re.sub(r'\\(["\\$`\n])', lambda match: match[1].strip("\n"), text.decode(errors="replace"))


class NotKnown(Exception):
    """Only a run could tell a value; the text names it."""


def holds(node: Node, word: Word) -> bool:
    """Whether a condition of ``[ ]`` or ``[[ ]]`` holds. ValueError or NotKnown: that is not known."""
    children = node.children
    match node.type, [source_of(child) for child in children]:
        case "parenthesized_expression", _:
            return holds(node.named_children[0], word)
        case "unary_expression", ["!", _]:
            return not holds(children[1], word)
        case "unary_expression", ["-z" | "-n" as sign, _]:
            return (_certain(children[1], word) == "") == (sign == "-z")
        case "binary_expression", [_, "&&", _]:
            return holds(children[0], word) and holds(children[2], word)
        case "binary_expression", [_, "||", _]:
            return holds(children[0], word) or holds(children[2], word)
        case "binary_expression", [_, "=" | "==" | "!=" as sign, _]:
            return (_certain(children[0], word) == _certain(children[2], word)) == (sign != "!=")
        case "binary_expression", [_, sign, _] if sign in _COMPARED:
            compared = _ARITHMETIC[_COMPARED[sign]]
            return bool(compared(number(children[0], word), number(children[2], word)))
    raise ValueError("another condition")


def number(node: Node, word: Word) -> int:
    """The value of arithmetic on whole numbers. ValueError for anything else, NotKnown where only a run
    could tell."""
    children = node.children
    match node.type, [source_of(child) for child in children]:
        case "parenthesized_expression", _:
            return number(node.named_children[0], word)
        case "unary_expression", ["-", _]:
            return -number(children[1], word)
        case "binary_expression", [_, sign, _] if sign in _ARITHMETIC:
            value = int(_ARITHMETIC[sign](number(children[0], word), number(children[2], word)))
        case _:
            value = int(_certain(node, word) or "0")
    if abs(value) >= 10**_MOST_DIGITS:
        raise ValueError("too many digits")
    return value


def _certain(node: Node, word: Word) -> str:
    """A word without a pattern. ValueError for anything else, NotKnown where only a run could tell."""
    if node.type not in _WORDS or ("string" not in node.type and re.search(r"[*?[]", source_of(node))):
        raise ValueError("no plain word")
    return _known(word(node))


def _known(text: str) -> str:
    if unknown := unknown_in(text):
        raise NotKnown(unknown[0])
    return text


def computed(node: Node, word: Word) -> str:
    """What ``$((...))`` is; a mark where that is not known."""
    inner = source_of(node).removeprefix("$((").removesuffix("))").strip()
    try:
        return str(number(node.named_children[0], word))
    except NotKnown as unknown:
        return mark_for(f"$(({inner}))", str(unknown))
    except (ValueError, ArithmeticError, IndexError):
        return mark(f"$(({inner}))")


def printed(node: Node, inner: str, expand: Callable[[Node], list[str]]) -> str:
    """The output of the command in ``$(INNER)``: the result of an `expr`; a mark for any other command."""
    commands = node.named_children
    if len(commands) != 1 or commands[0].type != "command":
        return mark(f"$({inner})")
    name, *words = [text for each in commands[0].named_children for text in expand(each)] or [""]
    if name == "expr" and (unknown := [what for each in words for what in unknown_in(each)]):
        return mark_for(f"$({inner})", unknown[0])
    if name != "expr" or not all(re.fullmatch(r"-?[0-9]+|[-+*/%()]", each) for each in words):
        return mark(f"$({inner})")
    echo = syntax_tree(f"echo $(({' '.join(words)}))").named_children[0]
    return computed(echo.named_children[1], source_of)
