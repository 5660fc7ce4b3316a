"""A cell as a TOML of torchtitan, of Llama 3 or Qwen3."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from itertools import groupby
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.tools.jobs.flags import Flag, Flags, several_ranks
from spbench.bench.tools.jobs.torchtitan import ROTATIONS, versions
from spbench.bench.tools.jobs.torchtitan_models import LESS, SCHEDULES, models, stage_layers
from spbench.impls import CausalTransformerModel, Model, model_preset

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
    sections = [*dict.fromkeys(name.partition(".")[0] for name in order)]
    rows.sort(key=lambda row: (sections.index(row[0].partition(".")[0]), order[row[0]]))
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
        **{f"sizes.{axis}": mesh.get(axis, 1) for axis in ("tp", "pp", "sp")},
        **(
            {f"sizes.{axis}": cell.sizes.by_axis.get(axis, 1) for axis in ("ep", "etp")}
            if model.experts
            else {}
        ),
        "strategy_options.loss": cell.strategy_options.get("loss", "parallel"),
        "model_options.recompute_early_stop": model.recompute_early_stop,
    }


def _derived(model: CausalTransformerModel, cell: Cell) -> Iterator[tuple[str, Any, str]]:
    """Keys that say several settings, or a part of one."""
    batch, parts, training = cell.shape[0], cell.training.micro_batches, cell.training
    stages, copies = cell.sizes.pp, training.backend_options.get("data_parallel_replicate_degree", 1)
    copied = "training.data_parallel_replicate_degree"
    yield "parallelism.data_parallel_replicate_degree", copies if copies > 1 else None, copied
    yield "parallelism.data_parallel_shard_degree", cell.sizes.dp // copies, "sizes.dp"
    at_once = 1 if stages > 1 else parts  # a pipeline runs its micro-batches at once
    yield "training.local_batch_size", batch // (at_once * cell.sizes.dp), "batch"
    yield "training.global_batch_size", batch if at_once > 1 else None, "training.micro_batches"
    forced = True if model.experts and model.routing == "round_robin" else None
    yield "debug.moe_force_load_balance", forced, "model_options.routing"
    if stages > 1:
        yield from _pipeline(model, cell)
    freed = "always" if training.backend_options.get("reshard_rest", True) else "default"
    freed = "never" if training.backend == "zero2" else freed
    yield "parallelism.fsdp_reshard_after_forward", freed, "training.backend"
    innermost = several_ranks(cell)[0].classes[-1].name
    rotation = next((how for how, (name, _) in ROTATIONS.items() if name == innermost), None)
    yield "parallelism.context_parallel_rotate_method", rotation, "strategy"
    options = cell.strategy_options
    split = options.get("vocabulary") == "split" and options.get("loss") != "gathered"
    # eager, torch's loss of a split vocabulary needs more
    if model.cross_entropy == ("plain" if split else "compiled"):
        yield "compile.enable", True, "model_options.cross_entropy"
        yield "compile.components", ["loss"], "model_options.cross_entropy"
    mode, every = _recomputation(model)
    yield "activation_checkpoint.mode", mode, "model_options.recompute"
    yield "activation_checkpoint.selective_ac_option", every, "model_options.recompute_layers"


def _pipeline(model: CausalTransformerModel, cell: Cell) -> Iterator[tuple[str, Any, str]]:
    """Keys of a pipeline: its schedule, and how many layers its ends have less."""
    training, ranks = cell.training, cell.sizes.pp
    names = {ours: theirs for theirs, ours in SCHEDULES.items()}
    yield "parallelism.pipeline_parallel_schedule", names[training.schedule], "training.schedule"
    size = cell.shape[0] // (cell.sizes.dp * training.micro_batches)
    yield "parallelism.pipeline_parallel_microbatch_size", size, "training.micro_batches"
    stages = ranks * training.virtual_stages
    sizes = training.stage_layers or [model.layers // stages] * stages
    ends = itertools.product(range(max(sizes) + 1), repeat=2)
    fitting = (less for less in ends if stage_layers(model.layers, stages, *less) == sizes)
    less = next(fitting, (1, 1))
    yield from ((name, each, "training.stage_layers") for name, each in zip(LESS, less, strict=True))
    if training.virtual_stages > 2:
        each = -(-(model.layers + sum(less)) // stages)
        yield "parallelism.pipeline_parallel_layers_per_stage", each, "training.virtual_stages"


def _models() -> Iterator[tuple[tuple[str, str], Model]]:
    """The models that torchtitan has here, by name and flavor."""
    for name, flavors in models().items():
        for flavor, model in flavors.items():
            yield (name, flavor), model_preset(model["preset"], model.get("options", {}))


def _alike(model: Any, preset: Any) -> bool:
    return all(getattr(model, name, None) == getattr(preset, name) for name in _SIZES)


def _recomputation(model: CausalTransformerModel) -> tuple[str, str | None]:
    """The mode of activation checkpoints, and of the selective one what it is of."""
    if model.checkpointing or model.recompute == "full":
        every = str(model.recompute_layers) if model.recompute_method == "interval" else None
        return ("selective", every) if every else ("full", None)
    return ("selective", "op") if model.recompute == "operators" else ("none", None)
