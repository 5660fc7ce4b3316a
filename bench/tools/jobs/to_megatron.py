"""A cell as a command of Megatron-LM's pretrain_gpt.py."""

import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any

from spbench import impls
from spbench.bench.cell import Cell
from spbench.bench.measure import load_cluster
from spbench.bench.setting_values import VARIABLES
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.flags import Flag, Flags, facts_of, several_ranks, without_effect
from spbench.bench.tools.jobs.job import TABLES
from spbench.bench.tools.jobs.megatron import CONTEXT, HIERARCHICAL
from spbench.bench.tools.jobs.rules import follow

#: --cp-comm-type by the strategy of context parallelism
_COMMUNICATION = {strategy: how for how, (strategy, _) in CONTEXT.items()} | dict([HIERARCHICAL])
_OTHER_MODEL = "flags here for the model {}, which is no GPTModel"
#: options whose value 0 or None means that the model has no such thing, as Megatron-LM's defaults do
_NONE = ("shared_inner", "router_groups", "router_group_topk", "z_weight", "expert_inner", "q_lora_rank")
#: options that have no effect in a model with latent attention
_WITHOUT_LATENTS = ("head_dim", "rotary_share", "qk_norm")

#: an argument, its value (None or False: not written; True: a switch), and the setting from which it comes
_Row = tuple[str, Any, str]


def flags(cell: Cell) -> Flags:
    """The command that runs the cell, which can be read back; none for a model that is no GPTModel."""
    table, model = argument_table("megatron"), impls.model_preset(*cell.model_arguments)
    if not isinstance(model, impls.CausalTransformerModel):
        return Flags(table.program, "train.sh", (), "", (_OTHER_MODEL.format(cell.model),))
    account = Account(table=table, given={}, facts=_facts(model, cell))
    off = [f"--no-{fusion.replace('_', '-')}-fusion" for fusion in model.unfused]
    unfused = [(name, True, "model_options.unfused") for name in off]
    account.calls = {
        "stages": lambda account: account.flags.extend(_stages_of(cell)),
        "unfused": lambda account: account.flags.extend(unfused),
    }
    follow(account, table.content["flags"])
    rows = [*table.values_of(_settings(model, cell)), *account.flags]
    order = {name: place for place, name in enumerate(table.arguments)}
    lines = [
        Flag(name, _written(value) if table.arguments[name].takes else "", setting)
        for name, value, setting in sorted(rows, key=lambda row: order[row[0]])
        if value is not None and value is not False and value != table.arguments[name].default
    ]
    for name, variable in VARIABLES.items():
        if value := getattr(cell.training, name):
            lines.append(Flag(variable, value, f"training.{name}"))
    return Flags(table.program, "train.sh", tuple(lines), _script(table.program, lines, cell))


def _written(value: Any) -> str:
    return f"{value:.0f}" if isinstance(value, float) and value >= 2 and value.is_integer() else str(value)


def _settings(model: impls.CausalTransformerModel, cell: Cell) -> dict[str, Any]:
    """The settings, by path, for which Megatron-LM has one argument each, if they matter in the cell."""
    unused = without_effect(model) | {name for name in _NONE if not getattr(model, name)}
    unused |= {*_WITHOUT_LATENTS} if model.kv_lora_rank else set()
    unused |= {"router_scale"} if model.router_scale == 1 else set()
    settings = {f"model_options.{name}": value for name, value in vars(model).items() if name not in unused}
    in_full = model.checkpointing or model.recompute == "full"
    if not in_full or model.recompute_method not in ("uniform", "block"):
        settings = {path: value for path, value in settings.items() if "recompute" not in path}
    _, mesh = several_ranks(cell)
    training = cell.training
    settings |= {f"sizes.{axis}": mesh.get(axis, 1) for axis in ("tp", "pp")}
    if model.experts:
        ep, etp = (cell.sizes.by_axis.get(axis, 1) for axis in impls.FOLDED_AXES)
        settings |= {"sizes.ep": ep} | ({"sizes.etp": etp} if etp != settings["sizes.tp"] else {})
    settings |= {"batch": cell.shape[0], "seq_len": cell.shape[1]}
    if training.schedule == "interleaved":
        names = ["virtual_stages", "overlap_p2p_communication", "microbatch_group_size"]
        if _needs_layout(training.stage_layers or [], training.virtual_stages):
            names.remove("virtual_stages")  # as many as the layout has for each rank
        settings |= {f"training.{name}": getattr(training, name) for name in names}
    if training.backend == "megatron":
        options = impls.set_options(impls.MegatronOptions(), training.backend_options, training.backend)
        settings |= {f"training.{name}": value for name, value in vars(options).items()}
        if training.schedule != "interleaved" or not options.overlap_param_gather:
            del settings["training.align_param_gather"]
    return settings


