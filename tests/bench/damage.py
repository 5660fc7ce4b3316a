"""Files that are whole, and damages of texts, bytes and values, as files suffer them."""

import copy
import json
import random
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import yaml

from tests.grid import data
from tests.measure.scenarios.test_heeded import TINY
from tests.tools.changes.rows import made_up

#: what may stand where something else belongs, as JSON
WRONG = data(__file__)["WRONG"]
#: those of them that are no number of a metric
NO_NUMBERS = ("NaN", "Infinity", "-Infinity", "1e999", "-1", "true", '"5"', "[]", "{}", '"=1+1"')

NASTY: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 7, 2**31, 2**63, -(2**63), 10**15, 10**40),
    *(0.0, -0.5, 0.5, 1e308, 1e-308, float("nan"), float("inf"), -float("inf")),
    *("", "two", "128K", "1M", "-1K", "9999999999999G", "NaN", "../..", "a/b.json", "\x00", "ä\n", "=1+1"),
    *([], {}, [[]], [0], ["sp", "dp"], [1, "x"], {"": 1}, {"a": {"b": []}}, [None], [float("nan")]),
]

_WHOLE = data(__file__)
SCENARIO: dict[str, Any] = _WHOLE["scenario"]
CLUSTER: dict[str, Any] = _WHOLE["cluster"]
CONFIG: dict[str, Any] = {**TINY, "rope_theta": 10000.0}
TEXTS: dict[str, str] = {
    "s.yaml": yaml.safe_dump(SCENARIO, sort_keys=False),
    "mine.yaml": yaml.safe_dump(CLUSTER, sort_keys=False),
    "config.json": json.dumps(CONFIG, indent=1),
    "t.csv": "ranks,memory,status\n1,2,ok\n4,,oom\n",
    "c.csv": "claim,published\nc,3.5\n",
}
DUMPS: Mapping[str, tuple[Any, Callable[[Any], str]]] = {
    "s.yaml": (SCENARIO, lambda content: yaml.safe_dump(content, sort_keys=False, allow_unicode=True)),
    "mine.yaml": (CLUSTER, lambda content: yaml.safe_dump(content, sort_keys=False, allow_unicode=True)),
    "config.json": (CONFIG, json.dumps),
}
ROWS = [
    made_up("a"),
    made_up("b", engine="distributed"),
    made_up("c", answer=4096) | {"cell": made_up("")["cell"] | {"search": {"quantity": "seq_len"}}},
    made_up("d", "failed"),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths to all values within one of JSON."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, each in inner:
        yield (*path, key)
        yield from places(each, (*path, key))


def replaced(line: str, path: tuple[Any, ...], text: str | None) -> str:
    """A line of JSON with another text in the place of one value, or without it (None)."""
    content = json.loads(line)
    holder = content
    for key in path[:-1]:
        holder = holder[key]
    if text is None:
        del holder[path[-1]]
        return json.dumps(content)
    holder[path[-1]] = "@"
    return json.dumps(content).replace('"@"', text)


def damaged(text: str, chance: random.Random) -> bytes:
    """A text after one to three damages: of values, where it is lines of JSON, of lines, and of bytes."""
    for _ in range(chance.randint(1, 3)):
        lines = text.splitlines(keepends=True) or [""]
        at = chance.randrange(len(lines))
        kind = chance.randrange(4)
        if kind == 0 and lines[at].startswith("{"):
            try:
                path = chance.choice(list(places(json.loads(lines[at]))))
            except (ValueError, IndexError):
                continue
            lines[at] = replaced(lines[at], path, chance.choice([None, *WRONG])) + "\n"
        elif kind == 1:
            lines[at : at + 1] = chance.choice([[], [lines[at]] * 2, [lines[at][: chance.randrange(99)]]])
        elif kind == 2:
            words = lines[at].replace(",", " , ").replace(":", " : ").split(" ")
            words[chance.randrange(len(words))] = chance.choice(WRONG)
            lines[at] = " ".join(words)
        else:
            place = chance.randrange(len(lines[at]) + 1)
            lines[at] = (
                lines[at][:place] + chr(chance.choice([0, 10, 34, 39, 44, 61, 123, 233])) + lines[at][place:]
            )
        text = "".join(lines)
    content = text.encode()
    if chance.random() < 0.2:
        place = chance.randrange(len(content) + 1)
        content = content[:place] + bytes([chance.randrange(256)]) + content[place + chance.randrange(3) :]
    return content


def mutated(content: bytes, chance: random.Random) -> bytes:
    """A content after one to three damages of its lines, words or bytes."""
    try:
        return damaged(content.decode(), chance)
    except UnicodeDecodeError:
        place = chance.randrange(len(content) + 1)
        return content[:place] + bytes([chance.randrange(256)]) + content[place + chance.randrange(4) :]


def with_wrong_values(content: Any, chance: random.Random) -> Any:
    """A content in which one or two values are replaced, keys renamed, or entries left out."""
    content = copy.deepcopy(content)
    for _ in range(chance.randint(1, 2)):
        *above, last = chance.choice([*places(content)])
        at = content
        for key in above:
            at = at[key]
        value, how = chance.choice(NASTY), chance.choice(["value"] * 6 + ["key", "gone"])
        if how == "value" or isinstance(at, list):
            at[last] = copy.deepcopy(value)
        else:
            moved = at.pop(last)
            if how == "key" and isinstance(value, str):
                at[value] = moved
    return content
