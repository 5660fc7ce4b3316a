"""Jobs of NeMo Automodel: its YAML of a causal language model under FSDP2."""

from __future__ import annotations

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Argument, Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.program_files import configuration, given_of, values_of
from spbench.bench.tools.jobs.transformers_settings import set_step
from spbench.bench.tools.jobs.transformers_step import Said, TransformersStep, said
from spbench.bench.tools.jobs.variables import variables

_HALF = {"bf16", "bfloat16", "torch.bfloat16"}


def read(files: JobFiles) -> Job | None:
    """A job of NeMo Automodel; None where no file is its configuration.

    Raises:
        UserError: a file is damaged.
    """
    content = configuration(files, ("step_scheduler", "model"))
    if content is None or not isinstance(content["model"], dict):
        return None
    table = argument_table("automodel")
    k = key_account(
        table,
        values_of(files, content, table),
        lambda name: not name.endswith("_target_") or name in table.arguments,
        files.environment,
    )
    set_step(k, _step(k), files)
    k.environment = {str(n): str(v) for n, v in (k.value("ci.env_vars") or {}).items()}
    k.took("variables of the environment", "ci.env_vars")
    arguments: list[Argument] = [*k.arguments(), *variables(k)]
    return k.job("automodel", files, arguments)


def _step(k: Account) -> TransformersStep:
    strategy, kept = "distributed.strategy", "distributed.reshard_after_forward"
    if k.value(strategy) not in ("fsdp2", None):
        k.refuse("another distribution than FSDP2", strategy)
    if (k.value("distributed.pp_size") or 1) > 1:
        k.refuse("a pipeline whose stages shard their weights", "distributed.pp_size")
    k.ignore("one part: not split", "distributed.pp_size")
    if (k.value("distributed.ep_size") or 1) > 1:
        k.refuse("experts in Automodel's way", "distributed.ep_size")
    k.ignore("there are no experts that are split", "distributed.ep_size")
    on_host = "distributed.offload_policy"
    by = "distributed.sequence_parallel"
    value, dtype = k.chosen("model.torch_dtype", "model.dtype")
    half = str(value) in _HALF or value in (None, "auto")
    optimizer = str(k.value("optimizer._target_"))
    adam = "Adam" in optimizer
    if half and "FusedAdam" in optimizer:
        because = "moments are counted in bfloat16: the job has 4 bytes a weight, over the ranks, more"
        k.stand_in("float32 moments beside bfloat16 weights", "memory", because, "optimizer._target_")
    return TransformersStep(
        model=said(k, "model.config.pretrained_model_name_or_path", "model.pretrained_model_name_or_path"),
        length=_length(k),
        sharding=Said("fsdp, kept" if k.value(kept) is False else "fsdp", given_of(k, strategy, kept)),
        host=Said("all" if k.value(on_host) else "", given_of(k, on_host)),
        sequence=said(k, "distributed.cp_size"),
        sequence_by=Said("all-gather", (), "torch's context parallelism"),
        tensor=said(k, "distributed.tp_size"),
        tensor_by=Said("megatron_sp" if k.value(by) else "tensor_parallel", given_of(k, by)),
        groups=said(k, "distributed.dp_replicate_size"),
        micro_batch=said(k, "step_scheduler.local_batch_size"),
        batch=said(k, "step_scheduler.global_batch_size"),
        precision=Said("bf16", (), "mp_policy of FSDP2"),
        half=Said(half, given_of(k, dtype)),
        reduce=Said("fp32", (), "mp_policy of FSDP2"),
        recompute=said(k, "distributed.activation_checkpointing"),
        attention=said(k, "model.attn_implementation"),
        packed=Said(
            bool(k.value("packed_sequence.packed_sequence_size")),
            given_of(k, "packed_sequence.packed_sequence_size"),
        ),
        optimizer=Said("adam" if adam else optimizer, given_of(k, "optimizer._target_")),
        foreach=Said(
            optimizer.startswith("torch.optim."), given_of(k, "optimizer._target_"), "torch's default"
        ),
        lora=Said(
            k.value("peft.dim") if k.has("peft._target_") else 0, given_of(k, "peft._target_", "peft.dim")
        ),
        quantized=Said(
            4 if k.value("quantization.load_in_4bit") else 0, given_of(k, "quantization.load_in_4bit")
        ),
        compiled=Said(
            bool(k.value("distributed.enable_compile") or k.value("compile.enabled")),
            given_of(k, "distributed.enable_compile", "compile.enabled"),
        ),
    )


def _length(k: Account) -> Said:
    names = ("packed_sequence.packed_sequence_size", "dataset.seq_len", "dataset.seq_length")
    value, name = k.chosen(*names)
    if not value:
        k.problems.append("how long sequences are is not said; --given dataset.seq_length=N")
        return Said(1)
    return Said(value, given_of(k, name))
