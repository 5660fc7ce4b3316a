"""YAML as all commands read and write it: plain values of a bounded size.

Words are read by the core schema of YAML 1.2, so that ``060`` is 60 and not 48, and ``1:30``, ``on`` and
``2024-13-45`` are texts; from YAML 1.1, underscores in numbers (131_072) and merge keys (``<<``) are kept.
Tags are refused, because they construct other objects than the plain values that schemas describe.
"""

import re
import sys
from collections.abc import Callable
from itertools import chain
from typing import Any

import yaml
from yaml.composer import Composer
from yaml.parser import Parser
from yaml.reader import Reader
from yaml.resolver import BaseResolver
from yaml.scanner import Scanner

from spbench.bench.errors import shown

#: the limits of a text: characters, nodes (counted again for each alias) and levels; scenarios need far less
MOST_CHARACTERS, MOST_NODES, MOST_LEVELS = 2**20, 100_000, 64
#: a wrong text up to this length is read again by PyYAML's slow parser, which says where the error begins
_READ_TWICE = 50_000

_TAG = "tag:yaml.org,2002:"
_MERGE = f"{_TAG}merge"


class YAMLProblem(ValueError):
    """A problem in a text, at ``line`` and ``column`` (from 1; None if the whole text is meant)."""

    def __init__(self, message: str, mark: Any = None):
        super().__init__(message)
        self.message = message
        self.line = mark.line + 1 if mark else None
        self.column = mark.column + 1 if mark else None


class _Composer(Composer, BaseResolver):
    """Composes nodes within the limits, and refuses tags that are written in the text. This composer replaces
    libyaml's, which overflows the stack at deep nesting."""

    def __init__(self) -> None:
        Composer.__init__(self)
        BaseResolver.__init__(self)
        self._level = self._nodes = 0

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        event = self.peek_event()  # type: ignore[attr-defined]  # a method of the loader's parser
        if getattr(event, "tag", None) is not None:
            tag = event.tag.replace(_TAG, "!!")
            wrong = f"the tag {shown(tag)} is not read; leave it out, and write a text in quotes"
            raise YAMLProblem(wrong, event.start_mark)
        self._nodes += 1
        if self._nodes > MOST_NODES:
            raise YAMLProblem(f"there are more than {MOST_NODES} values", event.start_mark)
        self._level += 1
        if self._level > MOST_LEVELS:
            raise YAMLProblem(f"values are nested more than {MOST_LEVELS} deep", event.start_mark)
        node = super().compose_node(parent, index)
        self._level -= 1
        return node


_WORDS = (
    ("null", r"~|null|Null|NULL|", ["~", "n", "N", ""]),
    ("bool", r"true|True|TRUE|false|False|FALSE", [*"tTfF"]),
    ("int", r"[-+]?[0-9]+(_[0-9]+)*|0o[0-7]+|0x[0-9a-fA-F]+", [*"-+0123456789"]),
    (
        "float",
        r"[-+]?(\.[0-9]+|[0-9]+(_[0-9]+)*(\.[0-9]*)?)([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)",
        [*"-+.0123456789"],
    ),
    ("merge", r"<<", ["<"]),
)


def _with_words(resolving: Any) -> None:
    """Make a class resolve words by the core schema; the first kind whose pattern matches is taken."""
    for kind, pattern, first in _WORDS:
        resolving.add_implicit_resolver(_TAG + kind, re.compile(rf"(?:{pattern})\Z"), first)


_with_words(_Composer)


class _Loader(Reader, Scanner, Parser, _Composer):
    """PyYAML's own parser, which says where an error begins."""

    def __init__(self, text: str):
        Reader.__init__(self, text)
        Scanner.__init__(self)
        Parser.__init__(self)
        _Composer.__init__(self)


def _quick_loader() -> Callable[[str], Any]:
    """A loader with libyaml's parser, which takes a tenth of the time; else :class:`_Loader`."""
    if not yaml.__with_libyaml__:
        return _Loader
    from yaml.cyaml import CParser  # type: ignore[attr-defined]

    class QuickLoader(_Composer, CParser):
        def __init__(self, text: str):
            CParser.__init__(self, text)
            _Composer.__init__(self)

    return QuickLoader


_QuickLoader = _quick_loader()


def load(text: str) -> Any:
    """The value of a YAML text: dicts, lists, texts, numbers, True, False and None.

    Raises:
        YAMLProblem: the text is not YAML, has a tag or a key twice, or is larger than the limits.
    """
    if len(text) > MOST_CHARACTERS:
        raise YAMLProblem(f"there are {len(text)} characters, more than {MOST_CHARACTERS}")
    loaders = [_QuickLoader, _Loader] if len(text) <= _READ_TWICE else [_QuickLoader]
    for loader in loaders:
        try:
            node = loader(text).get_single_node()
            break
        except yaml.YAMLError as error:
            if loader is loaders[-1]:
                mark = getattr(error, "problem_mark", None)
                raise YAMLProblem(getattr(error, "problem", None) or str(error), mark) from error
    if node is None:
        return None
    _check_expanded(node, {})
    return _value(node)


