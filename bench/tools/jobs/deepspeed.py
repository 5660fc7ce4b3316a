"""Jobs of DeepSpeed: its JSON, with a model's config.json, accelerate's YAML and the arguments of the
Trainer, of transformers or of TRL.

Matmuls in eight bits of accelerate's configuration are TransformerEngine's or torchao's (accelerate 1.15,
utils/dataclasses.py: TERecipeKwargs and AORecipeKwargs).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import ArgumentTable, argument_table, flat
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.program_files import CLASSES, sorted_files, zero_of
from spbench.bench.tools.jobs.transformers_settings import set_step
from spbench.bench.tools.jobs.transformers_step import (
    FSDP_1,
    Said,
    TransformersStep,
    bits_of,
    precision_of,
    said,
    said_in_table,
)

#: what the keys of the Trainer and of accelerate begin with, and those of two of its sections
_TRAINER, _ACCELERATE = "TrainingArguments.", "accelerate."
_FSDP, _PARALLEL = "accelerate.fsdp_config.fsdp_", "accelerate.parallelism_config.parallelism_config_"
_OF_DEEPSPEED, _TYPE = "accelerate.deepspeed_config.", "seq_parallel_communication_data_type"
_MIXED, _SECTION = "accelerate.mixed_precision", "accelerate.fp8_config."
_BACKEND, _HISTORY, _ALGORITHM, _FORMAT = (
    f"{_SECTION}{each}" for each in ("backend", "amax_history_len", "amax_compute_algo", "fp8_format")
)
#: the arguments of scripts that say how long a sequence is
_LENGTHS = ("max_length", "max_seq_length", "block_size", "model_max_length", "cutoff_len")
#: as transformers names it
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", "eager")
_ADAM = {"adam", "adamw", "fusedadam", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf"}
_SFT = "SFTConfig"


def read(files: JobFiles) -> Job | None:
    """A job of DeepSpeed; None where no file is a configuration of DeepSpeed or accelerate.

    Raises:
        UserError: a file is damaged, or there are two of a kind.
    """
    by_kind = sorted_files(files)
    return None if by_kind is None else job_of_contents("deepspeed", by_kind, files)


def job_of_contents(
    kind: str, contents: Mapping[str, Mapping[str, Any]], files: JobFiles, problems: list[str] | None = None
) -> Job:
    """The job that files say, whose contents these are by what they are; ``problems``: of how it starts."""
    k = key_account(_table(_SFT in contents[CLASSES]), _named(contents), overrides=files.environment)
    for name in contents[CLASSES]:
        if name != _SFT:
            k.problems.append(f"{name} of TRL: preferences, rewards or reinforcement learning: not modelled")
    set_step(k, _step(k, contents, files), files)
    _beside(k)
    return k.job(kind, files, k.arguments(), problems or ())


def _table(of_trl: bool) -> ArgumentTable:
    """The table of DeepSpeed, with TRL's defaults where a job has its SFTConfig."""
    table = argument_table("deepspeed")
    defaults = table.content["defaults_of_trl"] if of_trl else {}
    own = {name: replace(table.arguments[name], default=value) for name, value in defaults.items()}
    return replace(table, arguments={**table.arguments, **own})


