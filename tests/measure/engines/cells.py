"""Cells of tiny models, with those on which short cuts are held to the plain way, cards of a
chosen size, what the meters of one rank see, virtual or real; and traces compared field by field."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import yaml
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import check_sizes
from spbench.bench.measure.engines.setup import record_step
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import no_cyclic_collection
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.trace.meter import Operation
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.layout import Unsupported
from spbench.impls.models.model import model_preset
from spbench.impls.registries import backends, strategies
from spbench.impls.strategies.nesting import nesting
from spbench.impls.training.step import initialize

AXES = {"tensor_parallel": "tp", "ring_self_attention": "sp"}


def cell_of(strategy: str, n: int, **changes: Any) -> Cell:
    sizes = {AXES[strategy]: n} if strategy in AXES else {}
    defaults = {"model": "bert-tiny", "strategy": strategy, "sizes": sizes, "batch": 3, "seq_len": 24}
    return Cell.model_validate(defaults | changes)


def supported(cell: Cell) -> bool:
    """Whether its strategy can run a cell."""
    try:
        check_sizes(cell)
    except Unsupported:
        return False
    return True


def write_cluster(folder: Path, mib: int) -> str:
    """A cluster of cards with that many usable MiB; returns its path."""
    unknown = "{value: null, source: made up}"
    path = folder / f"card-{mib}.yaml"
    path.write_text(
        f"""
about: for tests
device:
  name: card
  memory_total_bytes: {{value: {(mib + 10) * 2**20}, source: made up}}
  memory_context_bytes: {{value: {10 * 2**20}, source: made up}}
  memory_bandwidth_bytes_per_s: {unknown}
network:
  latency_s: {unknown}
  bandwidth_bytes_per_s: {unknown}
