"""Peak memory of virtual ranks is that of real ones, byte for byte, for every strategy, model and backend, in
steps and in set-up.

Peaks are those of torch's own MemTracker, to the byte, for every strategy and backend. MemTracker hooks
itself into every module. There is nothing to compare with where that is refused (a module is called more than
once, as in a pipeline or in a second step), and where the hooks keep tensors alive that the step alone does
not (with checkpointing, or where the peak lies in backward: up to 1% of it), nor where some wait on the host,
which it does not tell apart. The peak of a training step as torch's own MemTracker counts it, on fake
tensors: an independent check.
"""

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.setup import set_up
from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.impls.registries import all_backends, all_models, all_strategies
from tests.grid import cases, data
from tests.measure.engines.cells import SMALL, supported, written_cell
from tests.measure.engines.real_ranks import assert_real_ranks_are_as_virtual_ones
from tests.slow import mostly_slow, slow_ones_are_left_out

#: sequence lengths that 2 and 4 ranks divide, of models whose positions lie on a grid
LENGTHS = {"st-dit-tiny": 288, "transformer-2d-tiny": 576, "transformer-3d-tiny": 960}
DEFAULT_MODELS = data(__file__)["DEFAULT_MODELS"]


def every_strategy(*, default: bool) -> Iterator[Any]:
    """With every tiny model that it supports, and every backend around LASP: those of the default run, or the
    others."""
    of_strategies = [
        {"strategy": name, "model": model, "ranks": n, "seq_len": LENGTHS.get(model, 48)}
        for name, cls in all_strategies().items()
        for model in all_models()
        for n in ((2, 4) if cls.axes else (0,))
        if "-tiny" in model and default == (n == 2 and model == DEFAULT_MODELS.get(name))
    ]
    lasp = {"strategy": "lasp", "model": "tnl-tiny", "ranks": 2, "seq_len": 48}
    of_backends = [
        {**lasp, "replicas": 1 if name == "legacy_ddp" else 2, "training": {"backend": name}}
        for name in sorted(all_backends())
        if default == (name == "zero3")  # pipelines have megatron
    ]
    for chosen in of_strategies + of_backends:
        fields = {"compare": "peaks", "batch": 4, "precision": "bf16"} | chosen
        if supported(written_cell(fields)):
            name = "-".join(map(str, chosen.values()))
            yield pytest.param(fields, id=name, marks=[] if default else pytest.mark.slow)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "fields" in metafunc.fixturenames:
        others = () if slow_ones_are_left_out(metafunc.config) else every_strategy(default=False)
        written = cases(Path(__file__).with_name("real_ranks.yaml"))
        metafunc.parametrize("fields", [*every_strategy(default=True), *others, *written])


def test_real_ranks_are_as_virtual_ones(pool: RankPool, fields: dict[str, Any]) -> None:
    """In what they send; of some in their peaks, in steps and in set-up, or in all that is seen."""
    assert_real_ranks_are_as_virtual_ones(pool, written_cell(fields), fields.get("compare", "messages"))


_ITERATED = {"pipeline", "dropout and checkpointing", "two steps", "checkpoints on the host"}
NAMES = SMALL.keys() - _ITERATED - {"fpdt", "gathered_latents"}  # torch's tracker fails at frozen weights


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
