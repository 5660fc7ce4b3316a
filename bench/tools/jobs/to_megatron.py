"""A cell as a command of Megatron-LM's pretrain_gpt.py."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.setting_values import VARIABLES
from spbench.bench.tools.jobs.flags import Flag, Flags, several_ranks
from spbench.bench.tools.jobs.megatron_arguments import known_arguments, program
from spbench.bench.tools.jobs.megatron_training import CONTEXT
from spbench.impls.backends.megatron_options import MegatronOptions
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.model import model_preset
from spbench.impls.options import set_options
from spbench.impls.strategies.nesting import PLUS

#: --cp-comm-type by the strategies within tensor parallelism's
_COMMUNICATION = {strategy: how for how, (strategy, _) in CONTEXT.items()}
_COMMUNICATION["ulysses+ring_attention"] = "a2a+p2p"
#: arguments that say options of the backend megatron, and of the model, as they are
_OF_BACKEND = {
    "--use-distributed-optimizer": "distributed_optimizer",
    "--num-distributed-optimizer-instances": "num_distributed_optimizer_instances",
    "--overlap-grad-reduce": "overlap_grad_reduce",
    "--overlap-param-gather": "overlap_param_gather",
    "--overlap-cpu-optimizer-d2h-h2d": "overlap_cpu_optimizer_d2h_h2d",
    "--ddp-bucket-size": "bucket_size",
    "--ddp-pad-buckets-for-high-nccl-busbw": "pad_buckets_for_high_nccl_busbw",
}
_OF_MODEL = {
    "--num-layers": "layers",
    "--hidden-size": "hidden",
    "--ffn-hidden-size": "inner",
    "--num-attention-heads": "heads",
    "--num-query-groups": "kv_heads",
    "--kv-channels": "head_dim",
    "--vocab-size": "vocabulary",
    "--make-vocab-size-divisible-by": "vocabulary_multiple",
    "--norm-epsilon": "norm_epsilon",
    "--hidden-dropout": "dropout",
    "--attention-dropout": "attention_dropout",
    "--add-qkv-bias": "qkv_bias",
    "--qk-layernorm": "qk_norm",
}
_OTHER_MODEL = "flags here for the model {}, which is no GPTModel"
_POSITIONS = {"learned": "learned_absolute", "rotary": "rope"}
_KERNELS = {"flash": "flash", "cudnn": "fused", "unfused": "unfused"}

#: an argument, its value (None or False: it is left out; True: a switch), and the setting it comes from
_Row = tuple[str, Any, str]


def flags(cell: Cell) -> Flags:
    """The command, to be read back; of a model that is no GPTModel there is none."""
    model = model_preset(*cell.model_arguments)
    if not isinstance(model, CausalTransformerModel):
        return Flags(program(), "train.sh", (), "", (_OTHER_MODEL.format(cell.model),))
    rows = [*_layout(cell), *_step(cell), *_backend(cell), *_model(model, cell), *_kernels(model)]
    known = known_arguments()
    lines = [
        Flag(name, str(value) if known[name].takes else "", setting)
        for name, value, setting in rows
        if value is not None and value is not False and str(value) != known[name].default
    ]
    for name, variable in VARIABLES.items():
        if value := getattr(cell.training, name):
            lines.append(Flag(variable, value, f"training.{name}"))
    return Flags(program(), "train.sh", tuple(lines), _script(lines, cell))


def _layout(cell: Cell) -> Iterator[_Row]:
    strategy, mesh = several_ranks(cell)
    names, training = strategy.name.split(PLUS), cell.training
    within = PLUS.join(name for name in names if name not in ("tensor_parallel", "megatron_sp"))
    yield "--tensor-model-parallel-size", mesh.get("tp", 1), "sizes.tp"
    yield "--sequence-parallel", "megatron_sp" in names, "strategy"
    yield "--context-parallel-size", mesh.get("sp", 1) * mesh.get("cp", 1), "sizes.sp"
    how = _COMMUNICATION.get(within)
    yield "--cp-comm-type", None if how == "p2p" else how, "strategy"  # which is so by default
    if "cp" in mesh:
        yield "--hierarchical-context-parallel-sizes", f"{mesh.get('sp', 1)} {mesh['cp']}", "sizes.cp"
    yield "--pipeline-model-parallel-size", mesh.get("pp", 1), "sizes.pp"
    yield "--use-tp-pp-dp-mapping", [axis for axis in mesh if axis in ("dp", "pp")] == ["dp", "pp"], "mesh"
    yield from _stages(training.stage_layers or [], training.virtual_stages)
    if training.schedule == "interleaved":
        yield "--num-virtual-stages-per-pipeline-rank", training.virtual_stages, "training.virtual_stages"
        waits = not training.overlap_p2p_communication
        yield "--no-overlap-p2p-communication", waits, "training.overlap_p2p_communication"
        group = "--microbatch-group-size-per-virtual-pipeline-stage"
        yield group, training.microbatch_group_size, "training.microbatch_group_size"


def _stages(layers: list[int], virtual: int) -> Iterator[_Row]:
    """Stages whose first or last has another number of layers, in each run or in one alone."""
    alike = layers[: len(layers) // virtual] * virtual == layers
    for name, at, beside, what in (("first", 0, 1, "embedding"), ("last", -1, -2, "loss")):
        if layers and alike:
            yield f"--decoder-{name}-pipeline-num-layers", virtual * layers[at], "training.stage_layers"
        elif layers and layers[at] < layers[beside]:
            yield f"--account-for-{what}-in-pipeline-split", True, "training.stage_layers"


def _step(cell: Cell) -> Iterator[_Row]:
    batch, length = cell.shape
    micro = batch // (cell.training.micro_batches * cell.sizes.dp)
    yield "--micro-batch-size", micro, "training.micro_batches"
    yield "--global-batch-size", batch, "batch"
    yield "--seq-length", length, "seq_len"
    yield "--bf16", cell.precision == "bf16", "precision"
    yield "--fp16", cell.precision == "fp16", "precision"


def _backend(cell: Cell) -> Iterator[_Row]:
    name, fusion = cell.training.backend, "--no-gradient-accumulation-fusion"
    if name in ("zero2", "zero3"):
        yield "--use-torch-fsdp2", True, "training.backend"
        yield "--torch-fsdp2-no-reshard-after-forward", name == "zero2", "training.backend"
        yield fusion, True, "training.backend"
    elif name == "megatron":
        options = set_options(MegatronOptions(), cell.training.backend_options, name)
        for argument, option in _OF_BACKEND.items():
            yield argument, getattr(options, option), f"training.{option}"
        for argument in ("--optimizer-cpu-offload", "--use-precision-aware-optimizer"):
            yield argument, options.optimizer == "host", "training.optimizer"
        if cell.training.schedule == "interleaved" and options.overlap_param_gather:
            apart, setting = "--no-align-param-gather", "training.align_param_gather"
            yield apart, not options.align_param_gather, setting
        yield fusion, not options.gradient_accumulation_fusion, "training.gradient_accumulation_fusion"
        whole, option = options.accumulate_allreduce_grads_in_fp32, "accumulate_allreduce_grads_in_fp32"
        yield "--grad-reduce-in-bf16", cell.precision == "bf16" and not whole, f"training.{option}"
        yield "--accumulate-allreduce-grads-in-fp32", cell.precision == "fp16" and whole, f"training.{option}"


def _model(model: CausalTransformerModel, cell: Cell) -> Iterator[_Row]:
    for argument, option in _OF_MODEL.items():
        yield argument, getattr(model, option), f"model_options.{option}"
    yield "--group-query-attention", model.kv_heads is not None, "model_options.kv_heads"
    yield "--normalization", "RMSNorm" if model.norm == "rms" else None, "model_options.norm"
    yield "--swiglu", model.mlp == "swiglu", "model_options.mlp"
    yield "--squared-relu", model.mlp == "squared_relu", "model_options.mlp"
    yield "--disable-bias-linear", not model.biases, "model_options.biases"
    yield "--untie-embeddings-and-output-weights", not model.tied, "model_options.tied"
    kind = _POSITIONS.get(model.position, model.position)
    yield "--position-embedding-type", kind, "model_options.position"
    if model.position == "rotary":
        yield "--rotary-base", f"{model.rotary_base:.15g}", "model_options.rotary_base"
        yield "--rotary-percent", model.rotary_share, "model_options.rotary_share"
    # without learned positions it must be given too, and be no less than the length
    rows = model.learned_positions
    setting = "model_options.max_positions" if rows else "seq_len"
    yield "--max-position-embeddings", rows or cell.seq_len, setting


def _kernels(model: CausalTransformerModel) -> Iterator[_Row]:
    local, loss = model.library == "megatron-local", model.cross_entropy
    yield "--transformer-impl", "local" if local else None, "model_options.library"
    kernel, _, version = model.attention.partition("_attention_")
    yield "--attention-backend", _KERNELS.get(kernel), "model_options.attention"
    yield "--flash-attention-version", version or None, "model_options.attention"
    yield "--no-create-attention-mask-in-dataloader", not model.loader_mask, "model_options.loader_mask"
    for fusion in model.unfused:
        yield f"--no-{fusion.replace('_', '-')}-fusion", True, "model_options.unfused"
    yield "--attention-softmax-in-fp32", "masked_softmax" in model.unfused, "model_options.unfused"
    yield "--cross-entropy-loss-fusion", loss in ("native", "in_place"), "model_options.cross_entropy"
    te = "te" if loss == "in_place" else None
    yield "--cross-entropy-fusion-impl", te, "model_options.cross_entropy"
    again = "full" if model.checkpointing else model.recompute
    if again in ("selective", "full"):
        yield "--recompute-granularity", again, "model_options.recompute"
    if again == "full" and model.recompute_method in ("uniform", "block"):
        yield "--recompute-method", model.recompute_method, "model_options.recompute_method"
        yield "--recompute-num-layers", model.recompute_layers, "model_options.recompute_layers"


def _script(lines: Sequence[Flag], cell: Cell) -> str:
    """The command, an argument a line."""
    world, variables = cell.sizes.world, [a for a in lines if not a.argument.startswith("--")]
    of_node = math.gcd(world, load_cluster(cell.cluster).devices_per_node)
    text = f"# {program()}: what it has by default is left out.\n"
    text += (
        "# Data, tokenizer, learning rate and checkpoints are yours to add, and where the first node is.\n"
    )
    if cell.training.backend == "megatron":  # needed before Blackwell, and refused beside FSDP2
        text += "export CUDA_DEVICE_MAX_CONNECTIONS=1\n"
    text += "".join(f"export {a.argument}={a.value}\n" for a in variables)
    command = [f"torchrun --nnodes {world // of_node} --nproc-per-node {of_node} pretrain_gpt.py"]
    command += [f"{a.argument} {a.value}".rstrip() for a in lines if a not in variables]
    return text + " \\\n  ".join(command) + "\n"
