"""A cell as a TOML of torchtitan, of Llama 3 or Qwen3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.tools.jobs.flags import Flag, Flags, several_ranks
from spbench.bench.tools.jobs.torchtitan import ROTATIONS, versions
from spbench.bench.tools.jobs.torchtitan_models import PRESETS, QWEN3, qwen3_options
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import Model, model_preset

#: what a flavor fixes
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocabulary", "qk_norm")


def flags(cell: Cell) -> Flags:
    """The file, to be read back; of a model that has not the sizes of a flavor there is none."""
    program = next(iter(versions().values())).program
    model = model_preset(*cell.model_arguments)
    name, flavor = next((which for which, other in _models() if _alike(model, other)), ("", ""))
    if not isinstance(model, CausalTransformerModel) or not flavor:
        known = ", ".join(f"{name} {flavor}" for (name, flavor), _ in _models())
        return Flags(program, "train.toml", (), "", (f"model {cell.model} of these sizes (it has {known})",))
    strategy, mesh = several_ranks(cell)
    options, training, (batch, length) = cell.strategy_options, cell.training, cell.shape
    rotation = next((how for how, (name, _) in ROTATIONS.items() if name == strategy.classes[-1].name), None)
    rest = training.backend_options.get("reshard_rest", True)
    freed = "never" if training.backend == "zero2" else "always" if rest else "default"
    mode, every = _recomputation(model)
    parts = training.micro_batches
    values: list[tuple[str, Any, str]] = [
        ("model.name", name, "model"),
        ("model.flavor", flavor, "model"),
        ("training.local_batch_size", batch // (parts * cell.sizes.dp), "batch"),
        ("training.global_batch_size", batch if parts > 1 else None, "training.micro_batches"),
        ("training.seq_len", length, "seq_len"),
        ("training.mixed_precision_param", {"bf16": "bfloat16"}.get(cell.precision, "float32"), "precision"),
        (
            "training.enable_cpu_offload",
            training.backend_options.get("parameters") == "host" or None,
            "training.parameters",
        ),
        ("parallelism.data_parallel_shard_degree", mesh.get("dp", 1), "sizes.dp"),
        ("parallelism.fsdp_reshard_after_forward", freed, "training.backend"),
        ("parallelism.tensor_parallel_degree", mesh.get("tp", 1), "sizes.tp"),
        ("parallelism.disable_loss_parallel", options.get("loss") == "gathered", "strategy_options.loss"),
        ("parallelism.pipeline_parallel_degree", mesh.get("pp", 1), "sizes.pp"),
        ("parallelism.context_parallel_degree", mesh.get("sp", 1), "sizes.sp"),
        ("parallelism.context_parallel_rotate_method", rotation, "strategy"),
        ("activation_checkpoint.mode", mode, "model_options.recompute"),
        ("activation_checkpoint.selective_ac_option", every, "model_options.recompute_layers"),
        (
            "activation_checkpoint.early_stop",
            model.recompute_early_stop,
            "model_options.recompute_early_stop",
        ),
    ]
    lines = [Flag(key, json.dumps(value), setting) for key, value, setting in values if value is not None]
    text = f"# {program}, on {cell.sizes.world} GPUs; data, learning rate and checkpoints are yours to add\n"
    for section, keys in groupby(lines, lambda line: line.argument.partition(".")[0]):
        text += f"\n[{section}]\n"
        text += "".join(f"{line.argument.partition('.')[2]} = {line.value}\n" for line in keys)
    return Flags(program, "train.toml", tuple(lines), text)


def _models() -> Iterator[tuple[tuple[str, str], Model]]:
    """The models that torchtitan has here, by name and flavor."""
    for flavor, preset in PRESETS.items():
        yield ("llama3", flavor), model_preset(preset)
    for flavor in QWEN3:
        yield ("qwen3", flavor), model_preset("llama3-8b", qwen3_options(flavor))


def _alike(model: Any, preset: Any) -> bool:
    return all(getattr(model, name, None) == getattr(preset, name) for name in _SIZES)


def _recomputation(model: CausalTransformerModel) -> tuple[str, str | None]:
    """The mode of activation checkpoints, and of the selective one what it is of."""
    if model.checkpointing or model.recompute == "full":
        every = str(model.recompute_layers) if model.recompute_method == "interval" else None
        return ("selective", every) if every else ("full", None)
    return ("selective", "op") if model.recompute == "operators" else ("none", None)