def _named(by_kind: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The values of all files but the model's, by the names of their keys."""
    table = argument_table("deepspeed")
    arguments, aliases = table.arguments, table.content["aliases"]
    for name, value in flat(by_kind.get("deepspeed", {}), arguments):
        yield aliases.get(name, name), value
    for kind, name in (("trainer", _TRAINER), ("accelerate", _ACCELERATE)):
        yield from flat(by_kind.get(kind, {}), arguments, name)


def _step(k: Account, contents: Mapping[str, Mapping[str, Any]], files: JobFiles) -> TransformersStep:
    again, kwargs = f"{_TRAINER}gradient_checkpointing", f"{_TRAINER}gradient_checkpointing_kwargs."
    by_fsdp, of_trl = f"{_FSDP}activation_checkpointing", _SFT in contents[CLASSES]
    reentrant = k.value(f"{kwargs}use_reentrant")
    if reentrant is None:
        reentrant = not (of_trl or k.value(by_fsdp))
    micro = _given(k, contents, "train_micro_batch_size_per_gpu", "per_device_train_batch_size")
    if micro.value is None and k.value("train_batch_size") in (None, "auto"):
        missing = "neither train_batch_size nor train_micro_batch_size_per_gpu is given"
        k.problems.append(f"{missing}; --given {_TRAINER}per_device_train_batch_size=N")
    if (k.value(evaluated := f"{_TRAINER}per_device_eval_batch_size") or 0) <= (micro.value or 1):
        k.ignore("evaluation holds no more than a step of training", evaluated)
    layout = _layout(k, files)
    precision = _precision(k, of_trl)
    return TransformersStep(
        **said_in_table(k, "TRL" if of_trl else "transformers"),
        length=_length(k),
        **layout,
        **sharding_of(k, contents, precision.value, cut=layout["sequence"].value > 1),
        micro_batch=micro,
        accumulation=_given(k, contents, "gradient_accumulation_steps", "gradient_accumulation_steps"),
        precision=precision,
        recompute=Said(bool(k.value(again) or k.value(by_fsdp)), k.given_of(again, by_fsdp) or (again,)),
        reentrant=Said(reentrant, (f"{kwargs}use_reentrant",)),
        attention=_attention(k),
        optimizer=_optimizer(k),
        **fp8_of(k),
        quantized=bits_of(k, {f"{_TRAINER}load_in_{bits}bit": bits for bits in (4, 8)}),
    )


def _layout(k: Account, files: JobFiles) -> dict[str, Any]:
    """How many ranks share a sequence or a layer: by DeepSpeed's Ulysses or torch's context parallelism."""
    processes, tp = said(k, "accelerate.num_processes"), said(k, f"{_PARALLEL}tp_size")
    if processes.value is not None and files.gpus not in (None, processes.value):
        k.problems.append(f"{processes.names[0]} is {processes.value}, but --gpus {files.gpus}; leave one")
    own, beside, cp = "sequence_parallel_size", f"{_PARALLEL}sp_size", f"{_PARALLEL}cp_size"
    how = f"{_PARALLEL}cp_comm_strategy"
    sizes = {name: k.count(name) for name in (own, beside, cp)}
    asked = [name for name, ranks in sizes.items() if ranks > 1]
    if len({sizes[name] for name in asked}) > 1 or (sizes[cp] > 1 and len(asked) > 1):
        k.problems.append(f"{' and '.join(map(k.spelled, asked))}: leave one")
    k.ignore("it is DeepSpeed's", f"{_PARALLEL}sp_backend")
    k.ignore("it is torch's", f"{_PARALLEL}cp_backend")
    k.ignore("sequences are whole", how)
    sequence = Said(max(sizes.values()), k.given_of(*(asked or sizes)))
    if sizes[cp] == 1:
        return {"gpus": processes, "tensor": tp, "sequence": sequence}
    if k.value(f"{_FSDP}version") != 2:
        k.problems.append(f"{k.spelled(cp)} needs accelerate.fsdp_config.fsdp_version 2")
    if _attention(k).value != "sdpa":
        k.problems.append(f"{k.spelled(cp)} needs {_TRAINER}attn_implementation sdpa")
    by = Said("ring" if k.value(how) == "alltoall" else "all-gather", (how,), "torch's, balanced")
    return {"gpus": processes, "tensor": tp, "sequence": sequence, "sequence_by": by}


def _given(k: Account, contents: Mapping[str, Any], own: str, trainers: str) -> Said:
    """A count that DeepSpeed has, or where it says "auto" or nothing the Trainer; None where neither."""
    beside, of_trainer = f"{_TRAINER}{trainers}", "trainer" in contents
    accelerates = f"accelerate.deepspeed_config.{own}"
    names = [own, *([accelerates] if accelerates in k.program_arguments else [])]
    value, name = k.chosen(*names, beside)
    if name != beside:
        if of_trainer and beside in k.given and k.value(beside) != value:
            k.problems.append(f"{k.spelled(name)} and {k.spelled(beside)} differ; leave one, or say auto")
        k.took(f"as {name}", beside)
        return Said(value, (name,))
    if not of_trainer and beside not in k.given:
        if any(each in k.given and k.given[each].value == "auto" for each in names):
            k.problems.append(f"{own} is auto, but no Trainer's arguments are given beside")
        return Said(None, (own,))
    return Said(value, (beside,))


def _length(k: Account) -> Said:
    lengths = [name for each in _LENGTHS if k.has(name := f"{_TRAINER}{each}")] or [f"{_TRAINER}max_length"]
    values = {k.value(each) for each in lengths}
    if len(values) != 1:
        k.problems.append(f"{' and '.join(lengths)} differ")
    return Said(k.value(lengths[0]), lengths)


def _attention(k: Account) -> Said:
    of_model, plain = f"{_TRAINER}model_init_kwargs.attn_implementation", f"{_TRAINER}attn_implementation"
    value, name = k.chosen(f"{_PARALLEL}sp_attn_implementation", of_model, plain)
    if value not in _ATTENTION:
        k.refuse("this implementation of attention", name)
    return Said(value, (name,))


def _precision(k: Account, of_trl: bool) -> Said:
    mixed = k.value(_MIXED)
    asked: dict[str, list[str]] = {"bf16": [_MIXED] * (mixed in ("bf16", "fp8"))}
    asked["fp16"] = [_MIXED] * (mixed == "fp16")
    for kind, names in asked.items():
        own, trainers = f"{kind}.enabled", f"{_TRAINER}{kind}"
        value, name = k.chosen(own, trainers)
        if name == own and trainers in k.given and k.value(trainers) != value:
            k.problems.append(f"{k.spelled(own)} and {k.spelled(trainers)} differ")
        names[:0] = k.given_of(own, trainers) if value is True else ()
        k.ignore(f"{kind} is off", own, trainers)
    k.ignore("none is asked for", _MIXED)
    if of_trl and not any(asked.values()) and not k.has(f"{_TRAINER}bf16"):
        return Said("bf16", (), "TRL's default")
    return precision_of(k, asked["bf16"], asked["fp16"])


def _beside(k: Account) -> None:
    """What has an effect on steps, or more memory than they, in some jobs alone."""
    for name in ("flops_profiler", "comms_logger"):
        if not (k.value(name) or {}).get("enabled"):
            k.ignore("it is off", name)
    evaluates = {k.value(f"{_TRAINER}{name}") for name in ("eval_strategy", "evaluation_strategy")}
    if evaluates <= {None, "no"}:
        evaluation = "per_device_eval_batch_size", "eval_accumulation_steps"
        k.ignore("nothing is evaluated", *(f"{_TRAINER}{name}" for name in evaluation))
    if k.value("accelerate.distributed_type") != "FSDP" or k.value(_MIXED) != "no":
        k.ignore(
            "weights are loaded in it; those that are trained are float32 and half precision as the rest "
            "of the job says",
            *(
                f"{_TRAINER}{where}{name}"
                for where in ("", "model_init_kwargs.")
                for name in ("torch_dtype", "dtype")
            ),
        )


def _optimizer(k: Account) -> Said:
    """DeepSpeed's, or where it has none the Trainer's."""
    value, name = k.chosen("optimizer.type", f"{_TRAINER}optim")
    k.took("DeepSpeed's optimizer counts", f"{_TRAINER}optim")
    kind = str(value).lower()
    few = "adam 8 bits" if kind.startswith(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit")) else kind
    return Said("adam" if kind in _ADAM else few, (name,))


def sharding_of(
    k: Account, contents: Mapping[str, Mapping[str, Any]], precision: str, *, cut: bool
) -> dict[str, Any]:
    """The fields of a step that say how it shards: FSDP where accelerate's file asks for it, else a stage of
    ZeRO.

    Args:
        contents: of the files, by what they are.
        cut: ranks share a sequence.
    """
    name, beside = "accelerate.distributed_type", contents.get("accelerate", {})
    kind = k.value(name)
    k.took("which files count", name)
    if kind is None:
        of_deepspeed = "deepspeed" in contents or "deepspeed_config" in beside
        kind = "FSDP" if "fsdp_config" in beside else "DEEPSPEED" if of_deepspeed else "NO"
    if kind != "DEEPSPEED":
        if "deepspeed" in contents:
            k.problems.append(f"{name} is {kind} beside a configuration of DeepSpeed")
        k.ignore("of DeepSpeed", *(n for n in k.given if "offload_" in n and "fsdp" not in n))
        return _fsdp_of(k) if kind == "FSDP" else {"sharding": Said("ddp", (name,))}
    return {**zero_of(k, "", _OF_DEEPSPEED), "reduce": _messages(k, precision, cut=cut)}


def _fsdp_of(k: Account) -> dict[str, Any]:
    version, freed, wraps = f"{_FSDP}version", f"{_FSDP}reshard_after_forward", f"{_FSDP}auto_wrap_policy"
    of = dict.fromkeys(("FULL_SHARD", True), "fsdp")  # True is 1 too, the number of FULL_SHARD
    of |= dict.fromkeys(("SHARD_GRAD_OP", 2, False), "fsdp, kept")
    name = f"{_FSDP}sharding_strategy"
    if k.value(version) == 2 or k.value(name) is None:
        name = freed
    value = True if k.value(name) is None else k.value(name)
    if value not in of:
        k.refuse("weights that are whole, or sharded over a part of the replicas", name)
    k.ignore(f"of the other version of FSDP than {k.value(version)}", f"{_FSDP}sharding_strategy", freed)
    if k.value(version) == 1:
        k.stand_in(*FSDP_1, version)
    k.took(f"FSDP {k.value(version)}", version)
    if k.value(wraps) != "TRANSFORMER_BASED_WRAP":
        k.refuse("units of FSDP that are no layers", wraps)
    k.ignore("a unit for each layer", wraps)
    return {**said_in_table(k, "fsdp"), "sharding": Said(of.get(value, "fsdp"), (name,))}


def _messages(k: Account, precision: str, *, cut: bool) -> Said:
    """The type in which gradients are summed over ranks: that of the weights, but for parts of sequences,
    whose gradients DeepSpeed sums in float32 unless another is asked for."""
    by_accelerate, of_wholes = f"{_OF_DEEPSPEED}{_TYPE}", "communication_data_type"
    of_parts = by_accelerate if cut and k.has(by_accelerate) and not k.has(_TYPE) else _TYPE
    name, other = (of_parts, of_wholes) if cut else (of_wholes, of_parts)
    k.ignore("of DeepSpeed, whose own key counts", by_accelerate)
    k.ignore(f"{name} holds where sequences are {'cut' if cut else 'whole'}", other)
    asked = str(k.value(name)).lower() if k.value(name) is not None else precision
    if asked not in (precision, "fp32"):
        k.refuse(f"gradients of {precision} that are sent in {asked}", name)
    return Said("fp32" if asked == "fp32" else "weights", (name,))


def fp8_of(k: Account) -> dict[str, Any]:
    """The fields ``fp8`` and ``library`` of a step; accelerate takes TransformerEngine where no library is
    named."""
    if k.value(_MIXED) != "fp8":
        k.ignore("of matmuls in eight bits, which the job has not", _BACKEND, _HISTORY, _ALGORITHM, _FORMAT)
        return {}
    backend = str(k.value(_BACKEND)).upper()
    if backend == "AO":
        because = "all projections of layers are in eight bits, and weights are gathered in sixteen"
        k.leave("time and memory", because, _BACKEND)
        return {"fp8": Said("tensorwise", (_MIXED, _BACKEND), "torchao's default recipe")}
    if backend != "TE":
        k.refuse("matmuls in eight bits by another library than TransformerEngine and torchao", _BACKEND)
        return {}
    if k.value(_ALGORITHM) == "max" and k.value(_HISTORY) > 1:
        k.set("model_options.fp8_history", k.value(_HISTORY), _HISTORY, _ALGORITHM)
    k.ignore("the most recent magnitude makes a scale, by default", _HISTORY, _ALGORITHM)
    if k.value(_FORMAT) != "HYBRID":
        k.leave("nothing", "gradients have another format of eight bits", _FORMAT)
    k.ignore("weights and inputs in E4M3, gradients in E5M2", _FORMAT)
    fp8 = Said("delayed", (_MIXED, _BACKEND), "DelayedScaling")
    return {"fp8": fp8, "library": Said("transformer-engine", (_BACKEND,))}
