"""Traces with remembered operators are those of the plain path, event by event, for every strategy, backend
and kind of step; a fault in what is remembered is seen by the comparison."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import rank_classes
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.trace import fast_recorder
from spbench.bench.measure.trace.fast_recorder import FastRecorder
from spbench.bench.measure.trace.operator_results import described, worked_out
from spbench.impls.registries import backends, strategies
from tests.measure.trace.same_traces import differences
from tests.slow import mostly_slow

#: the model that each strategy is traced on; the others run BERT
MODELS = {
    "lasp": "tnl-tiny",
    "lasp2": "tnl-tiny",
    "lasp2h": "linear-llama3-tiny-hybrid",
    "dsp": "st-dit-tiny",
    "ulysses": "causal-transformer-tiny",
    "ring_attention": "causal-transformer-tiny",
    "all_gather_kv": "causal-transformer-tiny",
    "megatron_sp": "causal-transformer-tiny",
}


def cell(strategy: str, **changes: Any) -> Cell:
    axes = strategies()[strategy].axes
    model = MODELS.get(strategy, "bert-tiny")
    settings: dict[str, Any] = {
        "model": model,
        "strategy": strategy,
        "sizes": dict.fromkeys(axes, 3),
        "batch": 6,
        "seq_len": 72 if model.startswith("st-dit") else 48,
        "precision": "bf16",
        "cluster": "dgx-a100",
    }
    return Cell.model_validate(settings | changes)


CELLS = {
    **{strategy: cell(strategy) for strategy in strategies()},
    **{
        f"lasp under {backend}": cell("lasp", sizes={"dp": 2, "sp": 2}, training={"backend": backend})
        for backend in backends()
    },
    "inference": cell("dsp", training={"step": "inference"}),
    "pipeline": cell(
        "ring_self_attention", sizes={"pp": 2, "sp": 2}, precision="fp16", training={"micro_batches": 2}
    ),
    "dropout and checkpointing": cell(
        "ring_self_attention", model_options={"dropout": 0.1, "checkpointing": True}
    ),
    "checkpoints on the host": cell(
        "ring_attention",
        model_options={"recompute": "full", "checkpoints": "host"},
        training={"micro_batches": 2, "steps": 2},
    ),
    "zigzag": cell("ring_attention", sizes={"sp": 2}, strategy_options={"placement": "zigzag"}),
    "two steps": cell(
        "ring_self_attention",
        sizes={"pp": 2, "sp": 2},
        precision="fp16",
        training={"micro_batches": 2, "moments": "later", "steps": 2},
    ),
    "later moments": cell(
        "tensor_parallel", precision="fp16", training={"moments": "later", "gradients": "stale"}
    ),
}


#: what differs in kind; the other cells are traced in the slow run
_IN_EVERY_RUN = {
    *("tensor_parallel", "ring_self_attention"),
    *("lasp under ddp", "lasp under zero3", "dropout and checkpointing"),
}


def in_every_run(names: Iterable[str]) -> list[Any]:
    """Names of cells, for a test's parameters: those that are not in every run are marked slow."""
    return mostly_slow(names, *_IN_EVERY_RUN)


def plain(asked: Cell, rank: int, monkeypatch: pytest.MonkeyPatch) -> Trace:
    with monkeypatch.context() as patched:
        patched.setenv(tracing.PLAIN_TRACE, "1")
        return tracing.trace(asked, rank, events=True)


@pytest.mark.parametrize("name", in_every_run(CELLS))
def test_traces_are_those_of_the_plain_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = CELLS[name]
    for each in rank_classes(asked):
        expected = plain(asked, each.first, monkeypatch)
        assert len(expected.memory.events) > 100
        first, again = (tracing.trace(asked, each.first, events=True) for _ in range(2))
        assert differences(first, expected) == []
        assert differences(again, expected) == []


def test_an_output_remembered_with_another_shape_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = cell("tensor_parallel")
    expected = plain(asked, 0, monkeypatch)
    tracing.trace(asked, events=True)
    wrong = dict(fast_recorder.MEMORY)
    for key, remembered in wrong.items():
        if key[0] is torch.ops.aten._softmax.default or "gelu" in key[0]._schema.name:
            assert remembered is not None
            assert remembered.results is not None
            new = remembered.results[0]
            larger = dataclasses.replace(new, stride=tuple(2 * s for s in new.stride))
            wrong[key] = dataclasses.replace(remembered, results=(larger, *remembered.results[1:]))
    monkeypatch.setattr(fast_recorder, "MEMORY", wrong)
    assert "sizes" in differences(tracing.trace(asked, events=True), expected)


