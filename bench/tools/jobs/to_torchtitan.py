"""A cell as a TOML of torchtitan, of Llama 3 or Qwen3."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.flags import Flag, Flags, facts_of, several_ranks
from spbench.bench.tools.jobs.job import TABLES
from spbench.bench.tools.jobs.rules import follow
from spbench.bench.tools.jobs.torchtitan import ROTATIONS, versions
from spbench.bench.tools.jobs.torchtitan_models import LESS, SCHEDULES, models, stage_layers
from spbench.impls import CausalTransformerModel, Model, model_preset

#: sizes that a flavor fixes
_SIZES = ("layers", "hidden", "heads", "kv_heads", "head_dim", "inner", "vocabulary", "qk_norm")


def flags(cell: Cell) -> Flags:
    """The file that runs the cell, which can be read back; none for a model without a flavor of its sizes."""
    table, model = next(iter(versions().values())), model_preset(*cell.model_arguments)
    sizes = [getattr(model, name, None) for name in _SIZES]
    alike = (which for which, other in _models() if sizes == [getattr(other, name) for name in _SIZES])
    name, flavor = next(alike, ("", ""))
    if not isinstance(model, CausalTransformerModel) or not flavor:
        flavors = ", ".join(f"{name} {flavor}" for (name, flavor), _ in _models())
        missing = f"model {cell.model} of these sizes (it has {flavors})"
        return Flags(table.program, "train.toml", (), "", (missing,))
    account = Account(table=table, given={}, facts={**_facts(model, cell), "name": name, "flavor": flavor})
    account.calls = {"pipeline": lambda account: account.flags.extend(_pipeline(model, cell))}
    follow(account, table.content["flags"])
    rows = [*table.values_of(_settings(model, cell)), *account.flags]
    order = {name: place for place, name in enumerate(table.arguments)}
    sections = [*dict.fromkeys(name.partition(".")[0] for name in order)]
    rows.sort(key=lambda row: (sections.index(row[0].partition(".")[0]), order[row[0]]))
    lines = [Flag(key, json.dumps(value), setting) for key, value, setting in rows if value is not None]
    text = TABLES.document("torchtitan file", program=table.program, lines=lines, gpus=cell.sizes.world)
    return Flags(table.program, "train.toml", tuple(lines), text)


def _settings(model: CausalTransformerModel, cell: Cell) -> dict[str, Any]:
    """The settings, by path, for which torchtitan has one key each."""
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


def _facts(model: CausalTransformerModel, cell: Cell) -> dict[str, Any]:
    """The facts for the rules in the section ``flags`` of torchtitan.yaml, by name."""
    training, options = cell.training.backend_options, cell.strategy_options
    at_once = 1 if cell.sizes.pp > 1 else cell.training.micro_batches  # a pipeline runs all of them
    copies = training.get("data_parallel_replicate_degree", 1)
    innermost = several_ranks(cell)[0].classes[-1].name
    return {
        **facts_of(cell, model),
        "copies": copies,
        "shards": cell.sizes.dp // copies,
        "at_once": at_once,
        "local_batch": cell.shape[0] // (at_once * cell.sizes.dp),
        "frees_rest": bool(training.get("reshard_rest", True)),
        "rotation": next((how for how, (name, _) in ROTATIONS.items() if name == innermost), None),
        "splits_loss": options.get("vocabulary") == "split" and options.get("loss") != "gathered",
        "every": str(model.recompute_layers),
    }


def _pipeline(model: CausalTransformerModel, cell: Cell) -> Iterator[tuple[str, Any, str]]:
    """The keys of a pipeline, each as (key, value, setting): the schedule, the samples of a micro-batch, and
    how many layers fewer the first and the last stage have; none without a pipeline."""
    training, ranks = cell.training, cell.sizes.pp
    if ranks == 1:
        return
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
    """Pairs of (name, flavor) and model for the models of torchtitan that spbench knows."""
    for name, flavors in models().items():
        for flavor, model in flavors.items():
            yield (name, flavor), model_preset(model["preset"], model.get("options", {}))
