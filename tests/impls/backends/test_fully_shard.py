"""The options of torch's fully_shard: each trains as one device does and sends what its closed form says.
Their memory is compared with that of real ranks in tests/measure/engines/test_peaks.py.

ZeRO-1 whose gradients are summed after backward, as DeepSpeed's: values, bytes, and what is held.
"""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.measure.engines.run_cell import measure, run_cell
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.backends import meta_device, zero1
from spbench.impls.backends.fully_shard import FullySharded
from spbench.impls.backends.sharded_stages import padded_elements
from spbench.impls.backends.sharding_options import ShardingOptions, units_of
from spbench.impls.backends.zero1 import LateGradients, ShardedOptimizer, Take
from spbench.impls.layout import Unsupported
from tests.impls.backends import one_device
from tests.impls.backends.one_device import assert_right, assert_sends_its_closed_form, cell
from tests.measure.engines.cells import differences
from tests.slow import slow

#: as torchtitan has them, if its training.dtype is bfloat16
TORCHTITAN = {"wrap": "embedding", "reshard_rest": False, "reduce_dtype": "fp32", "state_dtype": "weights"}


def asked(options: dict[str, Any], **changes: Any) -> Cell:
    settings = {"model": "causal-transformer-tiny", "sizes": {"dp": 2, "sp": 2}, **changes}
    training = {"backend": "zero3", "micro_batches": 2, **options}
    return cell("zero3", "ulysses", **settings, training=training)


#: as accelerate, verl and Automodel have them
DEFERRED = {"reduce_at": "last", "reduce_dtype": "fp32"}


@pytest.mark.parametrize(
    "options",
    [slow({"wrap": "whole"}), TORCHTITAN, slow(DEFERRED), {**DEFERRED, "reduce_at": "kept"}],
    ids=["whole", "torchtitan", "deferred", "kept"],
)
def test_every_option_is_right(pool: RankPool, options: dict[str, Any]) -> None:
    # in float64 sums in float32 are sums in float64
    assert_right(pool, asked(options), FullySharded)
    assert_sends_its_closed_form(pool, asked(options, precision="bf16"))


def test_experts_of_one_rank_are_in_no_unit(pool: RankPool) -> None:
    def case(precision: str, **options: Any) -> Cell:
        training = {"backend": "zero3", "micro_batches": 3, **DEFERRED, "own_weights": "apart", **options}
        changed = {"sizes": {"dp": 4, "ep": 4}, "model_options": {"routing": "even"}, "training": training}
        return cell("zero3", "single", model="moe-tiny", precision=precision, **changed)

    narrow = case("bf16", state_dtype="weights")
    assert_right(pool, case("fp64"), FullySharded)
    assert_sends_its_closed_form(pool, narrow)
    peaks = [tracing.trace(each).memory.peak().nbytes for each in (narrow, case("bf16", own_weights="units"))]
    assert peaks[0] < peaks[1]
    with pytest.raises(Unsupported, match="set state_dtype: weights"):
        tracing.trace(case("bf16"))


@pytest.mark.parametrize("options", [{}, {"initialize": "meta", "reduce_at": "kept", "reduce_dtype": "fp32"}])
def test_parts_that_no_dim_divides_are_cut_as_the_matrix_of_all(
    pool: RankPool, options: dict[str, Any]
) -> None:
    # of queries, keys and values [1, 52, 44], which dims of one, and of 3 ranks, leave as they are
    sizes = {"hidden": 44, "heads": 11, "kv_heads": 1, "inner": 88}
    undivided = {
        "sizes": {"dp": 3},
        "batch": 6,
        "model_options": sizes,
        "training": {"backend": "zero3", **options},
    }
    undivided["training"] |= {"micro_batches": 2}  # type: ignore[operator]
    assert_right(
        pool, cell("zero3", "single", model="causal-transformer-tiny-gqa", **undivided), FullySharded
    )
    narrow = cell("zero3", "single", model="causal-transformer-tiny-gqa", precision="bf16", **undivided)
    assert_sends_its_closed_form(pool, narrow)
    assert padded_elements(torch.Size((4, 1152, 3584)), 1024) == 5 * 1024 * 3584  # of 4,608 rows


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


