"""ZeRO-1 whose ranks update whole parameters, as InternEvo's: values, who updates what, and what is sent. The
flat gradient of fsdp_flat: what is left of the whole weights when backward has made it. PyTorch's first FSDP
as one unit: streams, what is left alone, and what is held in which dtype.

Weights that are built on the meta device and divided before they have memory: the values are those of a
model that was built whole, and no rank holds more than its part.
"""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import model_parameters, rank_classes
from spbench.bench.measure.engines.setup import build_training
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.backends import zero1
from spbench.impls.backends.flat import owners_of
from spbench.impls.backends.fsdp_flat import FlatFullySharded
from spbench.impls.backends.zero1 import ShardedOptimizer, ShardedOptimizerOptions
from spbench.impls.models.model import model_preset
from spbench.impls.registries import strategy_class
from spbench.impls.training.step import initialize
from tests.impls.backends import one_device
from tests.measure.verify.assertions import assert_green

WHOLE = {"backend": "zero1", "shards": "whole"}


def whole(strategy: str = "lasp", micro_batches: int = 1, **changed: Any) -> Cell:
    return one_device.cell("zero1", strategy, training={**WHOLE, "micro_batches": micro_batches}, **changed)


def test_gradients_and_updates_are_those_of_one_device(pool: RankPool) -> None:
    one_device.assert_right(pool, whole("tensor_parallel", 2, sizes={"dp": 2, "tp": 2}), ShardedOptimizer)


class KeepsItsUpdates(ShardedOptimizer):
    """The other ranks do not get what a rank has updated."""

    def _broadcast(self, *args: Any) -> None:
        with mock.patch.object(zero1.dist, "broadcast"):
            super()._broadcast(*args)


def test_updates_that_are_kept_are_seen(pool: RankPool) -> None:
    """In the gradients of the next step."""
    of_ranks = pool.run({"dp": 2}, one_device.errors_of_rank, whole(sizes={"dp": 2}), KeepsItsUpdates)
    assert min(max(e for n, e in each.items() if n.startswith("gradient 1")) for each in of_ranks) > 1e-3


def test_closed_form_virtual_and_real_ranks_send_the_same(pool: RankPool) -> None:
    asked = whole(micro_batches=2, sizes={"sp": 2, "dp": 2}, precision="fp16")
    one_device.assert_sends_its_closed_form(pool, asked)


def test_the_largest_go_to_ranks_with_fewest_elements() -> None:
    assert owners_of([1, 9, 4, 4, 3, 1], 3) == [2, 0, 1, 2, 1, 2]
    assert owners_of([5, 5], 4) == [0, 1]


@pytest.mark.parametrize("ranks", [4, 64])
def test_as_many_broadcasts_as_ranks_that_update_something(ranks: int) -> None:
    """The first rank of the class, which is traced, updates most."""
    asked = one_device.cell("zero1", "single", training=WHOLE, batch=ranks, sizes={"dp": ranks})
    (only,) = rank_classes(asked)
    trace = tracing.trace(asked, only.first, events=True)
    names = Counter(trace.program.names[n] for n in trace.program.name)
    sizes = [p.numel() for p in asked_parameters(asked)]
    owned = Counter[int]()
    for owner, size in zip(owners_of(sizes, ranks), sizes, strict=True):
        owned[owner] += size
    assert names["broadcast"] == len(owned) == min(ranks, len(sizes))
    assert owned[only.first] == max(owned.values())


def asked_parameters(asked: Cell) -> list[Any]:
    model = one_device.model_preset(asked.model, asked.model_options)
    return [p for p in model.build(one_device.Strategy(), one_device.LENGTH).parameters() if p.requires_grad]


@pytest.mark.parametrize("other", [{"gradients": "late"}, {"optimizer": "host"}])
def test_what_does_not_go_together(other: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"^shards: whole needs gradients: buckets and optimizer: device"):
        ShardedOptimizerOptions(shards="whole", **other)


def test_nothing_is_left_of_whole_weights_whose_gradient_is_summed() -> None:
    """Also not an element, whose block of 512 bytes a unit would add to exact peaks."""
    flat = torch.ones(12).requires_grad_()
    flat.grad = torch.full((12,), 2.0)
    unit: Any = SimpleNamespace(names=(), gradient=None)
    backend: Any = SimpleNamespace(owners={}, scattered=lambda unit, gradient: gradient[:6])
    FlatFullySharded._scatter(backend, unit, flat)
    assert flat.untyped_storage().nbytes() == 0
    assert flat.grad is None
    assert unit.gradient.tolist() == [2.0] * 6


WIDE = {"layers": 2, "hidden": 192, "inner": 512, "vocabulary": 1024}


def asked(strategy: str, sizes: dict[str, int], **training: Any) -> Cell:
    return Cell.model_validate(
        {
            "model": "causal-transformer-tiny",
            "model_options": WIDE,
            "strategy": strategy,
            "sizes": sizes,
            "batch": 1,
            "seq_len": 16,
            "precision": "bf16",
            "training": {"backend": "fsdp1", **training},
        }
    )


