"""The syntax tree of a shell script by tree-sitter-bash, the values of its arithmetic and of its conditions,
and marks: characters that replace, in a word, a part whose value only a run of the script could tell.
"""

import operator
import re
from collections.abc import Callable, Iterator, Mapping, Sequence

import tree_sitter_bash
from tree_sitter import Language, Node, Parser

from spbench.bench.tools.jobs.argument_tables import table_content

_PARSER = Parser(Language(tree_sitter_bash.language()))
#: the first character of a mark, and the plane of its others: scripts have no such characters
_MARK, _PLANE = "\U00100000", 0xF0000
#: the words of a mark around the unknown value from which another value is computed
_WHERE, _NOT_KNOWN = ", where ", " is not known"
#: the character between the texts of a mark
_BETWEEN = "\0"
_MARKS = re.compile(f"{_MARK}([\U000f0000-\U000ffffd]*)")

_SYNTAX = table_content("shell_syntax")
_WORDS: Sequence[str] = _SYNTAX["words"]
#: kinds of nodes whose text the shell replaces
EXPANDED: set[str] = {*_SYNTAX["expanded"]}
#: a function that expands a word of a script
Word = Callable[[Node], str]
#: the most digits of a number
_MOST_DIGITS = 30
_ARITHMETIC: Mapping[str, Callable[[int, int], int]] = {
    sign: getattr(operator, name) for sign, name in _SYNTAX["arithmetic"].items()
}
#: operators that compare numbers in a condition, with the same operator of arithmetic
_COMPARED: Mapping[str, str] = _SYNTAX["compared"]


class ShellError(ValueError):
    """A text is no shell script, or a script that cannot be read; ``line``: the line of the fault."""

    def __init__(self, line: int, problem: str):
        super().__init__(problem)
        self.line = line


def mark(what: str, words: Sequence[str] = ()) -> str:
    """The mark that replaces the unknown value ``what``, or an array that may have the elements ``words``."""
    texts = (what, *map(shown_word, words))
    return _MARK + "".join(chr(_PLANE + min(ord(c), 0xFFFD)) for c in _BETWEEN.join(texts))


def mark_for(what: str, unknown: str) -> str:
    """The mark that replaces a value ``what`` that is computed from the value ``unknown``."""
    return mark(f"{what}{_WHERE}{unknown}{_NOT_KNOWN}")


def unknown_in(text: str) -> list[str]:
    """The source text, such as ``$DATA_PATH``, of each part of a word that a mark replaces."""
    return [texts[0] for texts in _marked(text)]


def words_in(text: str) -> list[str]:
    """The words that the arrays may have that marks replace in a text."""
    return [word for texts in _marked(text) for word in texts[1:]]


def _marked(text: str) -> list[list[str]]:
    return ["".join(chr(ord(c) - _PLANE) for c in what).split(_BETWEEN) for what in _MARKS.findall(text)]


def given_flag(unknown: str) -> str:
    """The option that sets the variable of an unknown value: ``--given TP=VALUE`` for ``$TP``, or for a
    value computed from ``$TP``; "set it there" for a value of no variable."""
    name = re.fullmatch(r"\$\{?(\w+|\d)[^}]*\}?", unknown.rpartition(_WHERE)[2].removesuffix(_NOT_KNOWN))
    return f"--given {name[1]}=VALUE" if name else "set it there"


def shown_word(text: str) -> str:
    """A word with the source text in place of its marks."""
    return _MARKS.sub(lambda match: unknown_in(match[0])[0], text)


def syntax_tree(text: str, above: int = 0) -> Node:
    """The root of a script's syntax tree. ShellError if the text is no script; its line counts from the
    ``above`` lines that the file has before the text."""
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
    """A node and all nodes below it, from left to right; with ``kinds``, only the topmost nodes of these
    kinds below it."""
    waiting = [node]
    while waiting:
        each = waiting.pop()
        chosen = kinds is not None and each.type in kinds and each != node
        if kinds is None or chosen:
            yield each
        waiting += [] if chosen else reversed(each.children)


def source_of(node: Node) -> str:
    """The source text of a node."""
    return (node.text or b"").decode(errors="replace")


def unescaped(text: bytes) -> str:
    """A text within double quotes, without the backslashes that escape a character there."""
    return re.sub(r'\\(["\\$`\n])', lambda match: match[1].strip("\n"), text.decode(errors="replace"))


class NotKnown(Exception):
    """Only a run could tell a value; the text of the exception names the value."""


def holds(node: Node, word: Word) -> bool:
    """Whether a condition of ``[ ]`` or ``[[ ]]`` holds. NotKnown if only a run could tell; ValueError if the
    condition is of a kind that is not evaluated."""
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
    """The value of arithmetic on whole numbers. ValueError for anything else, NotKnown if only a run could
    tell the value."""
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
    """The text of a word without a pattern. ValueError for another node, NotKnown if the text has a mark."""
    if node.type not in _WORDS or ("string" not in node.type and re.search(r"[*?[]", source_of(node))):
        raise ValueError("no plain word")
    text = word(node)
    if unknown := unknown_in(text):
        raise NotKnown(unknown[0])
    return text


def computed(node: Node, word: Word) -> str:
    """The value of ``$((...))`` as a text; a mark if the value is unknown."""
    inner = source_of(node).removeprefix("$((").removesuffix("))").strip()
    try:
        return str(number(node.named_children[0], word))
    except NotKnown as unknown:
        return mark_for(f"$(({inner}))", str(unknown))
    except (ValueError, ArithmeticError, IndexError):
        return mark(f"$(({inner}))")


def printed(node: Node, inner: str, expand: Callable[[Node], list[str]]) -> str:
    """The output of the command in ``$(INNER)``: the result of an `expr`; a mark for any other command."""
    whole = syntax_tree(f"_={source_of(node)}") if inner.startswith("(") else node
    if sums := [
        *below(whole, {"arithmetic_expansion"})
    ]:  # the parser takes it for a command in ${X:-$((1 * 2))}
        return computed(sums[0], lambda each: " ".join(expand(each)))
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
