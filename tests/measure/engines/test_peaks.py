"""Peak memory of virtual ranks is that of real ones, byte for byte, for every strategy, model and backend, in
steps and in set-up.

Around collectives real ranks make and drop a few more tensors (2 to 3% more births and deaths). One of them
can live at the peak: Gloo sums what it reduce-scatters in a copy of it, but for activations in half
precision, and virtual ranks make one here too.

Peaks are those of torch's own MemTracker, to the byte, for every strategy and backend. MemTracker hooks
itself into every module. There is nothing to compare with where that is refused (a module is called more than
once, as in a pipeline or in a second step), and where the hooks keep tensors alive that the step alone does
not (with checkpointing, or where the peak lies in backward: up to 1% of it), nor where some wait on the host,
which it does not tell apart. The peak of a training step as torch's own MemTracker counts it, on fake
tensors: an independent check.
"""

from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.setup import set_up
from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.impls import collectives
from spbench.impls.models.model import models
from spbench.impls.registries import backends, strategies
from tests.measure.engines.cells import ATTEMPTS, SMALL, on_a_real_rank, seen, supported
from tests.slow import mostly_slow, slow_ones_are_left_out

#: sequence lengths that 2 and 4 ranks divide, of models whose positions lie on a grid
LENGTHS = {"st-dit-tiny": 288, "transformer-2d-tiny": 576, "transformer-3d-tiny": 960}
#: the combinations of the default run, of strategies with unlike messages; all others are slow tests
DEFAULT_MODELS = {
    "tensor_parallel": "bert-tiny",
    "lasp": "tnl-tiny",
    "lasp2h": "linear-llama3-tiny-hybrid",
    "dsp": "st-dit-tiny",
    "ring_attention": "causal-transformer-tiny",
    "ulysses": "causal-transformer-tiny",
    "megatron_sp": "causal-transformer-tiny",
}
#: options of torch's fully_shard
SHARDING: dict[str, dict[str, Any]] = {
    "torchtitan": {
        "wrap": "embedding",
        "reshard_rest": False,
        "reduce_dtype": "fp32",
        "state_dtype": "weights",
    },
    "whole": {"wrap": "whole"},
    "device": {"initialize": "device"},
    "optimizer-on-host": {"optimizer": "host", "micro_batches": 2},
    "parameters-on-host": {"optimizer": "host", "parameters": "host", "micro_batches": 2},
}


def combination(
    strategy: str, model: str, backend: str, n: int, training: Mapping[str, Any] = {}, **options: Any
) -> Cell:
    sizes = dict.fromkeys(strategies()[strategy].axes, n)
    settings: dict[str, Any] = {
        "model": model,
        "strategy": strategy,
        "sizes": sizes if backend == "legacy_ddp" else {**sizes, "dp": 2},
        "batch": 4,
        "seq_len": LENGTHS.get(model, 48),
        "precision": "bf16",
        "training": {"backend": backend, **training},
        "model_options": options,
    }
    return Cell.model_validate(settings)


