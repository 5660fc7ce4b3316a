"""The options of torch's fully_shard: each trains as one device does and sends what its closed form says.
Their memory is compared with that of real ranks in tests/measure/engines/test_peaks.py.

ZeRO-1 whose ranks update whole parameters, as InternEvo's: values, who updates what, and what is sent. The
flat gradient of fsdp_flat: what is left of the whole weights when backward has made it. PyTorch's first FSDP
as one unit: streams, what is left alone, and what is held in which dtype.

Weights that are built on the meta device and divided before they have memory: the values are those of a
model that was built whole, and no rank holds more than its part."""

from collections import Counter
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import model_parameters, rank_classes
from spbench.bench.measure.engines.run_cell import measure, run_cell
from spbench.bench.measure.engines.setup import build_training
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.simulator.program import HOST_WORK
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.backends import fully_shard, meta_device, zero1
from spbench.impls.backends.flat import owners_of
from spbench.impls.backends.fsdp_flat import FlatFullySharded
from spbench.impls.backends.sharded_stages import padded_elements
from spbench.impls.backends.sharding_options import ShardingOptions, units_of
from spbench.impls.backends.zero1 import ShardedOptimizer
from spbench.impls.layout import Unsupported
from spbench.impls.registries import model_preset, strategy_class
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import initialize
from tests.cells import make_cell
from tests.grid import tabled
from tests.impls.backends import one_device
from tests.impls.backends.one_device import cell
from tests.measure.engines.cells import differences
from tests.measure.verify.assertions import assert_green

TINY = "causal-transformer-tiny"


def asked(options: dict[str, Any], **changes: Any) -> Cell:
    settings = {"model": "causal-transformer-tiny", "sizes": {"dp": 2, "sp": 2}, **changes}
    training = {"backend": "zero3", "micro_batches": 2, **options}
    return cell("zero3", "ulysses", **settings, training=training)


#: as accelerate, verl and Automodel have them
DEFERRED = {"reduce_at": "last", "reduce_dtype": "fp32"}


def test_experts_of_one_rank_are_in_no_unit() -> None:
    def case(precision: str, **options: Any) -> Cell:
        training = {"backend": "zero3", "micro_batches": 3, **DEFERRED, "own_weights": "apart", **options}
        changed = {"sizes": {"dp": 4, "ep": 4}, "model_options": {"routing": "even"}, "training": training}
        return cell("zero3", "single", model="moe-tiny", precision=precision, **changed)

    each = case("bf16", state_dtype="weights"), case("bf16", own_weights="units")
    apart, units = (tracing.trace(one).memory.peak().nbytes for one in each)
    assert apart < units
    with pytest.raises(Unsupported, match="set state_dtype: weights"):
        tracing.trace(case("bf16"))


def test_what_each_option_changes() -> None:
    def peak(**options: Any) -> Any:
        wide = {"hidden": 192, "inner": 512, "vocabulary": 2048, "layers": 2}
        return tracing.trace(asked(options, precision="bf16", model_options=wide)).memory.peak()

    plain = peak()
    assert peak(wrap="whole").nbytes > plain.nbytes
    assert peak(reduce_dtype="fp32").nbytes > plain.nbytes
    assert peak(**DEFERRED).nbytes > peak(reduce_dtype="fp32").nbytes
    narrow = peak(state_dtype="weights")
    for category in ("parameters", "optimizer_state"):
        assert narrow.held[category] == pytest.approx(plain.held[category] / 2, rel=0.01)


