"""Pieces that are put together at once are not cut in a quick trace, which is that of the plain path."""

from __future__ import annotations

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.trace import uncut_pieces
from spbench.bench.measure.trace.torch_internals import FakeTensor, FakeTensorMode, fsdp_collectives
from tests.measure.trace.same_traces import differences

#: weights of 48 rows and 96 columns: those of fewer rows than there are ranks are cut by columns
WIDE = Cell.model_validate(
    {
        "model": "causal-transformer-tiny",
        "strategy": "ulysses",
        "sizes": {"dp": 32, "sp": 2},
        "batch": 32,
        "seq_len": 48,
        "precision": "bf16",
        "training": {"backend": "zero3"},
        "model_options": {"hidden": 48, "inner": 128},
    }
)


def traces(monkeypatch: pytest.MonkeyPatch) -> tuple[list[str], list[int]]:
    """What differs between a quick and a plain trace, and the dims along which the quick one joins pieces."""
    dims, side_by_side = [], uncut_pieces._Uncut.side_by_side

    def noted(pieces: uncut_pieces._Uncut, dim: int) -> torch.Tensor:
        dims.append(dim)
        return side_by_side(pieces, dim)

    with monkeypatch.context() as patched:
        patched.setattr(uncut_pieces._Uncut, "side_by_side", noted)
        ours = tracing.trace(WIDE, 3, events=True)
    with tracing.only_plain_traces():
        return [*differences(tracing.trace(WIDE, 3, events=True), ours)], dims


def test_a_trace_without_pieces_is_that_with_them(monkeypatch: pytest.MonkeyPatch) -> None:
    differ, dims = traces(monkeypatch)
    assert differ == []
    assert {*dims} == {0, 1}  # of gradients, and of weights that are gathered


@pytest.mark.parametrize("fault", ["two views", "a copy"])
def test_another_way_to_put_them_together_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side_by_side = uncut_pieces._Uncut.side_by_side

    def other(pieces: uncut_pieces._Uncut, dim: int) -> torch.Tensor:
        made = side_by_side(pieces, dim)
        return made.view(made.shape) if fault == "two views" else made.clone()

    monkeypatch.setattr(uncut_pieces._Uncut, "side_by_side", other)
    assert traces(monkeypatch)[0] != []


def test_only_fake_pieces_that_are_alike_stay_uncut() -> None:
    with uncut_pieces.nothing_cut():
        ours = fsdp_collectives.torch
        real, fake = torch.arange(24.0).view(4, 6), FakeTensorMode().from_tensor(torch.empty(4, 6))
        assert torch.equal(
            ours.cat(ours.chunk(real, 3, dim=1), dim=0), torch.cat(torch.chunk(real, 3, dim=1), dim=0)
        )
        for whole, number, dim in ((fake, 4, 1), (fake.t(), 3, 0)):
            pieces = ours.chunk(whole, number, dim=dim)
            assert all(type(piece) is FakeTensor for piece in pieces)
        made = ours.cat(ours.chunk(fake, 3, dim=1), dim=0)
        assert type(ours.chunk(fake, 3, dim=1)) is uncut_pieces._Uncut
        assert made.shape == (12, 2)
    assert fsdp_collectives.torch is torch
