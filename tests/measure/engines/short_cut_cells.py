"""Cells of tiny models on which short cuts are held to the plain way, and which of them each takes."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import yaml

from spbench.bench.cell import Cell
from spbench.impls.models.model import model_preset
from spbench.impls.registries import backends, strategies
from spbench.impls.strategies.nesting import nesting

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