@pytest.mark.parametrize(("dp", "shared"), [(1, False), (4, True)])
def test_the_host_pays_for_the_hooks_of_each_unit(
    dp: int, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def calls() -> int:
        options, training = {"layers": 3}, {"backend": "zero3", "micro_batches": 2}
        model = {"model": TINY, "model_options": options, "sizes": {"dp": dp}, "batch": 8}
        program = tracing.trace(cell("zero3", "single", **model, training=training), events=True).program
        assert program is not None
        return int(program.host[:, HOST_WORK.index("modules")].sum())

    with_hooks = calls()
    weights = len(
        [*model_preset("causal-transformer-tiny", {"layers": 3}).build(Strategy(), 16).parameters()]
    )
    (forward, of_forward), (backward, of_backward) = fully_shard.HOOK_CALLS[shared]
    monkeypatch.setattr(fully_shard, "host_works", lambda calls: None)
    of_units, of_weights = 4 * (forward + backward), weights * (of_forward + of_backward)
    assert with_hooks - calls() == 2 * (of_units + of_weights)


def test_stages_that_share_an_embedding_have_no_host_optimizer() -> None:
    """It would update each copy by its own gradient alone."""
    staged = {"strategy": "single", "sizes": {"dp": 2, "pp": 2}, "batch": 8, "engine": "virtual"}
    host = {"backend": "zero2", "optimizer": "host", "micro_batches": 4}
    tied, untied = (
        cell("zero2", **staged, model="causal-transformer-tiny", model_options={"tied": each}, training=host)
        for each in (True, False)
    )
    assert measure(run_cell, untied).status == "ok"
    refused = measure(run_cell, tied)
    assert refused.status == "unsupported"
    assert "set optimizer: device, or untie the embedding" in str(refused.reason)


def test_a_model_that_says_nothing_of_tying_has_its_embedding_as_a_unit() -> None:
    module = nn.Module()
    module.embedding, options = nn.Embedding(4, 2), ShardingOptions(wrap="embedding")
    assert units_of(module, options) == [module.embedding]
    module.tied = module.embedding
    with pytest.raises(Unsupported, match="no word embedding apart from its head"):
        units_of(module, options)


def test_pieces_that_nobody_looks_at_are_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    # 24 ranks, more than some parameters have rows: their last pieces are empty
    wide = asked({"micro_batches": 1}, sizes={"dp": 12, "sp": 2}, batch=12)
    looked_at, cut = [], meta_device.Pieces.__getitem__
    with monkeypatch.context() as patched:
        patched.setattr(
            meta_device.Pieces, "__getitem__", lambda all_, i: looked_at.append(i) or cut(all_, i)
        )
        ours = [tracing.trace(wide, rank, events=True) for rank in (3, 23)]
    # torch still asks for its pieces by the name that is known; of each parameter for few
    assert {0, 3, 23} == {*looked_at}
    monkeypatch.setattr(meta_device, "CUT", "a name of another torch")
    with tracing.only_plain_traces():
        for rank, trace in zip((3, 23), ours, strict=True):
            assert differences(tracing.trace(wide, rank, events=True), trace) == []


WHOLE = {"backend": "zero1", "shards": "whole"}


def whole(strategy: str = "lasp", micro_batches: int = 1, **changed: Any) -> Cell:
    return one_device.cell("zero1", strategy, training={**WHOLE, "micro_batches": micro_batches}, **changed)


class KeepsItsUpdates(ShardedOptimizer):
    """The other ranks do not get what a rank has updated."""

    def _broadcast(self, *args: Any) -> None:
        with mock.patch.object(zero1.dist, "broadcast"):
            super()._broadcast(*args)


def test_updates_that_are_kept_are_seen(pool: RankPool) -> None:
    """In the gradients of the next step."""
    of_ranks = pool.run({"dp": 2}, one_device.errors_of_rank, whole(sizes={"dp": 2}), KeepsItsUpdates)
    assert min(max(e for n, e in each.items() if n.startswith("gradient 1")) for each in of_ranks) > 1e-3


def test_a_part_is_padded_to_whole_rows() -> None:
    assert padded_elements(torch.Size((4, 1152, 3584)), 1024) == 5 * 1024 * 3584  # of 4,608 rows


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


def of_fsdp1(strategy: str, sizes: dict[str, int], **training: Any) -> Cell:
    fields = {"model_options": WIDE, "training": {"backend": "fsdp1", **training}}
    return make_cell("causal-transformer-tiny", strategy, sizes, 1, 16, **fields)


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
    cell = of_fsdp1("ulysses", {"sp": 2}, shard_dtype="parameters")
    log, elements = tracing.trace(cell).memory, model_parameters(cell)
    # the weights, and their gradient, of which the sum's part is made on a third stream
    assert of_size(log, 2 * elements) == [(1, "forward", "backward"), (0, "backward", "backward")]
    assert of_size(log, elements) == [(2, "backward", "")]


@pytest.mark.parametrize(("dtype", "nbytes"), [("float32", 4 + 8), ("parameters", 2 + 4)])
def test_shards_are_held_in_the_dtype_that_is_asked_for(dtype: str, nbytes: int) -> None:
    cell = of_fsdp1("ulysses", {"sp": 2}, shard_dtype=dtype)
    held = tracing.trace(cell).measurement(None).peak_held
    assert held["optimizer_state"] == pytest.approx(nbytes * model_parameters(cell) / 2, rel=0.02)


def test_what_tensor_parallelism_splits_is_left_alone(pool: RankPool) -> None:
    cell = of_fsdp1("megatron_sp", {"tp": 2}, shard_dtype="parameters")
    trace = tracing.trace(cell)
    split = 2 * (4 * 192 * 192 + 3 * 192 * 512) // 2  # of two layers, half on each rank
    assert trace.measurement(None).peak_held["parameters"] == pytest.approx(2 * split, rel=0.01)
    gathered = {row["collective"] for row in trace.communication.rows() if row["phase"] == "forward"}
    assert gathered == {"all_gather", "reduce_scatter"}
    model = model_preset("causal-transformer-tiny", {"layers": 1})
    assert_green(pool, Case(strategy_class("megatron_sp"), model, "model", backend="fsdp1"), 2)


def initialized_on(initialize: str, **changes: Any) -> Cell:
    training = {"backend": "zero3", "initialize": initialize}
    return make_cell("tnl-tiny", "lasp", {"dp": 3}, 3, 24, training=training, **changes)


def values_of_rank(mesh: DeviceMesh, asked: Cell) -> dict[str, Tensor]:
    """What a rank holds of weights and buffers after set-up."""
    training, _, _ = build_training(asked, mesh, partial(initialize, seed=5, everything=True))
    parts = {name: part.values for name, part in training.backend.weight_parts().items()}
    return parts | dict(training.module.named_buffers())


@tabled(__file__, "values_are_those_of_a_model_that_was_built_whole")
def test_values_are_those_of_a_model_that_was_built_whole(pool: RankPool, changes: dict[str, Any]) -> None:
    by_device = {
        device: pool.run(
            initialized_on(device, **changes).mesh_sizes, values_of_rank, initialized_on(device, **changes)
        )
        for device in ("meta", "device")
    }
    for meta, whole in zip(by_device["meta"], by_device["device"], strict=True):
        assert meta.keys() == whole.keys()
        assert any(x.any() for x in meta.values())
        for name, x in whole.items():
            assert torch.equal(meta[name], x), name


def test_a_rank_never_holds_more_than_its_part() -> None:
    model = {"model": "gpt3-345m", "model_options": {"layers": 2}, "strategy": "single", "sizes": {"dp": 8}}
    asked = [initialized_on(on, **model, batch=8, seq_len=1024) for on in ("meta", "device")]
    logs = [tracing.trace(each).memory for each in asked]
    meta, device = (log.levels(log.sizes).setup.nbytes for log in logs)
    # float32 weights and two moments, of an eighth; the rest is the batch
    assert meta == pytest.approx(12 * model_parameters(asked[0]) / 8, rel=0.01)
    assert device > 4 * model_parameters(asked[0])
    assert logs[0].peak() == logs[1].peak()  # the steps' own is the same