"""
    )
    return str(path)


def approximately(value: Any) -> Any:
    """As the value, but for what sums of many numbers are off by."""
    if isinstance(value, Mapping):
        return {name: approximately(each) for name, each in value.items()}
    if isinstance(value, list):
        return [approximately(each) for each in value]
    return pytest.approx(value, rel=1e-9, abs=1e-12) if isinstance(value, float) else value


#: Gloo's thread lets go of a tensor a moment after a collective has ended, and on a busy machine later than
#: the recorder waits: a real rank's peak can then be too high, by chance. It is never too low, so the lowest
#: of a few attempts is compared, exactly.
ATTEMPTS = 3


@dataclasses.dataclass
class Seen:
    """What the meters of one rank saw."""

    counts: Counter[Operation]
    difference: list[dict[str, Any]]
    peak: int
    setup_peak: int | None
    phase: str
    held: dict[str, int]
    operations: int
    host: int | None


def seen(trace: Trace) -> Seen:
    peak, measured = trace.memory.peak(), trace.measurement(None)
    return Seen(
        trace.communication.counts,
        measured.formula_difference,
        peak.nbytes,
        measured.setup_peak_memory_bytes,
        peak.phase,
        peak.held,
        len(trace.memory.events),
        measured.peak_host_memory_bytes,
    )


def on_a_real_rank(mesh: DeviceMesh, cell: Cell, settle_s: float) -> Seen:
    recorder = Recorder(mesh, settle_s)
    with recorder, no_cyclic_collection():
        record_step(cell, mesh, recorder, torch.Generator().manual_seed(0), partial(initialize, seed=0))
    return seen(Trace.of(cell, dist.get_rank(), recorder))


def on_real_ranks(
    pool: RankPool, sizes: Mapping[str, int], cell: Cell, wanted: Sequence[Seen], attempts: int = ATTEMPTS
) -> list[Seen]:
    """What each real rank saw, with the lowest peak of a few attempts, or less if they see what is wanted."""
    lowest: list[Seen] = []
    for attempt in range(attempts):
        really = pool.run(sizes, on_a_real_rank, cell, 0.001 * 4**attempt)
        lowest = [
            min(low, seen, key=lambda s: s.peak) for low, seen in zip(lowest or really, really, strict=True)
        ]
        if lowest == wanted:
            break
    return lowest


def assert_real_ranks_send_the_same(pool: RankPool, cell: Cell) -> None:
    """As the virtual ones, operation by operation, of every rank, and what the closed forms say."""
    for rank, found in enumerate(pool.run(cell.sizes.by_axis, on_a_real_rank, cell, 0.0)):
        virtually = seen(tracing.trace(cell, rank))
        assert found.counts == virtually.counts
        assert found.difference == virtually.difference == []
        assert found.counts


#: ranks of rings and of other sequences, of whose steps some are left out
N = 16
#: options with which tiny models can be spread over N ranks, where they have them
_WIDER = {"heads": N, "hidden": 6 * N, "temporal": N}
#: layers of a model of which few are traced, in tests
LAYERS = 7
#: the model that each strategy is traced on; the others run BERT
_MODELS = {
    "lasp": "tnl-tiny",
    "lasp2": "tnl-tiny",
    "lasp2h": "linear-llama3-tiny-hybrid",
    "dsp": "st-dit-tiny",
    "ulysses": "causal-transformer-tiny",
    "ring_attention": "causal-transformer-tiny",
    "all_gather_kv": "causal-transformer-tiny",
    "fpdt": "causal-transformer-tiny",
    "upipe": "causal-transformer-tiny",
    "megatron_sp": "causal-transformer-tiny",
}
_CAUSAL, _GQA, _BERT = "causal-transformer-tiny", "causal-transformer-tiny-gqa", "bert-tiny"


def cell(strategy: str, **changes: Any) -> Cell:
    """A small cell of a strategy, three ranks along each axis."""
    model = _MODELS.get(strategy, _BERT)
    settings: dict[str, Any] = {
        "model": model,
        "strategy": strategy,
        "sizes": dict.fromkeys(strategies()[strategy].axes, 3),
        "batch": 6,
        "seq_len": 72 if model.startswith("st-dit") else 48,
        "precision": "bf16",
        "cluster": "dgx-a100",
    }
    return Cell.model_validate(settings | changes)


def wide(strategy: str, model: str = _CAUSAL, options: dict[str, Any] | None = None, **changes: Any) -> Cell:
    """A cell of N ranks."""
    fields = {field.name for field in dataclasses.fields(model_preset(model))}
    wider: dict[str, Any] = {name: value for name, value in _WIDER.items() if name in fields}
    if "leading" in fields:
        wider["leading"] = (N, *model_preset(model).leading[1:])
    settings: dict[str, Any] = {
        "model": model,
        "model_options": wider | (options or {}),
        "strategy": strategy,
        "sizes": nesting(strategy).sizes_for(N) if nesting(strategy).axes else {},
        "batch": 4,
        "seq_len": 4 * N,  # two chunks a rank, and two places a frame
        "precision": "bf16",
        "cluster": "dgx-a100",
    }
    return Cell.model_validate(settings | changes)


def ring(model: str = _CAUSAL, placement: str = "contiguous", **changes: Any) -> Cell:
    return wide("ring_attention", model, strategy_options={"placement": placement}, **changes)


def deep(strategy: str = "ulysses", model: str = _CAUSAL, **changes: Any) -> Cell:
    """A cell of so many layers that few are traced."""
    options = {"layers": LAYERS, **changes.pop("model_options", {})}
    return wide(strategy, model, options, **{"training": {"backend": "zero3"}, **changes})


def piped(
    backend: str = "legacy_ddp", stages: int = 3, replicas: int = 1, micro_batches: int = 8, **options: Any
) -> Cell:
    """A pipeline of two ranks a stage, with so many micro-batches that some are not run."""
    return Cell.model_validate(
        {
            "model": "gpt3-tiny",
            "model_options": {"layers": max(stages, 2), **options},
            "strategy": "tensor_parallel",
            "sizes": {"pp": stages, "tp": 2, "dp": replicas},
            "batch": replicas * micro_batches,
            "seq_len": 16,
            "precision": "fp16",
            "cluster": "dgx-a100",
            "training": {"backend": backend, "micro_batches": micro_batches},
        }
    )


#: ranks of the longest pipelines, a layer each: the first holds 7 micro-batches, the last none
PP = 8


def staged(micro_batches: int = 17, **changes: Any) -> Cell:
    """A pipeline of so many stages that some are put together from others."""
    settings: dict[str, Any] = {
        "model": _CAUSAL,
        "model_options": {"layers": PP},
        "strategy": "tensor_parallel",
        "sizes": {"pp": PP, "tp": 2},
        "batch": 2 * micro_batches,
        "seq_len": 16,
        "precision": "bf16",
        "cluster": "dgx-a100",
    }
    training = {"micro_batches": micro_batches, **changes.pop("training", {})}
    return Cell.model_validate(settings | changes | {"training": training})


#: small cells of each strategy, backend and kind of step
SMALL = {
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


def rsa(model: str = _BERT, **changes: Any) -> Cell:
    return wide("ring_self_attention", model, **changes)


def fpdt(model: str = _CAUSAL, **changes: Any) -> Cell:
    return wide("fpdt", model, **{"sizes": {"sp": 4}, "strategy_options": {"chunk": 4}, **changes})


def _made(maker: str, given: dict[str, Any], *takes: str) -> tuple[Cell, set[str]]:
    cell: Cell = globals()[maker](**given)
    return cell, {*takes}


#: by name: a cell, and the short cuts that it must take
CELLS: dict[str, tuple[Cell, set[str]]] = {
    name: _made(*line)
    for name, line in yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text()).items()
}


def differing_fields(ours: Any, theirs: Any) -> list[str]:
    """The fields of two dataclasses of one type that have other values; arrays compared element by element,
    and by their types."""
    found = []
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(a, np.ndarray):
            same = a.dtype == b.dtype and np.array_equal(a, b)
        else:
            same = a == b
        found += [field.name] * (not same)
    return found


def differences(ours: Trace, theirs: Trace) -> Sequence[str]:
    """What is not the same in two traces: fields of the memory logs (the host's as "host_NAME"), counts of
    communication, and fields of the program, if there is one."""
    found = differing_fields(ours.memory, theirs.memory)
    found += [f"host_{name}" for name in differing_fields(ours.host_memory, theirs.host_memory)]
    found += ["counts"] * (ours.communication.counts != theirs.communication.counts)
    if ours.program is None or theirs.program is None:
        return found + ["program"] * (ours.program is not theirs.program)
    return found + differing_fields(ours.program, theirs.program)
