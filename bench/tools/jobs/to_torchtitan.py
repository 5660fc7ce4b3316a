"""A cell as a TOML of torchtitan, of Llama 3 or Qwen3."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.tools.jobs.flags import Flag, Flags, several_ranks
from spbench.bench.tools.jobs.torchtitan import ROTATIONS, versions
from spbench.bench.tools.jobs.torchtitan_models import FLAVORS
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import Model, model_preset

#: what a flavor fixes
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocabulary", "qk_norm")


def flags(cell: Cell) -> Flags:
    """The file, to be read back; of a model that has not the sizes of a flavor there is none."""
    table, model = next(iter(versions().values())), model_preset(*cell.model_arguments)
    name, flavor = next((which for which, other in _models() if _alike(model, other)), ("", ""))
    if not isinstance(model, CausalTransformerModel) or not flavor:
        flavors = ", ".join(f"{name} {flavor}" for (name, flavor), _ in _models())
        missing = f"model {cell.model} of these sizes (it has {flavors})"
        return Flags(table.program, "train.toml", (), "", (missing,))
    rows = [("model.name", name, "model"), ("model.flavor", flavor, "model")]
    rows += [*table.values_of(_settings(model, cell)), *_derived(model, cell)]
    order = {name: place for place, name in enumerate(table.arguments)}
    rows.sort(key=lambda row: order[row[0]])
    lines = [Flag(key, json.dumps(value), setting) for key, value, setting in rows if value is not None]
    heading = f"# {table.program}, on {cell.sizes.world} GPUs"
    text = f"{heading}; data, learning rate and checkpoints are yours to add\n"
    for section, keys in groupby(lines, lambda line: line.argument.partition(".")[0]):
        text += f"\n[{section}]\n"
        text += "".join(f"{line.argument.partition('.')[2]} = {line.value}\n" for line in keys)
    return Flags(table.program, "train.toml", tuple(lines), text)


def _settings(model: CausalTransformerModel, cell: Cell) -> dict[str, Any]:
    """The settings that keys say as they are."""
    _, mesh = several_ranks(cell)
    return {
        "seq_len": cell.shape[1],
        "precision": "bf16" if cell.precision == "bf16" else "fp32",
        "training.parameters": cell.training.backend_options.get("parameters"),
        **{f"sizes.{axis}": mesh.get(axis, 1) for axis in ("dp", "tp", "pp", "sp")},
        "strategy_options.loss": cell.strategy_options.get("loss", "parallel"),
        "model_options.recompute_early_stop": model.recompute_early_stop,
    }


def _derived(model: CausalTransformerModel, cell: Cell) -> Iterator[tuple[str, Any, str]]:
    """Keys that say several settings, or a part of one."""
    batch, parts, training = cell.shape[0], cell.training.micro_batches, cell.training
    yield "training.local_batch_size", batch // (parts * cell.sizes.dp), "batch"
    yield "training.global_batch_size", batch if parts > 1 else None, "training.micro_batches"
    freed = "always" if training.backend_options.get("reshard_rest", True) else "default"
    freed = "never" if training.backend == "zero2" else freed
    yield "parallelism.fsdp_reshard_after_forward", freed, "training.backend"
    innermost = several_ranks(cell)[0].classes[-1].name
    rotation = next((how for how, (name, _) in ROTATIONS.items() if name == innermost), None)
    yield "parallelism.context_parallel_rotate_method", rotation, "strategy"
    mode, every = _recomputation(model)
    yield "activation_checkpoint.mode", mode, "model_options.recompute"
    yield "activation_checkpoint.selective_ac_option", every, "model_options.recompute_layers"


def _models() -> Iterator[tuple[tuple[str, str], Model]]:
    """The models that torchtitan has here, by name and flavor."""
    for name, flavors in FLAVORS.items():
        for flavor, model in flavors.items():
            yield (name, flavor), model_preset(model.preset, model.options)


def _alike(model: Any, preset: Any) -> bool:
    return all(getattr(model, name, None) == getattr(preset, name) for name in _SIZES)


def _recomputation(model: CausalTransformerModel) -> tuple[str, str | None]:
    """The mode of activation checkpoints, and of the selective one what it is of."""
    if model.checkpointing or model.recompute == "full":
        every = str(model.recompute_layers) if model.recompute_method == "interval" else None
        return ("selective", every) if every else ("full", None)
    return ("selective", "op") if model.recompute == "operators" else ("none", None)