def test_a_tied_embedding_is_no_unit() -> None:
    with pytest.raises(Unsupported, match="no word embedding apart from its head; use wrap: blocks"):
        tracing.trace(asked({"wrap": "embedding"}, model_options={"tied": True}))


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


#: smaller than some gradients, and than most two of them
SMALL = {"backend": "zero1", "gradients": "late", "bucket_elements": 3000}


def late(strategy: str = "lasp", micro_batches: int = 1, **changed: Any) -> Cell:
    training = {**SMALL, "micro_batches": micro_batches, **changed.pop("training", {})}
    return one_device.cell("zero1", strategy, training=training, **changed)


@pytest.mark.parametrize("on", ["device", slow("host")])
def test_gradients_and_updates_are_those_of_one_device(pool: RankPool, on: str) -> None:
    asked = late("tensor_parallel", 2, sizes={"dp": 2, "tp": 2}, training={"optimizer": on})
    one_device.assert_right(pool, asked, ShardedOptimizer)


class NotSummed(ShardedOptimizer):
    """A rank's part is that of its own gradient."""

    def synchronize(self) -> None:
        with mock.patch.object(zero1, "all_reduce", lambda x, group: x):
            super().synchronize()


class PartsTakenTooLate(ShardedOptimizer):
    """The buffer has been filled again before a rank's part is taken out of it."""

    def synchronize(self) -> None:
        given: list[tuple[nn.Parameter, Tensor]] = []
        real = LateGradients.finish

        def finish(late: LateGradients, take: Take) -> None:
            real(late, lambda p, gradient: given.append((p, gradient)))
            for p, gradient in given:
                take(p, gradient)

        with mock.patch.object(LateGradients, "finish", finish):
            super().synchronize()


@pytest.mark.parametrize("fault", [NotSummed, PartsTakenTooLate])
def test_planted_faults_are_seen(pool: RankPool, fault: type[ShardedOptimizer]) -> None:
    """By a rank whose part is not all in the last buffer."""
    asked = late(sizes={"dp": 2})
    of_ranks = pool.run(asked.mesh_sizes, one_device.errors_of_rank, asked, fault)
    assert max(e for errors in of_ranks for n, e in errors.items() if n.startswith("gradient 0")) > 1e-3


def test_closed_form_virtual_and_real_ranks_send_the_same(pool: RankPool) -> None:
    one_device.assert_sends_its_closed_form(
        pool, late(micro_batches=2, sizes={"sp": 2, "dp": 2}, precision="fp16")
    )


def test_a_rank_holds_no_gradient_in_forward() -> None:
    """Between steps float32 weights and moments of a shard, no buckets and no float32 gradient; after
    backward half gradients, beside the buffer, which a large one makes the peak."""
    asked = one_device.heavy("zero1", 8)
    settings = asked.training.model_dump() | SMALL
    elements, peaks = model_parameters(asked), {}
    for n in (3000, 2 * elements):
        training = settings | {"bucket_elements": n}
        found = VirtualEngine().measure(Cell.model_validate(asked.model_dump() | {"training": training}))
        assert found.peak_held["optimizer_state"] == pytest.approx((4 + 8) / 8 * elements, rel=0.02)
        assert found.peak_held["gradients"] == 0
        peaks[n] = found.peak_memory_bytes or 0
    small, large = peaks.values()
    assert large - small == pytest.approx(2 * 2 * elements, rel=0.02)
    assert small < (one_device.heavy_run("zero1", 8).peak_memory_bytes or 0) - 2 * elements


def test_a_buffer_has_elements() -> None:
    with pytest.raises(ValueError, match="bucket_elements is at least 1, not 0"):
        VirtualEngine().measure(late(training={"bucket_elements": 0}))
