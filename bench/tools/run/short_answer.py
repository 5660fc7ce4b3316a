"""The beginning of a long answer, for agents, whose context it would fill: lists, tables of texts and texts
are cut until the whole has few characters, and what is left out is named by a JSON pointer (RFC 6901) with
which it can be asked for."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from spbench.bench.errors import UserError, shown, suggestion

#: characters of an answer, what it says of its own cuts included
MOST = 6000
#: the arguments of a call that asks for more of an answer, by name, as their JSON schemas
FURTHER: dict[str, dict[str, Any]] = {
    "part": {"type": "string", "description": "Of a long answer: a JSON pointer to a part, as /0/layouts."},
    "start": {"type": "integer", "minimum": 0, "description": "Of that part: the first entry to show."},
}
#: entries of lists and tables, and characters of texts: the first pair with which all has room is taken
_CUTS = ((1000, 4000), (100, 1000), (50, 500), (20, 400), (10, 300), (5, 300), (3, 200), (2, 120), (1, 80))
#: cuts that are named, reasons that are counted, and characters of each
_MOST_NAMED, _MOST_REASONS, _REASON = 12, 6, 120


def part_of(content: Any, pointer: str, start: int) -> Any:
    """A part of an answer, from its entry ``start`` on.

    Raises:
        UserError: there is no such part.
    """
    for escaped in str(pointer).split("/")[1:]:
        name, entries = escaped.replace("~1", "/").replace("~0", "~"), _entries(content)
        if name not in entries:
            raise UserError(f"the answer has no part {shown(pointer)}{suggestion(name, entries)}")
        content = entries[name]
    if not isinstance(start, int) or start < 0:
        raise UserError(f"start must be a whole number of at least 0, not {shown(start)}")
    if isinstance(content, dict):
        return dict([*content.items()][start:])
    return content[start:] if isinstance(content, (list, str)) else content


def short_answer(content: Any, pointer: str = "", start: int = 0) -> str:
    """The JSON of an answer, or of a part of it, and below it what is left out, in :data:`MOST` characters;
    fractions have six digits."""
    for entries, characters in _CUTS:
        cuts: list[str] = []
        shown_part = _cut(content, pointer, start, entries, characters, cuts)
        text = json.dumps(shown_part, ensure_ascii=False, separators=(",", ":"))
        if cuts:
            text += "\nLeft out; ask again with these arguments and part (and start):\n"
            text += "\n".join(cuts[:_MOST_NAMED])
            text += f"\nand of {len(cuts) - _MOST_NAMED} further parts" * (len(cuts) > _MOST_NAMED)
        if len(text) <= MOST:
            return text
    parts = [f"{pointer}/{_escaped(name)}" for name in _entries(content)]
    return f"The answer has no room; ask for a part of it: {' '.join(parts)}"[:MOST]


def _cut(content: Any, at: str, start: int, entries: int, characters: int, cuts: list[str]) -> Any:
    """A value with at most so many entries and characters; ``cuts`` gets a line for each cut."""
    if isinstance(content, float):
        return float(f"{content:.6g}")
    if isinstance(content, str) and (left := len(content) - characters) > 0:
        cuts.append(f"{at}: {left} characters from {start + characters} on")
        return content[:characters]
    if not isinstance(content, (dict, list)):
        return content
    inner = _entries(content, start)
    is_list = isinstance(content, list) or (len(inner) > 1 and {*map(type, inner.values())} == {str})
    if is_list and (left := len(inner) - entries) > 0:
        cuts.append(f"{at}: {left} entries from {start + entries} on{_reasons(content) * (not start)}")
        inner = dict([*inner.items()][:entries])
    cut = {n: _cut(each, f"{at}/{_escaped(n)}", 0, entries, characters, cuts) for n, each in inner.items()}
    return cut if isinstance(content, dict) else [*cut.values()]


def _reasons(table: Any) -> str:
    """How often a table has each of its texts, where many entries share one: "" else."""
    counts = Counter(table.values()) if isinstance(table, dict) else Counter[str]()
    if not counts or len(counts) > len(table) / 2:
        return ""
    counted = [f"{n} x {text[:_REASON]}" for text, n in counts.most_common(_MOST_REASONS)]
    more = len(counts) - len(counted)
    return f"; in all {'; '.join(counted)}{f'; {more} other texts' if more > 0 else ''}"


def _entries(content: Any, start: int = 0) -> dict[str, Any]:
    """The entries of a table, or of a list from a place on, by their names in a pointer."""
    if isinstance(content, list):
        return {str(i): each for i, each in enumerate(content, start)}
    return content if isinstance(content, dict) else {}


def _escaped(name: Any) -> str:
    return str(name).replace("~", "~0").replace("/", "~1")