def _check_expanded(node: yaml.Node, counted: dict[int, tuple[int, int]]) -> tuple[int, int]:
    """The numbers of nodes and levels of a node with its aliases expanded; YAMLProblem if these are too many.
    A node that an alias repeats begins before the alias, so it was counted earlier, or is being counted.

    Args:
        counted: nodes and levels by the ``id`` of a node; (0, 0) while the node is being counted.
    """
    if isinstance(node, yaml.ScalarNode):
        return 1, 1
    if (known := counted.get(id(node))) is not None:
        if known == (0, 0):
            raise YAMLProblem("an alias stands within what it stands for", node.start_mark)
        return known
    counted[id(node)] = 0, 0
    is_list = isinstance(node, yaml.SequenceNode)
    of_inner = [
        _check_expanded(each, counted)
        for each in (node.value if is_list else chain.from_iterable(node.value))
    ]
    nodes, levels = 1 + sum(n for n, _ in of_inner), 1 + max((deep for _, deep in of_inner), default=0)
    if nodes > MOST_NODES or levels > MOST_LEVELS:
        most = f"more than {MOST_NODES} values" if nodes > MOST_NODES else f"more than {MOST_LEVELS} levels"
        raise YAMLProblem(f"there are {most}, as aliases repeat them", node.start_mark)
    counted[id(node)] = nodes, levels
    return nodes, levels


def _value(node: yaml.Node) -> Any:
    """The plain value of a node."""
    if isinstance(node, yaml.SequenceNode):
        return [_value(each) for each in node.value]
    if isinstance(node, yaml.MappingNode):
        return _mapping(node)
    try:
        return _OF_KIND[node.tag.removeprefix(_TAG)](node.value)
    except ValueError as error:  # a number of more digits than Python reads, or half a surrogate pair
        raise YAMLProblem(f"{shown(node.value)} cannot be read: {error}", node.start_mark) from error


def _mapping(node: yaml.MappingNode) -> dict[Any, Any]:
    """The entries of a mapping; entries that it merges (``<<``) come before its own."""
    merged: dict[Any, Any] = {}
    own: dict[Any, Any] = {}
    for key_node, value_node in node.value:
        if key_node.tag == _MERGE:
            merged |= _merged(value_node)
            continue
        if not isinstance(key_node, yaml.ScalarNode):
            raise YAMLProblem("a key must be a word", key_node.start_mark)
        key = _value(key_node)
        if key in own:
            raise YAMLProblem(f"the key {shown(key)} is given twice", key_node.start_mark)
        own[key] = _value(value_node)
    return merged | own


def _merged(node: yaml.Node) -> dict[Any, Any]:
    """The entries that ``<<`` merges, of one mapping or of several; the first mapping wins."""
    keys: dict[Any, Any] = {}
    for each in node.value if isinstance(node, yaml.SequenceNode) else [node]:
        if not isinstance(each, yaml.MappingNode):
            raise YAMLProblem("<< merges a mapping or a list of mappings", each.start_mark)
        keys = _mapping(each) | keys
    return keys


def _text(text: str) -> str:
    """The text; ValueError if it contains half a surrogate pair (by an escape), which no file can hold."""
    if not text.isascii():
        text.encode()
    return text


def _whole(text: str) -> int:
    digits = text.replace("_", "")
    return int(digits, 0) if digits.startswith(("0o", "0x")) else int(digits)


_OF_KIND: dict[str, Callable[[str], Any]] = {
    "null": lambda text: None,
    "bool": lambda text: text.lower() == "true",
    "int": _whole,
    "float": lambda text: float(re.sub(r"\.(?=inf|nan)", "", text.replace("_", "").lower())),
    "str": _text,
    "merge": _text,
}


class Dumper(yaml.SafeDumper):
    """Writes texts in quotes if :func:`load` would otherwise read another value."""

    yaml_implicit_resolvers: dict[Any, Any] = {
        first: list(kinds) for first, kinds in yaml.SafeDumper.yaml_implicit_resolvers.items()
    }


_with_words(Dumper)


def dump(content: Any, *, flow: bool = False, width: int = 80, dumper: type[Dumper] = Dumper) -> str:
    """The YAML text of ``content``, which :func:`load` reads back; keys keep their order.

    Args:
        flow: write braces and brackets instead of blocks.
        width: the characters of a line; longer lines are broken at spaces.
    """
    text: str = yaml.dump(
        content, Dumper=dumper, default_flow_style=flow, width=width, sort_keys=False, allow_unicode=True
    )
    return text


class _OneLine(Dumper):
    """Writes a text with line breaks or control characters in double quotes, with the signs escaped."""

    def represent_text(self, text: str) -> yaml.Node:
        style = None if text.isprintable() else '"'
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_OneLine.add_representer(str, _OneLine.represent_text)
_LONGEST_COMMENT = 200


def scalar(value: Any) -> str:
    """A value in one line of YAML, whatever signs its texts have; :func:`load` reads back an equal value."""
    text = dump(value, flow=True, width=sys.maxsize, dumper=_OneLine)
    return text.removesuffix("\n").removesuffix("\n...")


def comment(text: str) -> str:
    """A text as a comment of one line; signs that cannot be printed are escaped, and a long text is cut."""
    cut = text if len(text) <= _LONGEST_COMMENT else f"{text[: _LONGEST_COMMENT - 3]}..."
    return "# " + "".join(
        each if each.isprintable() else each.encode("unicode_escape").decode() for each in cut
    )
