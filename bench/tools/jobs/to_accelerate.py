"""A cell as an `accelerate launch` of a script whose arguments are the Trainer's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.setting_values import CONFIG
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.flags import Flag, Flags, several_ranks
from spbench.impls import model_preset

_SCRIPT = "train.py"
#: by strategy: how torch's context parallelism rotates keys and values
_ROTATIONS = {"all_gather_kv": "allgather", "ring_attention": "alltoall"}
_PARALLEL = "--parallelism_config_"
_ATTENTION = {"flash_attention_2": "sdpa", "flash_attention_3": "flash_attention_3", "unfused": "eager"}


def flags(cell: Cell) -> Flags:
    """The command, to be read back; of a model without a name on Hugging Face there is none."""
    program = argument_table("deepspeed").program
    program = f"accelerate{program.rpartition('accelerate')[2]}, transformers 5"
    if "/" not in cell.model or cell.model.endswith(CONFIG):
        missing = f"model {cell.model} without its name on Hugging Face, as Qwen/Qwen3-8B"
        return Flags(program, "train.sh", (), "", (missing,))
    launcher, script = list(_launcher(cell)), list(_trainer(cell))
    lines = [Flag(name, str(value), setting) for name, value, setting in (*launcher, *script)]
    words = " \\\n  ".join(_spelled(*each) for each in launcher)
    after = " \\\n  ".join(_spelled(*each) for each in script)
    heading = f"# {program}: data and learning rate are yours to add\n"
    content = f"{heading}accelerate launch \\\n  {words} \\\n  {_SCRIPT} \\\n  {after}\n"
    return Flags(program, "train.sh", tuple(lines), content)


def _spelled(name: str, value: Any, _: str) -> str:
    return f"{name} {value}".rstrip()


def _launcher(cell: Cell) -> Iterator[tuple[str, Any, str]]:
    """Options of the launcher, with the settings that they say."""
    strategy, mesh = several_ranks(cell)
    sizes, training = cell.sizes, cell.training
    parts = [each.name for each in strategy.classes]
    yield "--num_processes", sizes.world, "sizes"
    yield "--mixed_precision", {"bf16": "bf16", "fp16": "fp16"}.get(cell.precision, "no"), "precision"
    on_host = training.backend_options.get("optimizer") == "host"
    params = training.backend_options.get("parameters") == "host"
    if "ulysses" in parts or (on_host and not params):
        yield "--use_deepspeed", "", "training.backend"
        yield "--zero_stage", {"zero2": 2, "zero3": 3}.get(training.backend, 3), "training.backend"
        for name, held in (("optimizer", on_host), ("param", params)):
            yield f"--offload_{name}_device", "cpu" if held else "none", f"training.{name}"
        if training.backend_options.get("reduce_dtype") != "fp32":
            yield "--seq_parallel_communication_data_type", cell.precision, "training.reduce_dtype"
    else:
        yield "--use_fsdp", "", "training.backend"
        yield "--fsdp_version", 2, "training.backend"
        yield "--fsdp_reshard_after_forward", str(training.backend != "zero2").lower(), "training.backend"
        if params:
            yield "--fsdp_offload_params", "true", "training.parameters"
    if sizes.world > mesh.get("dp", 1):
        yield "--use_parallelism_config", "true", "sizes"
    if (tp := mesh.get("tp", 1)) > 1:
        yield f"{_PARALLEL}tp_size", tp, "sizes.tp"
    if (sp := mesh.get("sp", 1)) > 1 and "ulysses" in parts:
        yield f"{_PARALLEL}sp_size", sp, "sizes.sp"
    elif sp > 1:
        yield f"{_PARALLEL}cp_size", sp, "sizes.sp"
        yield f"{_PARALLEL}cp_comm_strategy", _ROTATIONS.get(parts[-1], "allgather"), "strategy"


def _trainer(cell: Cell) -> Iterator[tuple[str, Any, str]]:
    """Arguments of the script, with the settings that they say."""
    model: Any = model_preset(*cell.model_arguments)
    batch, length = cell.shape
    parts = cell.training.micro_batches
    yield "--model_name_or_path", cell.model, "model"
    yield "--per_device_train_batch_size", batch // (parts * cell.sizes.dp), "batch"
    yield "--gradient_accumulation_steps", parts, "training.micro_batches"
    yield "--max_length", length, "seq_len"
    if cell.precision in ("bf16", "fp16"):
        yield f"--{cell.precision}", "true", "precision"
    yield "--attn_implementation", _ATTENTION.get(model.attention, "sdpa"), "model_options.attention"
    full = model.checkpointing or model.recompute == "full"
    yield "--gradient_checkpointing", str(full).lower(), "model_options.recompute"
    if full and not model.recompute_reentrant:
        kwargs = "'{\"use_reentrant\": false}'"
        yield "--gradient_checkpointing_kwargs", kwargs, "model_options.recompute_early_stop"
    if model.loss_tile == "liger":
        yield "--use_liger_kernel", "true", "model_options.loss_tile"
