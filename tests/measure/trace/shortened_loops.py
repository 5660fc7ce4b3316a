"""Traces whose loops are shortened, beside whole ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.traces import Trace
from spbench.impls import rings
from spbench.impls.keyed_steps import Key, keyed_steps
from spbench.impls.models.blocks import tiles
from spbench.impls.models.model import model_preset
from spbench.impls.strategies import all_gather_kv, fpdt, upipe
from spbench.impls.strategies.nesting import nesting
from tests.measure.trace.same_traces import differences

N = 16
#: options with which tiny models can be spread over N ranks, where they have them
WIDER = {"heads": N, "hidden": 6 * N, "temporal": N}
#: positions: two chunks a rank, and two places a frame
SEQ_LEN = 4 * N


def cell(strategy: str, model: str, options: dict[str, Any] | None = None, **changes: Any) -> Cell:
    fields = {field.name for field in dataclasses.fields(model_preset(model))}
    wider: dict[str, Any] = {name: value for name, value in WIDER.items() if name in fields}
    if "leading" in fields:
        wider["leading"] = (N, *model_preset(model).leading[1:])
    settings: dict[str, Any] = {
        "model": model,
        "model_options": wider | (options or {}),
        "strategy": strategy,
        "sizes": nesting(strategy).sizes_for(N) if nesting(strategy).axes else {},
        "batch": 4,
        "seq_len": SEQ_LEN,
        "precision": "bf16",
        "cluster": "dgx-a100",
    }
    return Cell.model_validate(settings | changes)


class Steps:
    """Counts the steps of loops, and those of them that are run; with ``whole`` all of them are."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch):
        self.asked = self.run = 0
        self.whole = False
        for module in (rings, all_gather_kv, fpdt, tiles, upipe):
            monkeypatch.setattr(module, "keyed_steps", self)

    def __call__(self, size: int, key: Key, **how: Any) -> Iterator[int]:
        self.asked += size
        for step in range(size) if self.whole else keyed_steps(size, key, **how):
            self.run += 1
            yield step


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    return Steps(monkeypatch)


def differences_of_loops(trace: Callable[[], Trace], steps: Steps) -> Sequence[str]:
    """How a shortened trace differs from a whole one; the counts of ``steps`` are those of the former. One
    without loops is not shortened."""
    steps.asked = steps.run = 0
    shortened = trace()
    if not steps.asked:
        return []
    counts = steps.asked, steps.run
    steps.whole = True
    whole = trace()
    steps.whole, (steps.asked, steps.run) = False, counts
    assert len(whole.memory.events) > N
    return differences(shortened, whole)
