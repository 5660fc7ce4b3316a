"""The recorder: further meters beside its own, and nothing left patched."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from spbench.bench.measure.trace.meter import Call, Meter
from spbench.bench.measure.trace.recorder import Recorder


class Calls(Meter):
    """How often each operator is called, by phase."""

    name = "calls"

    def __init__(self, mesh: object):
        self.counts: Counter[str] = Counter()
        self.current = "setup"

    def phase(self, name: str) -> None:
        self.current = name

    def see(self, call: Call) -> None:
        self.counts[f"{self.current} {call.func._schema.name}"] += 1

    def found(self) -> Mapping[str, Any]:
        return dict(self.counts)


def test_a_further_meter_sees_every_operator_with_its_phase() -> None:
    recorder = Recorder(further=[Calls])
    with recorder:
        x, y = torch.ones(2, 3), torch.ones(3, 4)
        with recorder.phase("forward"):
            torch.mm(x, y).add_(1)
        with recorder.paused():
            torch.zeros(5)
    assert recorder.found() == {
        "calls": {"setup aten::ones": 2, "forward aten::mm": 1, "forward aten::add_": 1}
    }


def test_an_entry_that_fails_leaves_nothing_patched(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.UntypedStorage.resize_

    def fails(self: TorchDispatchMode) -> None:
        raise RuntimeError("no mode can be entered")

    monkeypatch.setattr(TorchDispatchMode, "__enter__", fails)
    with pytest.raises(RuntimeError, match="no mode"), Recorder():
        pass
    assert torch.UntypedStorage.resize_ is before


def test_what_is_patched_is_put_back() -> None:
    before = torch.UntypedStorage.resize_
    with Recorder():
        assert torch.UntypedStorage.resize_ is not before
    assert torch.UntypedStorage.resize_ is before