def combinations(*, every: bool) -> Iterator[Any]:
    """Every strategy with every tiny model that it supports (or but one), and every backend around LASP; and
    layers that keep the results of some operators."""
    for strategy in strategies():
        for model in (name for name in models() if "-tiny" in name):
            for n in (2, 4):
                default = n == 2 and model == DEFAULT_MODELS.get(strategy)
                if not (every or default):
                    continue
                cell = combination(strategy, model, "legacy_ddp", n)
                if not supported(cell):
                    continue
                yield pytest.param(
                    cell, id=f"{strategy}-{model}-{n}", marks=[] if default else pytest.mark.slow
                )
                if strategy == "single":
                    break
    for backend in sorted(backends()):
        cell = combination("lasp", "tnl-tiny", backend, 2)
        default = backend == "zero3"  # pipelines have megatron
        yield pytest.param(cell, id=f"{backend}-around-lasp", marks=[] if default else pytest.mark.slow)
    instances = {"distributed_optimizer": True, "num_distributed_optimizer_instances": 2}
    yield pytest.param(combination("lasp", "tnl-tiny", "megatron", 2, instances), id="instances", marks=SLOW)
    for name, training in SHARDING.items():
        cell = combination("ulysses", "causal-transformer-tiny", "zero3", 2, training)
        yield pytest.param(cell, id=name, marks=[] if name == "parameters-on-host" else SLOW)
    for backend in ("ddp", "fsdp_flat", "legacy_ddp", "megatron", "zero1", "zero2"):
        host = {"optimizer": "host", **({"distributed_optimizer": True} if backend == "megatron" else {})}
        cell = combination("lasp", "tnl-tiny", backend, 2, host)
        marks = [] if backend == "megatron" else SLOW
        yield pytest.param(cell, id=f"{backend}-optimizer-on-host", marks=marks)
    for name, training in PIPELINES.items():
        yield pytest.param(pipeline(training), id=name, marks=[] if name in DEFAULT_PIPELINES else SLOW)
    for name in ("1f1b", "overlapped"):
        cell = pipeline(PIPELINES[name], **ON_HOST)
        yield pytest.param(cell, id=f"{name}-checkpoints-on-host", marks=SLOW)
    for strategy, backend in (("tensor_parallel", "legacy_ddp"), ("ulysses", "zero3")):
        options = {"separate_projections": True, "recompute": "operators"}
        cell = combination(strategy, "causal-transformer-tiny-gqa", backend, 2, **options)
        marks = [] if strategy == "tensor_parallel" else [pytest.mark.slow]
        yield pytest.param(cell, id=f"{strategy}-keeps-operators", marks=marks)
    by_layer = {"pre_norm": True, "library": "transformer-engine", "mask_shape": "by_layer"}
    cell = combination("ulysses", "causal-transformer-tiny", "zero3", 2, **ON_HOST, layers=4)
    yield pytest.param(cell, id="ulysses-checkpoints-on-host", marks=SLOW)
    # of a rank's chunk a part, all of it, and of two chunks
    for strategy, window, n in (
        ("ring_attention", 9, 2),
        ("all_gather_kv", 9, 2),
        ("ring_attention", 20, 4),
        ("all_gather_kv", 20, 4),
        ("ulysses", 9, 2),
        ("tensor_parallel", 9, 2),
    ):
        cell = combination(
            strategy, "causal-transformer-tiny-gqa", "legacy_ddp", n, window=window, sinks=True
        )
        marks = [] if n == 2 and strategy == "ring_attention" else SLOW
        yield pytest.param(cell, id=f"{strategy}-window-{n}", marks=marks)
    tiles = {"mlp_tile": 20, "loss_tile": 20}
    for strategy, backend in (
        ("ulysses", "zero3"),
        ("tensor_parallel", "megatron"),
        ("ring_attention", "ddp"),
    ):
        options = (ON_HOST if strategy == "ulysses" else {}) | tiles | {"layers": 4, "inner": 48 * 16}
        cell = combination(strategy, "causal-transformer-tiny", backend, 2, **options)
        yield pytest.param(cell, id=f"{strategy}-tiles", marks=SLOW)
    cell = pipeline(PIPELINES["1f1b"], **tiles, cross_entropy="fused", inner=48 * 16)
    yield pytest.param(cell, id="1f1b-tiles")
    # without megatron_sp: what it reduce-scatters when a layer runs again Gloo sums without a copy
    for strategy in ("ring_attention", "tensor_parallel", "all_gather_kv", "lasp"):
        model = "tnl-tiny" if strategy == "lasp" else "causal-transformer-tiny"
        cell = combination(strategy, model, "ddp", 2, **ON_HOST, layers=4)
        yield pytest.param(cell, id=f"{strategy}-checkpoints-on-host", marks=SLOW)
    for model, options in (("bert-tiny", by_layer), ("gpt3-tiny", {"qk_norm": True})):
        cell = combination("tensor_parallel", model, "legacy_ddp", 2, **options)
        yield pytest.param(cell, id=f"{model}-{[*options][-1]}", marks=SLOW)


ON_HOST = {"recompute": "full", "checkpoints": "host"}
#: pipelines of two stages, by what is said of them
INTERLEAVED = {"schedule": "interleaved", "virtual_stages": 2}
PIPELINES: dict[str, dict[str, Any]] = {
    "1f1b": {},
    "interleaved": INTERLEAVED,
    "overlapped": {**INTERLEAVED, "overlap_p2p_communication": True},
    "groups": {**INTERLEAVED, "overlap_p2p_communication": True, "microbatch_group_size": 3},
    "uneven": {**INTERLEAVED, "overlap_p2p_communication": True, "stage_layers": [0, 2, 2, 0]},
    "uneven-1f1b": {"stage_layers": [3, 1]},
}
DEFAULT_PIPELINES = ("overlapped",)
SLOW = pytest.mark.slow