def _facts(model: impls.CausalTransformerModel, cell: Cell) -> dict[str, Any]:
    """The facts for the rules in the section ``flags`` of megatron.yaml, by name."""
    strategy, mesh = several_ranks(cell)
    names = strategy.name.split(impls.PLUS)
    within = impls.PLUS.join(name for name in names if name not in ("tensor_parallel", "megatron_sp"))
    return {
        **facts_of(cell, model),
        "context_ranks": mesh.get("sp", 1) * mesh.get("cp", 1),
        "communication": _COMMUNICATION.get(within),
        "levels": f"{mesh.get('sp', 1)} {mesh['cp']}" if "cp" in mesh else None,
        "data_outside": [axis for axis in mesh if axis in ("dp", "pp")] == ["dp", "pp"],
        "layers_with_experts": _layers_with_experts(model) if model.experts else None,
        "recompute_modules": " ".join(model.recompute_modules),
    }


def _stages_of(cell: Cell) -> Iterator[_Row]:
    """The arguments that set the number of layers of each stage."""
    training = cell.training
    layers = training.stage_layers or []
    if _needs_layout(layers, training.virtual_stages):
        predicted = "m" * getattr(impls.model_preset(*cell.model_arguments), "mtp_layers", 0)
        layout = f"'E{'|'.join('t' * count for count in layers)}{predicted}L'"
        yield "--pipeline-model-parallel-layout", layout, "training.stage_layers"
        return
    yield from _stages(layers, training.virtual_stages)


def _needs_layout(layers: list[int], virtual: int) -> bool:
    """Whether a stage other than the first and the last, of each run of stages or in all, has another number
    of layers than the others, which only a layout can say."""
    run, usual = layers[: len(layers) // virtual], max(layers, default=0)
    if run * virtual == layers:
        return len({*run[1:-1]}) > 1
    return {*layers[1:-1]} != {usual} or not {layers[0], layers[-1]} <= {usual, usual - 1}


def _stages(layers: list[int], virtual: int) -> Iterator[_Row]:
    """The arguments for pipelines whose first or last stage, in each run or once, has other layers."""
    alike = layers[: len(layers) // virtual] * virtual == layers
    for name, at, beside, what in (("first", 0, 1, "embedding"), ("last", -1, -2, "loss")):
        if layers and alike:
            yield f"--decoder-{name}-pipeline-num-layers", virtual * layers[at], "training.stage_layers"
        elif layers and layers[at] < layers[beside]:
            yield f"--account-for-{what}-in-pipeline-split", True, "training.stage_layers"


def _layers_with_experts(model: impls.CausalTransformerModel) -> str:
    """The text N, if every N-th layer from the first has experts; else a list of 0 and 1 for all layers, as
    an expression with repetitions."""
    have = [int(model.has_experts(layer)) for layer in range(model.layers)]
    for each in range(1, len(have) + 1):
        if have == [int(layer % each == 0) for layer in range(len(have))]:
            return str(each)
    period = next(n for n in range(1, len(have) + 1) if have == have[:n] * (len(have) // n))
    runs = "+".join(f"[{which}]*{len([*run])}" for which, run in groupby(have[:period]))
    return f"'({runs})*{len(have) // period}'"


def _script(program: str, lines: Sequence[Flag], cell: Cell) -> str:
    """The text of the script: comments, variables, and the command with one argument a line."""
    of_node = math.gcd(cell.sizes.world, load_cluster(cell.cluster).devices_per_node)
    return TABLES.document("megatron script", program=program, lines=lines, cell=cell, of_node=of_node)
