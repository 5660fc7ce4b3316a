"""Cells of tiny models on which short cuts are held to the plain way, and which of them each takes."""

from __future__ import annotations

import dataclasses
from typing import Any

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


def wide(strategy: str, model: str, options: dict[str, Any] | None = None, **changes: Any) -> Cell:
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


def deep(strategy: str, model: str = _CAUSAL, **changes: Any) -> Cell:
    """A cell of so many layers that few are traced."""
    options = {"layers": LAYERS, **changes.pop("model_options", {})}
    return wide(strategy, model, options, **{"training": {"backend": "zero3"}, **changes})


def piped(
    backend: str = "legacy_ddp", stages: int = 3, replicas: int = 1, micro_batches: int = 10, **options: Any
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

_FULL = {"recompute": "full"}
_TILES = {"hidden": 6 * N, "heads": N, "mlp_tile": 7, "loss_tile": 5}
#: by name: a cell, and the short cuts that it must take, of "steps" (of rings and the like), "micro-batches",
#: "stages", "layers", "ranks" and "pieces"; any may take that of pieces
CELLS: dict[str, tuple[Cell, set[str]]] = {
    # rings, rounds of heads, and chunks of positions
    "contiguous": (ring(), {"steps", "ranks"}),
    "striped": (ring(placement="striped"), {"steps", "ranks"}),
    "zigzag": (ring(placement="zigzag"), {"steps", "ranks"}),
    "full attention": (ring("transformer-2d-tiny"), {"steps", "ranks"}),
    "linear attention": (ring("tnl-tiny"), {"steps", "ranks"}),
    "gathered, striped": (
        wide("all_gather_kv", _CAUSAL, strategy_options={"placement": "striped"}),
        {"steps", "ranks"},
    ),
    "RSA": (wide("ring_self_attention", _BERT), {"steps", "ranks"}),
    "RSA, square masks": (wide("ring_self_attention", _BERT, {"mask_shape": "square"}), {"steps", "ranks"}),
    "RSA, Linformer": (wide("ring_self_attention", "bert-tiny-linformer"), {"ranks"}),
    "checkpointing": (
        wide("ring_self_attention", _BERT, {"checkpointing": True, "dropout": 0.1}),
        {"steps", "ranks"},
    ),
    "ring, inference": (ring(training={"step": "inference"}), {"steps", "ranks"}),
    "tiles": (
        ring(batch=16, model_options={**_FULL, **_TILES}, training={"backend": "zero3"}),
        {"steps", "ranks"},
    ),
    "tiles, inference": (
        ring(batch=16, model_options=_TILES, training={"step": "inference"}),
        {"steps", "ranks"},
    ),
    "zero1": (
        ring(sizes={"dp": 2, "sp": N}, training={"backend": "zero1", "micro_batches": 2}),
        {"steps", "ranks"},
    ),
    "ring in a pipeline": (
        wide("ring_self_attention", _BERT, sizes={"pp": 2, "sp": N}, training={"micro_batches": 2}),
        {"steps"},
    ),
    "lasp": (wide("lasp", "tnl-tiny"), set()),
    "replicas of lasp": (wide("lasp", "tnl-tiny", sizes={"dp": 4, "sp": 8}), {"ranks"}),
    "rounds": (wide("upipe", _CAUSAL, sizes={"sp": 2}), {"steps", "ranks"}),
    "rounds of groups": (wide("upipe", _GQA, {"kv_heads": 2}, sizes={"sp": 2}), {"steps", "ranks"}),
    "rounds of rings": (
        wide("upipe+ring_attention", _CAUSAL, sizes={"sp": 2, "cp": N}),
        {"steps", "ranks"},
    ),
    "rounds with sinks": (wide("upipe", _CAUSAL, {"sinks": True}, sizes={"sp": 2}), {"steps", "ranks"}),
    "chunks": (
        wide("fpdt", _CAUSAL, sizes={"sp": 4}, strategy_options={"chunk": 4}),
        {"steps", "ranks"},
    ),
    "chunks of layers that run again": (
        wide("fpdt", _GQA, {"kv_heads": 2, **_FULL}, sizes={"sp": 4}, strategy_options={"chunk": 4}),
        {"steps", "ranks"},
    ),
    "chunks on the device": (
        wide("fpdt", _CAUSAL, sizes={"sp": 4}, strategy_options={"chunk": 4, "offload": False}),
        {"steps", "ranks"},
    ),
    "chunks of windows": (
        wide(
            "fpdt",
            _CAUSAL,
            {"window": 40, "sinks": True, "documents": (51, 13)},
            sizes={"sp": 4},
            strategy_options={"chunk": 4},
        ),
        {"steps", "ranks"},
    ),
    # micro-batches
    "micro-batches": (piped(), {"micro-batches"}),
    "recomputed micro-batches": (
        piped(dropout=0.1, attention_dropout=0.1, attention="unfused", recompute="full"),
        {"micro-batches"},
    ),
    "micro-batches with checkpoints on the host": (
        piped(recompute="full", checkpoints="host"),
        {"micro-batches"},
    ),
    **{
        f"micro-batches under {backend}": (
            piped(backend, 3 if backend in ("ddp", "megatron") else 1, 2),
            {"micro-batches"} | ({"ranks"} if backend not in ("ddp", "megatron") else set()),
        )
        for backend in ("ddp", "megatron", "fsdp_flat", "zero2", "zero3")
    },
    # stages
    "stages": (staged(), {"micro-batches", "stages"}),
    # of stages that hold all micro-batches, one is traced
    "gpipe": (staged(batch=6, training={"schedule": "gpipe", "micro_batches": 3}), {"stages"}),
    "few micro-batches": (staged(batch=8, training={"micro_batches": 4}), {"stages"}),
    # too few for a steady state behind the warm-up
    "no steady state": (staged(13), {"micro-batches"}),
    # Adam's moments are made by the first of two steps, and gradients summed in the last backward
    "stages of two steps": (
        staged(training={"backend": "megatron", "moments": "later", "steps": 2}),
        {"micro-batches", "stages"},
    ),
    "stages with checkpoints on the host": (
        staged(model_options={"layers": PP, "recompute": "full", "checkpoints": "host"}),
        {"micro-batches", "stages"},
    ),
    # the first and the last of a ring do not do the same; what a stage sends is gathered on the next
    "stages of nested strategies": (
        staged(
            strategy="megatron_sp+lasp",
            sizes={"pp": PP, "tp": 2, "sp": 2},
            model="tnl-tiny",
            model_options={"layers": PP, "attention_norm": "head"},
        ),
        {"micro-batches", "stages"},
    ),
    "interleaved stages": (
        staged(
            batch=8,
            model_options={"layers": 2 * PP},
            training={"schedule": "interleaved", "virtual_stages": 2, "micro_batches": 8},
        ),
        set(),
    ),
    **{
        f"{pp} stages under {backend}": (
            staged(
                27,
                batch=54,
                sizes={"pp": pp, "tp": 2, "dp": 2},
                model_options={"layers": pp, "checkpointing": True},
                training={"backend": backend},
            ),
            {"micro-batches", "stages"} | ({"ranks"} if pp == 12 else set()),
        )
        for pp, backend in ((10, "zero1"), (12, "ddp"), (12, "legacy_ddp"))
    },
    # layers
    "layers of a ring": (
        deep("ring_attention", sizes={"sp": 8}, model_options=_FULL),
        {"layers", "steps", "ranks"},
    ),
    # a bucket of all gradients, which may be full in a deeper model
    "layers in a bucket": (deep("single", training={"backend": "ddp"}), set()),
    # two kinds of layers; two steps of two micro-batches
    "layers of two kinds": (
        deep(
            "lasp2h",
            "linear-llama3-tiny-hybrid",
            sizes={"sp": 2, "dp": 2},
            batch=8,
            model_options={"layers": 2 * LAYERS},
            training={"backend": "zero2", "micro_batches": 2, "steps": 2, "moments": "later"},
        ),
        {"layers", "ranks"},
    ),
    "layers of an inference": (
        deep("ring_attention", training={"step": "inference"}),
        {"layers", "steps", "ranks"},
    ),
    "a layer left over": (
        deep("ulysses", model_options={**_FULL, "recompute_layers": 2, "layers": 2 * LAYERS + 1}),
        {"layers", "ranks"},
    ),
    "first layers alone": (
        deep(
            "ulysses",
            model_options={
                **_FULL,
                "recompute_layers": 2,
                "recompute_method": "block",
                "layers": 2 * LAYERS,
            },
        ),
        {"layers", "ranks"},
    ),
    "layers on the host": (
        deep("fpdt", model_options={**_FULL, "checkpoints": "host"}),
        {"layers", "ranks"},
    ),
    "optimizer on the host": (
        deep("ulysses", training={"backend": "zero3", "optimizer": "host"}),
        {"ranks"},
    ),
    "layers of micro-batches": (
        deep("ring_attention", batch=16, training={"backend": "zero3", "micro_batches": 8}),
        {"layers", "steps", "micro-batches", "ranks"},
    ),
    "prefetch": (
        deep("ulysses", training={"backend": "zero3", "forward_prefetch": 1}),
        {"layers", "ranks"},
    ),
    "uneven stages": (
        deep(
            "ulysses",
            sizes={"pp": 2, "sp": 2},
            model_options={"layers": 2 * LAYERS + 1},
            training={"backend": "ddp", "stage_layers": [LAYERS, LAYERS + 1]},
        ),
        set(),
    ),
    # one buffer, which is all that grows
    "main gradients": (deep("ulysses", training={"backend": "megatron"}), {"layers", "ranks"}),
    "buckets of Megatron": (
        deep(
            "ulysses",
            training={"backend": "megatron", "overlap_grad_reduce": True, "bucket_size": 10_000},
        ),
        {"layers", "ranks"},
    ),
    "one buffer for forward and backward": (deep("ulysses", training={"backend": "fsdp1"}), {"ranks"}),
    # a sixteenth of the weights is a part of the embedding; of a small one in models of up to 5 layers alone
    **{
        f"shards of {words} weights": (
            deep(
                "ulysses",
                model_options={"hidden": 4096, "vocabulary": vocabulary},
                training={"backend": "zero1"},
            ),
            {"ranks", *layers},
        )
        for words, vocabulary, layers in (("few", 65536, ["layers"]), ("all", 7168, []))
    },
    # of weights of fewer rows than there are ranks, fully_shard cuts columns
    "columns": (
        cell(
            "ulysses",
            sizes={"dp": 32, "sp": 2},
            batch=32,
            training={"backend": "zero3"},
            model_options={"hidden": 48, "inner": 128},
        ),
        {"ranks", "pieces"},
    ),
    # meshes of several axes, across nodes and within one
    "a node": (wide("ring_self_attention", _BERT, sizes={"sp": 4}), {"ranks"}),
    "replicas across nodes": (
        wide("ring_self_attention", _BERT, sizes={"dp": 2, "sp": N}),
        {"steps", "ranks"},
    ),
    "replicas of stages": (
        wide(
            "ring_self_attention",
            _BERT,
            {"layers": 2},
            sizes={"dp": 4, "pp": 2, "sp": 4},
            batch=16,
            training={"micro_batches": 4},
        ),
        {"ranks"},
    ),
    "stages across nodes": (
        wide("ring_self_attention", _BERT, {"layers": 2}, sizes={"pp": 2, "sp": 8}),
        {"steps"},
    ),
}