def pipeline(training: dict[str, Any], **options: Any) -> Cell:
    settings: dict[str, Any] = {
        "model": "causal-transformer-tiny",
        "model_options": {"layers": 4, **options},
        "strategy": "single",
        "sizes": {"pp": 2},
        "batch": 5 if "microbatch_group_size" in training else 4,
        "seq_len": 48,
        "precision": "bf16",
    }
    micro_batches = settings["batch"]
    return Cell.model_validate(
        settings | {"training": {"backend": "megatron", "micro_batches": micro_batches, **training}}
    )


_reduce_scatter = collectives._reduce_scatter_into


def as_gloo_does(output: Tensor, input: Tensor, **how: Any) -> Any:
    """A reduce-scatter with memory for a copy of what is given."""
    _copy = torch.empty_like(input)
    return _reduce_scatter(output, input, **how)


class CopiedAsItIsWaitedFor:
    """A reduce-scatter in half precision that has begun, of which Gloo makes its copy at the end."""

    def __init__(self, work: dist.Work, shape: torch.Size, dtype: torch.dtype):
        self.work, self.shape, self.dtype = work, shape, dtype

    def wait(self) -> None:
        _copy = torch.empty(self.shape, dtype=self.dtype)
        self.work.wait()


def with_copies(output: Tensor, input: Tensor, **how: Any) -> Any:
    if input.dtype == torch.float32:
        return as_gloo_does(output, input, **how)
    work = _reduce_scatter(output, input, **how)
    return CopiedAsItIsWaitedFor(work, input.shape, input.dtype) if how.get("async_op") else work


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = not slow_ones_are_left_out(metafunc.config)
    if "cell" in metafunc.fixturenames:
        metafunc.parametrize("cell", [*combinations(every=every)])


def test_real_peak_is_the_virtual_one(pool: RankPool, cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they send is the same, too, and what the closed forms say."""
    monkeypatch.setattr(collectives, "_reduce_scatter_into", with_copies)
    monkeypatch.setattr(dist, _reduce_scatter.__name__, as_gloo_does)  # which torch's fully_shard calls
    virtually = [seen(tracing.trace(cell, rank)) for rank in range(cell.sizes.world)]
    peaks = [found.peak for found in virtually]
    lowest = [10**18] * len(peaks)
    for attempt in range(ATTEMPTS):
        really = pool.run(cell.sizes.by_axis, on_a_real_rank, cell, 0.001 * 4**attempt)
        lowest = [min(low, found.peak) for low, found in zip(lowest, really, strict=True)]
        if lowest == peaks:
            break
    assert lowest == peaks
    assert [found.setup_peak for found in really] == [found.setup_peak for found in virtually]
    assert [found.host for found in really] == [found.host for found in virtually]
    assert [found.counts for found in really] == [found.counts for found in virtually]
    assert not any(found.difference for found in (*really, *virtually))


_ITERATED = {"pipeline", "dropout and checkpointing", "two steps", "checkpoints on the host"}
NAMES = SMALL.keys() - _ITERATED - {"fpdt"}


def unrounded_peak(log: MemoryLog) -> int:
    """The largest sum of bytes of live storages, without the granules of an allocator and the workspaces of
    libraries and kernels, which are no tensors."""
    events, sizes = np.asarray(log.events), np.asarray(log.sizes)
    sizes[[number for number, tag in log.tags.items() if tag == "workspaces"]] = 0
    return int(np.cumsum(np.sign(events) * sizes[np.abs(events) - 1]).max())


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    "name", mostly_slow(sorted(NAMES), "ring_self_attention", "lasp", "lasp under zero3", "ulysses")
)
def test_the_peak_is_that_of_torchs_own_tracker(name: str) -> None:
    assert unrounded_peak(tracing.trace(SMALL[name]).memory) == tracked_peak(SMALL[name])


def test_a_storage_that_is_missed_is_seen() -> None:
    log = tracing.trace(SMALL["ring_self_attention"]).memory
    assert log.tags
    log.sizes[next(iter(log.tags))] -= 4
    assert unrounded_peak(log) == tracked_peak(SMALL["ring_self_attention"]) - 4


def tracked_peak(cell: Cell, rank: int = 0) -> int:
    """Bytes of storages, not rounded, that MemTracker saw at most during set-up and a step of the rank."""
    with fake_mesh(cell.mesh_sizes, rank) as mesh, torch.random.fork_rng(devices=[]), FakeTensorMode():
        tracker = MemTracker()
        with tracker:
            training, inputs = set_up(cell, mesh)
            training.step(inputs, lambda phase: nullcontext())
        peak = tracker.get_tracker_snapshot("peak")
        # what stands on the meta device holds no memory
        (by_kind,) = (kinds for device, kinds in peak.items() if device.type != "meta")
    return int(by_kind["Total"])