def test_an_assignment_to_data_is_another_call() -> None:
    """The metadata of an argument is read at each call, not remembered by the tensor's identity."""
    mode = FakeTensorMode()
    recorder = FastRecorder(mode)
    with mode, recorder, recorder.phase("forward"):
        x = torch.ones(4, 4)
        for _ in range(2):
            assert (x + x).shape == (4, 4)
        x.data = torch.ones(2, 3)
        for _ in range(2):
            assert (x + x).shape == (2, 3)


def test_results_are_the_arguments_or_views_of_them_where_they_were() -> None:
    mode = FakeTensorMode()
    recorder = FastRecorder(mode)
    with mode, recorder, recorder.phase("forward"):
        for _ in range(3):
            x, out = torch.ones(4, 6), torch.empty(4, 4)
            assert x.add_(1) is x
            assert torch.mm(x, torch.ones(6, 4), out=out) is out
            view = x[1:, ::2]
            assert view.untyped_storage()._cdata == x.untyped_storage()._cdata
            assert (view.shape, view.stride(), view.storage_offset()) == ((3, 3), (6, 2), 6)
            pieces = x.split(3, dim=1)
            assert [piece.storage_offset() for piece in pieces] == [0, 3]
            assert all(piece.untyped_storage()._cdata == x.untyped_storage()._cdata for piece in pieces)


def operators() -> Iterator[tuple[Any, tuple[Any, ...], dict[str, Any]]]:
    """An operator of each kind that is worked out, with arguments; to be asked for inside a mode."""
    aten, ours = torch.ops.aten, torch.ops.spbench
    q, k = torch.empty(2, 4, 6, 8, dtype=torch.bfloat16), torch.empty(2, 2, 5, 8, dtype=torch.bfloat16)
    x, y = torch.empty(6, 8)[1:, ::2], torch.empty(4, 5)
    yield ours.flash_attention.default, (q, k, k, 0.5, True), {}
    yield aten.transpose.int, (x, 0, 1), {}
    yield aten.split.Tensor, (x, 2, 1), {}
    yield aten.view.default, (torch.empty(6, 8)[2:], [2, 16]), {}
    yield aten.add.Tensor, (x, x.t().clone().t()), {}
    yield aten.mul_.Tensor, (x, 2.0), {}
    yield aten.logaddexp.out, (x, x), {"out": torch.empty(5, 4)}
    yield aten._to_copy.default, (x,), {"dtype": torch.bfloat16}
    yield aten.addmm.default, (torch.empty(5), x, y), {}
    yield aten._log_softmax.default, (x, 1, False), {}


def test_operators_are_worked_out_as_the_mode_does() -> None:
    mode = FakeTensorMode()
    with mode:
        for operator, args, kwargs in operators():
            attributes = {name: value for name, value in vars(torch.empty(0)).items() if name != "fake_mode"}
            found = worked_out(operator, args, kwargs, attributes)
            expected = described(operator, args, kwargs, operator(*args, **kwargs))
            assert found is not None, operator
            assert expected is not None
            assert (found.results, found.container) == (expected.results, expected.container), operator


def test_what_the_mode_knows_better_is_not_worked_out() -> None:
    """Where results lie that are not beside the arguments, layouts that a device chooses, and what is written
    in place by operators of ours."""
    with FakeTensorMode():
        x, image = torch.empty(4, 4), torch.empty(1, 2, 8, 8)
        convolution = (image, torch.empty(2, 2, 3, 3), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1)
        for operator, args, kwargs in (
            (torch.ops.spbench.cross_entropy_gradient_.default, (x, x, x), {}),
            (torch.ops.aten.convolution.default, convolution, {}),
            (torch.ops.aten.zeros.default, ([4],), {}),
            (torch.ops.aten.zeros_like.default, (x,), {"device": torch.device("cpu")}),
            (torch.ops.aten.add.Tensor, (x, torch.empty((), device="meta")), {}),
            (torch.ops.aten.lift_fresh.default, (x,), {}),
        ):
            assert worked_out(operator, args, kwargs, {}) is None, operator


@pytest.mark.parametrize("most", [0, 5])
def test_no_more_is_remembered_than_there_may_be(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fast_recorder, "MEMORY", memory := {})
    monkeypatch.setattr(fast_recorder, "MOST_ENTRIES", most)
    mode = FakeTensorMode()
    with mode, FastRecorder(mode):
        for size in range(1, 10):
            assert torch.ones(size).exp().neg().shape == (size,)
    assert len(memory) == most