def of_size(log: MemoryLog, nbytes: int) -> list[tuple[int, str, str]]:
    """The stream of each storage of about that size (padding apart) that the step makes, and the phases of
    its birth and its death ("": it lives on)."""
    found = []
    for number, size in enumerate(log.sizes):
        born = log.events.index(number + 1)
        if 0 <= size - nbytes < 64 and born >= log.step_start:
            dies = -number - 1
            death = log.phase_of(log.events.index(dies)) if dies in log.events else ""
            found.append((log.streams[number], log.phase_of(born), death))
    return found


def test_the_unit_is_whole_from_forward_on_and_streams_are_apart() -> None:
    cell = asked("ulysses", {"sp": 2}, shard_dtype="parameters")
    log, elements = tracing.trace(cell).memory, model_parameters(cell)
    # the weights, and their gradient, of which the sum's part is made on a third stream
    assert of_size(log, 2 * elements) == [(1, "forward", "backward"), (0, "backward", "backward")]
    assert of_size(log, elements) == [(2, "backward", "")]


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 4 + 8), ("parameters", 2 + 4)])
def test_shards_are_held_in_the_dtype_that_is_asked_for(dtype: str, nbytes: int) -> None:
    cell = asked("ulysses", {"sp": 2}, shard_dtype=dtype)
    held = tracing.trace(cell).measurement(None).peak_held
    assert held["optimizer_state"] == pytest.approx(nbytes * model_parameters(cell) / 2, rel=0.02)


def test_what_tensor_parallelism_splits_is_left_alone(pool: RankPool) -> None:
    cell = asked("megatron_sp", {"tp": 2}, shard_dtype="parameters")
    trace = tracing.trace(cell)
    split = 2 * (4 * 192 * 192 + 3 * 192 * 512) // 2  # of two layers, half on each rank
    assert trace.measurement(None).peak_held["parameters"] == pytest.approx(2 * split, rel=0.01)
    gathered = {row["collective"] for row in trace.communication.rows() if row["phase"] == "forward"}
    assert gathered == {"all_gather", "reduce_scatter"}
    model = model_preset("causal-transformer-tiny", {"layers": 1})
    assert_green(pool, Case(strategy_class("megatron_sp"), model, "model", backend="fsdp1"), 2)


def cell(initialize: str, **changes: Any) -> Cell:
    settings = {
        "model": "tnl-tiny",
        "strategy": "lasp",
        "sizes": {"dp": 3},
        "batch": 3,
        "seq_len": 24,
        "precision": "bf16",
        "training": {"backend": "zero3", "initialize": initialize},
    }
    return Cell.model_validate(settings | changes)


def values_of_rank(mesh: DeviceMesh, asked: Cell) -> dict[str, Tensor]:
    """What a rank holds of weights and buffers after set-up."""
    training, _, _ = build_training(asked, mesh, partial(initialize, seed=5, everything=True))
    parts = {name: part.values for name, part in training.backend.weight_parts().items()}
    return parts | dict(training.module.named_buffers())


@pytest.mark.parametrize(
    "changes",
    [
        {},  # uneven parts, buffers, vectors with values of their own
        {
            "strategy": "tensor_parallel",
            "model": "bert-tiny",
            "sizes": {"dp": 2, "tp": 2},
            "batch": 4,
        },  # tied
    ],
)
def test_values_are_those_of_a_model_that_was_built_whole(pool: RankPool, changes: dict[str, Any]) -> None:
    by_device = {
        device: pool.run(cell(device, **changes).mesh_sizes, values_of_rank, cell(device, **changes))
        for device in ("meta", "device")
    }
    for meta, whole in zip(by_device["meta"], by_device["device"], strict=True):
        assert meta.keys() == whole.keys()
        assert any(x.any() for x in meta.values())
        for name, x in whole.items():
            assert torch.equal(meta[name], x), name


def test_a_rank_never_holds_more_than_its_part() -> None:
    model = {"model": "gpt3-345m", "model_options": {"layers": 2}, "strategy": "single", "sizes": {"dp": 8}}
    asked = [cell(on, **model, batch=8, seq_len=1024) for on in ("meta", "device")]
    logs = [tracing.trace(each).memory for each in asked]
    meta, device = (log.levels(log.sizes).setup.nbytes for log in logs)
    # float32 weights and two moments, of an eighth; the rest is the batch
    assert meta == pytest.approx(12 * model_parameters(asked[0]) / 8, rel=0.01)
    assert device > 4 * model_parameters(asked[0])
    assert logs[0].peak() == logs[1].peak()  # the steps' own is the same


def test_a_place_that_there_is_not() -> None:
    with pytest.raises(ValueError, match="initialize is one of meta, device, not 'cpu'"):
        tracing.trace(cell("cpu"))
