"""Cells of tiny models, with those on which short cuts are held to the plain way, cards of a
chosen size; and traces compared field by field."""

import dataclasses
from collections import defaultdict
from collections.abc import Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import check_sizes
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.trace.meter import CommunicationMeter
from spbench.impls.layout import Unsupported
from spbench.impls.registries import all_backends, all_strategies, model_preset
from spbench.impls.strategies.nesting import nesting
from tests.cells import make_cell
from tests.grid import data

AXES = {"tensor_parallel": "tp", "ring_self_attention": "sp"}


def cell_of(strategy: str, n: int, **changes: Any) -> Cell:
    sizes = {AXES[strategy]: n} if strategy in AXES else {}
    defaults = {"model": "bert-tiny", "strategy": strategy, "sizes": sizes, "batch": 3, "seq_len": 24}
    return Cell.model_validate(defaults | changes)


def written_cell(fields: dict[str, Any]) -> Cell:
    """Of fields in YAML, where ``ranks`` along the strategy's axis and ``replicas`` stand for sizes; fields
    that no cell has are those of the test."""
    along, replicas = fields.get("ranks"), fields.get("replicas")
    sizes = nesting(fields["strategy"]).sizes_for(along) if along else {}
    of_cell = {name: value for name, value in fields.items() if name in Cell.model_fields}
    return Cell.model_validate({"sizes": sizes | ({"dp": replicas} if replicas else {})} | of_cell)


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


#: ranks of rings and of other sequences, of whose steps some are left out
N = 16
#: options with which tiny models can be spread over N ranks, where they have them
_WIDER = {"heads": N, "hidden": 6 * N, "temporal": N}
#: layers of a model of which few are traced, in tests
LAYERS = 7
_CAUSAL, _GQA, _BERT = "causal-transformer-tiny", "causal-transformer-tiny-gqa", "bert-tiny"
#: strategies of packed documents, and others of causal attention
_PACKED = ("dynamic_cp", "group_cast")
_CHUNKED = ("all_gather_kv", "fpdt", "ring_attention", "plain_ring_attention", "ulysses", "upipe")
#: the model that each strategy is traced on; the others run BERT
_MODELS = {
    "lasp": "tnl-tiny",
    "lasp2": "tnl-tiny",
    "lasp2h": "linear-llama3-tiny-hybrid",
    "dsp": "st-dit-tiny",
    "gathered_latents": "indexer-tiny",
    "megatron_sp": _CAUSAL,
    **dict.fromkeys((*_CHUNKED, *_PACKED), _CAUSAL),
}


def cell(strategy: str, **changes: Any) -> Cell:
    """A small cell of a strategy, three ranks along each axis."""
    model = _MODELS.get(strategy, _BERT)
    sizes = dict.fromkeys(all_strategies()[strategy].axes, 3)
    length = 72 if model.startswith("st-dit") else 48
    return make_cell(model, strategy, sizes, 6, length, **{"cluster": "dgx-a100", **changes})


def wide(strategy: str, model: str = _CAUSAL, options: dict[str, Any] | None = None, **changes: Any) -> Cell:
    """A cell of N ranks."""
    has = {field.name for field in dataclasses.fields(model_preset(model))}
    wider: dict[str, Any] = {name: value for name, value in _WIDER.items() if name in has}
    if "leading" in has:
        wider["leading"] = (N, *model_preset(model).leading[1:])
    sizes = nesting(strategy).sizes_for(N) if nesting(strategy).axes else {}
    fields = {"model_options": wider | (options or {}), "cluster": "dgx-a100", **changes}
    # two chunks a rank, and two places a frame
    return make_cell(model, strategy, sizes, 4, 4 * N, **fields)


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
    sizes, training = (
        {"pp": stages, "tp": 2, "dp": replicas},
        {"backend": backend, "micro_batches": micro_batches},
    )
    fields = {"model_options": {"layers": max(stages, 2), **options}, "training": training}
    n = replicas * micro_batches
    return make_cell("gpt3-tiny", "tensor_parallel", sizes, n, 16, "fp16", cluster="dgx-a100", **fields)


#: ranks of the longest pipelines, a layer each: the first holds 7 micro-batches, the last none
PP = 8


def staged(micro_batches: int = 17, **changes: Any) -> Cell:
    """A pipeline of so many stages that some are put together from others."""
    training = {"micro_batches": micro_batches, **changes.pop("training", {})}
    fields = {"model_options": {"layers": PP}, "cluster": "dgx-a100", **changes, "training": training}
    return make_cell(_CAUSAL, "tensor_parallel", {"pp": PP, "tp": 2}, 2 * micro_batches, 16, **fields)


#: small cells of each strategy, backend and kind of step
SMALL = {
    **{strategy: cell(strategy) for strategy in all_strategies()},
    **{strategy: cell(strategy, model_options={"documents": [30, 2, 10, 6]}) for strategy in _PACKED},
    **{
        f"lasp under {backend}": cell("lasp", sizes={"dp": 2, "sp": 2}, training={"backend": backend})
        for backend in all_backends()
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
CELLS: dict[str, tuple[Cell, set[str]]] = {name: _made(*line) for name, line in data(__file__).items()}


def traced_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of layers of the cells that are traced from now on."""
    layers: list[int] = []
    traced = tracing._traced

    def counted(cell: Cell, *others: Any) -> Trace:
        layers.append(cell.model_options["layers"])
        return traced(cell, *others)

    monkeypatch.setattr(tracing, "_traced", counted)
    return layers


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


def sent_bytes(meter: CommunicationMeter) -> dict[tuple[str, str], Fraction]:
    """The bytes that one rank sent (mean over its group), by phase and collective."""
    sent: defaultdict[tuple[str, str], Fraction] = defaultdict(Fraction)
    for (phase, collective, _), nbytes in meter.sent_bytes_by_axis().items():
        sent[phase, collective] += nbytes
    return dict(sent)
