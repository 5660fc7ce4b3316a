"""Lists of deeper models by those of shallow ones, on lists that are written by hand."""

from __future__ import annotations

from collections.abc import Callable
from zlib import crc32

import numpy as np
import pytest

from spbench.bench.measure.engines.listed import Listed, NotAlike
from spbench.bench.measure.engines.repeating_runs import DeepList, runs_of


class Written:
    """A list of entries by name, each with the entry that it refers to."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.references: list[int] = []

    def add(self, name: str, refers: int = -1) -> int:
        self.names.append(name)
        self.references.append(refers)
        return len(self.names) - 1

    def listed(self) -> Listed:
        names = np.array([crc32(name.encode()) for name in self.names])
        return Listed.of([names], np.array(self.references), (), np.ones(len(names), dtype=bool))


def step(layers: int) -> Written:
    """A step that keeps what forward made until backward; its first and last layers are not as the others."""
    log = Written()
    weights = [log.add("weight") for _ in range(layers)]
    batch = log.add("batch")
    kept, hidden = [], batch
    for layer in range(layers):
        if layer == 0:
            log.add("lookup", batch)
        if layer:
            log.add("free hidden", hidden)
        hidden = log.add("hidden")
        kept.append(log.add("kept", weights[layer]))
        log.add("look ahead", weights[min(layer + 1, layers - 1)])
    gradient, gradients = log.add("loss", hidden), []
    for layer in reversed(range(layers)):
        log.add("free kept", kept[layer])
        gradients.append(log.add("gradient", gradient))
        gradient = gradients[-1]
        if layer == layers - 1:
            log.add("of the head", batch)
    for layer, weight in enumerate(weights):
        log.add("update", gradients[-1 - layer])
        log.add("updated", weight)
    log.add("end", kept[0])
    log.add("end", kept[-1])
    return log


def alike_but_for_kept(freed: Callable[[int, int], int]) -> Callable[[int], Written]:
    """Lists of which backward frees in layer i of n what forward made in ``freed(i, n)``."""

    def step(layers: int) -> Written:
        log = Written()
        log.add("start")
        kept = [log.add("kept") for _ in range(layers)]
        log.add("loss")
        for layer in range(layers):
            log.add("free", kept[freed(layer, layers)])
        return log

    return step


def check(step: Callable[[int], Written], fewest: int = 3) -> None:
    deep = DeepList(step(fewest).listed(), step(fewest + 2).listed())
    for more in (0, 1, 2, 3, 20):
        theirs, (like, references, _) = step(fewest + more), deep.by(more)
        names = step(fewest + 2).names
        assert [names[each] for each in like] == theirs.names, more
        assert references.tolist() == theirs.references, more


def test_a_step_of_any_depth() -> None:
    check(step)
    check(step, 4)


@pytest.mark.parametrize(
    "freed",
    [
        lambda i, n: i,
        lambda i, n: n - 1 - i,
        lambda i, n: 0,
        lambda i, n: max(i - 1, 0),
        lambda i, n: min(n - i, n - 1),
    ],
    ids=["in order", "in reverse", "always the first", "the one before", "in reverse, but for the first"],
)
def test_what_blocks_refer_to(freed: Callable[[int, int], int]) -> None:
    check(alike_but_for_kept(freed))


def by(step: Callable[[int], Written], layers: int) -> list[int]:
    """What the entries of a list of that many layers refer to, by those of 3 and 5."""
    deep = DeepList(step(3).listed(), step(5).listed())
    references: list[int] = deep.by(layers - 3).references.tolist()
    return references


@pytest.mark.parametrize(
    ("freed", "why"),
    [
        (lambda i, n: 2 * i % n, "refer to blocks further away"),
        (lambda i, n: i if n == 3 else (i + 1) % n, "refer to other entries|not there"),
        (lambda i, n: 4 if n == 5 and i == 1 else i, "refer to"),
    ],
    ids=["each second", "another one with more layers", "one layer alone"],
)
def test_what_cannot_be_told(freed: Callable[[int, int], int], why: str) -> None:
    with pytest.raises(NotAlike, match=why):
        by(alike_but_for_kept(freed), 7)


def test_what_a_list_between_the_two_shows() -> None:
    """As seen from two lists, the last one may be one at a fixed place."""
    step = alike_but_for_kept(lambda i, n: n - 1)
    assert by(step, 5) == step(5).references
    with pytest.raises(NotAlike, match="not there"):
        by(step, 4)


def tokens(text: str) -> np.ndarray:
    return np.frombuffer(text.encode(), dtype=np.uint8)


@pytest.mark.parametrize(
    ("shallow", "deeper", "lengths_and_blocks"),
    [
        ("abcabcX", "abcabcabcabcX", [(3, 2)]),
        ("XaYbbZ", "XaaaYbbbbZ", [(1, 1), (1, 2)]),
        ("abX", "ababX", None),  # one more, not two
        ("abX", "abcdX", None),
        ("abababX", "abX", None),
        ("aX", "aY", None),
    ],
)
def test_runs(shallow: str, deeper: str, lengths_and_blocks: list[tuple[int, int]] | None) -> None:
    if lengths_and_blocks is None:
        with pytest.raises(NotAlike, match="two like blocks"):
            runs_of(tokens(shallow), tokens(deeper))
    else:
        runs = runs_of(tokens(shallow), tokens(deeper))
        assert [(run.length, run.blocks) for run in runs] == lengths_and_blocks
