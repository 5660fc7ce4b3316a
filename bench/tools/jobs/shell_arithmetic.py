"""Arithmetic and conditions of a shell script, where their value is known."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping

from tree_sitter import Node

from spbench.bench.tools.jobs.shell_syntax import EXPANDED, source_of, unknown_in

#: what a word of a script becomes
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
#: of numbers in a condition, as in arithmetic
_COMPARED = {"-eq": "==", "-ne": "!=", "-lt": "<", "-le": "<=", "-gt": ">", "-ge": ">="}
#: nodes that are a word
_WORDS = {*EXPANDED, "word", "number", "concatenation", "extglob_pattern", "variable_name"} - {
    "ansi_c_string",
    "translated_string",
}


class NotKnown(Exception):
    """Only a run could tell a value: what of it."""


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
