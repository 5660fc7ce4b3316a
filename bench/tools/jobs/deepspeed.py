"""Jobs of DeepSpeed: its JSON, with a model's config.json, accelerate's YAML and the Trainer's arguments."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.accelerate_fp8 import by_transformer_engine, set_fp8
from spbench.bench.tools.jobs.account import key_account
from spbench.bench.tools.jobs.argument_tables import argument_table, flat
from spbench.bench.tools.jobs.deepspeed_files import MODEL_PATH, sorted_files
from spbench.bench.tools.jobs.deepspeed_sharding import set_sharding, set_trained
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.model_names import named_model
from spbench.bench.tools.jobs.torchtitan import ROTATIONS
from spbench.bench.tools.jobs.transformers_kernels import (
    COMPILED,
    FUSED_BY_COMPILER,
    SEPARATE,
    attention_of,
)
from spbench.bench.tools.jobs.transformers_step import WHOLE_EMBEDDING, TransformersStep

#: what the keys of the Trainer and of accelerate begin with, and those of two of its sections
_TRAINER, _ACCELERATE = "TrainingArguments.", "accelerate."
_FSDP, _PARALLEL = "accelerate.fsdp_config.fsdp_", "accelerate.parallelism_config.parallelism_config_"
#: the arguments of scripts that say how long a sequence is
_LENGTHS = ("max_length", "max_seq_length", "block_size", "model_max_length", "cutoff_len")
#: as transformers names it
_ATTENTION = ("sdpa", "flash_attention_2", "flash_attention_3", "eager")
#: other spellings that DeepSpeed takes: names of fields without their alias, and an old section
_ALIASES = {
    **{
        f"zero_optimization.{name}": f"zero_optimization.stage3_{name}"
        for name in (
            *("prefetch_bucket_size", "param_persistence_threshold", "model_persistence_threshold"),
            *("max_live_parameters", "max_reuse_distance", "gather_16bit_weights_on_model_save"),
            *("module_granularity_threshold", "use_all_reduce_for_fetch_params", "allgather_sequential"),
        )
    },
    "bfloat16.enabled": "bf16.enabled",
}
_ADAM = {"adam", "adamw", "fusedadam", "adamw_torch", "adamw_torch_fused", "adamw_apex_fused", "adamw_hf"}


def read(files: JobFiles) -> Job | None:
    """A job of DeepSpeed; None where no file is a configuration of DeepSpeed or accelerate.

    Raises:
        UserError: a file is damaged, or there are two of a kind.
    """
    by_kind = sorted_files(files)
    return None if by_kind is None else DeepSpeedJob(by_kind, files).job()


def _named(by_kind: Mapping[str, Mapping[str, Any]]) -> Iterator[tuple[str, Any]]:
    """The values of all files but the model's, by the names of their keys."""
    arguments = argument_table("deepspeed").arguments
    for name, value in flat(by_kind.get("deepspeed", {}), arguments):
        yield _ALIASES.get(name, name), value
    for kind, name in (("trainer", _TRAINER), ("accelerate", _ACCELERATE)):
        yield from flat(by_kind.get(kind, {}), arguments, name)


class DeepSpeedJob:
    """The translation of one job.

    Args:
        contents: of the files, by what they are.
    """

    def __init__(self, contents: Mapping[str, Mapping[str, Any]], files: JobFiles):
        self.contents, self.files = contents, files
        #: of the model's config.json
        self.fields: Mapping[str, Any] = {}
        self.keys = key_account(argument_table("deepspeed"), _named(contents), overrides=files.environment)

    def job(self, kind: str = "deepspeed") -> Job:
        k = self.keys
        replicas = self._parallelism()
        self._model()
        if replicas is not None:
            self._batch(replicas)
        self._length()
        self._precision()
        set_sharding(k, self.contents)
        self._optimizer()
        set_trained(k, self.fields)
        self._beside()
        return k.job(kind, self.files, k.arguments())

    def _model(self) -> None:
        k = self.keys
        family, liger = self._family(), k.value(f"{_TRAINER}use_liger_kernel")
        if family in SEPARATE and not by_transformer_engine(k):
            note = f"projections of {family} are layers of their own in transformers"
            k.set("model_options.separate_projections", True, note=note)
            if not liger and not k.value(f"{_TRAINER}torch_compile"):
                k.set("model_options.rms_norm", "plain", note="operator by operator in transformers")
        if liger:
            for option, value in (
                ("swiglu", "in_place"),
                ("loss_tile", "liger"),
                ("cross_entropy", "in_place"),
            ):
                k.set(f"model_options.{option}", value, f"{_TRAINER}use_liger_kernel")
        k.ignore("kernels are transformers' own", f"{_TRAINER}use_liger_kernel")
        sp = f"{_PARALLEL}sp_attn_implementation"
        attention, name = k.chosen(sp, f"{_TRAINER}attn_implementation")
        if attention not in _ATTENTION:
            k.refuse("this implementation of attention", name)
        k.set(
            "model_options.attention",
            attention_of(str(attention), self.fields) or "flash_attention_2",
            name,
        )
        again, kwargs = f"{_TRAINER}gradient_checkpointing", f"{_TRAINER}gradient_checkpointing_kwargs"
        by_fsdp = f"{_FSDP}activation_checkpointing"
        if k.value(again) or k.value(by_fsdp):
            k.set("model_options.recompute", "full", again, by_fsdp)
            reentrant = (k.value(kwargs) or {}).get("use_reentrant", not k.value(by_fsdp))
            k.took("use_reentrant", kwargs)
            if reentrant is False:
                k.set("model_options.recompute_early_stop", True, kwargs, note="without reentrance")
            else:
                k.set("model_options.recompute_reentrant", True, kwargs, note="the default is reentrant")
        k.ignore("nothing runs again", again, by_fsdp, kwargs)
        if k.value(f"{_TRAINER}torch_compile"):
            fused = FUSED_BY_COMPILER[1:] if liger else FUSED_BY_COMPILER
            k.add("model_options.fusions", [*fused], f"{_TRAINER}torch_compile")
            k.approximate(COMPILED, f"{_TRAINER}torch_compile")

    def _family(self) -> str:
        """Set the model, of a config.json or by its name; returns its family."""
        k, named = self.keys, f"{_TRAINER}model_name_or_path"
        model = self.contents.get("model")
        if model is not None:
            k.set("model", model[MODEL_PATH], note="the config.json")
            self.fields = {name: value for name, value in model.items() if name != MODEL_PATH}
            k.ignore("its config.json is given", named)
            named_model(str(model[MODEL_PATH])).account(k)
            return str(model["model_type"])
        name = k.value(named)
        if not name:
            k.problems.append(
                f"which model it is is not said; give its config.json beside, or --given {named}=NAME"
            )
            return ""
        try:
            known = named_model(name)
        except UserError as error:
            k.problems.append(f"{k.spelled(named)}: {error}")
            return ""
        k.set("model", known.model, named)
        known.account(k, named)
        self.fields = known.fields
        return str(known.fields["model_type"])

    def _parallelism(self) -> int | None:
        """Set strategy and sizes; returns how many replicas there are."""
        k = self.keys
        processes = "accelerate.num_processes"
        said = k.count(processes) if k.value(processes) is not None else None
        gpus = self.files.gpus if self.files.gpus is not None else said
        k.problems += self.files.machine_problems(said)
        if said is not None and gpus != said:
            k.problems.append(f"{processes} is {said}, but --gpus {gpus}; leave one")
        own, beside = "sequence_parallel_size", f"{_PARALLEL}sp_size"
        sp = max(k.count(own), k.count(beside))
        if own in k.given and beside in k.given and k.value(own) != k.value(beside):
            k.problems.append(f"{own} {k.value(own)} and {beside} {k.value(beside)} differ")
        k.ignore("it is DeepSpeed's", f"{_PARALLEL}sp_backend")
        names = [name for name in (own, beside) if name in k.given]
        if (cp := self._context_parallel()) > 1 and sp > 1:
            k.problems.append(f"{_PARALLEL}cp_size is {cp} and {' and '.join(names)} {sp}; leave one")
        elif cp > 1:
            sp = cp
        elif sp > 1:
            k.set("strategy", "ulysses", *names)
            k.set("sizes.sp", sp, *names)
        else:
            k.set("strategy", "single", note="data parallel alone")
        tp, groups = (k.count(f"{_PARALLEL}{each}_size") for each in ("tp", "dp_replicate"))
        sp *= self._tensor_parallel(tp, sp)
        if gpus is None:
            return None
        if gpus % (sp * groups):
            k.problems.append(f"{gpus} GPUs are no multiple of {sp * groups} ranks, which share a batch")
            return None
        if groups > 1:
            k.set("training.data_parallel_replicate_degree", groups, f"{_PARALLEL}dp_replicate_size")
        shards, share = f"{_PARALLEL}dp_shard_size", gpus // (sp * groups)
        if k.value(shards) not in (None, share):
            k.problems.append(f"{shards} is {k.value(shards)}, but {gpus} GPUs / {sp * groups} are {share}")
        given = [name for name in (processes, shards) if name in k.given]
        k.set("sizes.dp", gpus // sp, *given, note=f"{gpus} GPUs / {sp}" if sp > 1 else f"{gpus} GPUs")
        return gpus // sp

    def _tensor_parallel(self, tp: int, sp: int) -> int:
        """Set transformers' tensor parallelism, if there is any; returns its ranks."""
        k, size = self.keys, f"{_PARALLEL}tp_size"
        if tp > 1:
            within = [each for each in k.settings if each.path == "strategy" and sp > 1]
            k.settings[:] = [each for each in k.settings if each.path != "strategy"]
            strategy = "+".join(["tensor_parallel", *(each.value for each in within)])
            k.set("strategy", strategy, size, note="transformers' tp_plan")
            k.set("sizes.tp", tp, size)
            loss = TransformersStep.tensor_loss
            k.set("strategy_options.loss", loss.value, size, note=loss.note)
            k.approximate(WHOLE_EMBEDDING)
        k.ignore("one part: not split", size, f"{_PARALLEL}dp_replicate_size")
        return tp

    def _context_parallel(self) -> int:
        """Set torch's context parallelism of accelerate, if there is any; returns the ranks of a sequence."""
        k, size, how = self.keys, f"{_PARALLEL}cp_size", f"{_PARALLEL}cp_comm_strategy"
        ranks = k.count(size)
        k.ignore("it is torch's", f"{_PARALLEL}cp_backend")
        if ranks == 1:
            k.ignore("sequences are whole", how)
            return 1
        strategy, options = ROTATIONS[k.value(how)]
        k.set("strategy", strategy, size, how, note="torch's context parallelism")
        for option, value in options.items():
            k.set(f"strategy_options.{option}", value, how)
        k.set("strategy_options.placement", "zigzag", note="torch's load balancing, which is on")
        k.set("sizes.sp", ranks, size)
        if k.value(f"{_FSDP}version") != 2:
            k.problems.append(f"{k.spelled(size)} needs accelerate.fsdp_config.fsdp_version 2")
        if k.value(name := f"{_TRAINER}attn_implementation") != "sdpa":
            k.problems.append(f"{k.spelled(size)} needs {name} sdpa")
        return ranks

    def _batch(self, replicas: int) -> None:
        """DeepSpeed's rule: batch = micro-batch x accumulation x replicas; one that is not given follows."""
        k = self.keys
        micro, micro_name = self._given("train_micro_batch_size_per_gpu", "per_device_train_batch_size")
        parts, parts_name = self._given("gradient_accumulation_steps", "gradient_accumulation_steps")
        total, name = k.value("train_batch_size"), "train_batch_size"
        if total in (None, "auto"):
            if micro is None:
                missing = "neither train_batch_size nor train_micro_batch_size_per_gpu is given"
                k.problems.append(f"{missing}; --given {_TRAINER}per_device_train_batch_size=N")
                return
            parts = 1 if parts is None else parts
            total, name = micro * parts * replicas, micro_name
            k.took(f"batch: {total}", "train_batch_size")
        elif micro is None:
            parts = 1 if parts is None else parts
            micro = total // (parts * replicas) if parts > 0 else 0
        elif parts is None:
            parts = total // (micro * replicas) if micro > 0 else 0
        product = f"micro-batch {micro} x accumulation {parts} x {replicas} replicas"
        assert parts is not None
        if min(total, micro, parts) < 1 or total != micro * parts * replicas:
            k.problems.append(f"train_batch_size {total} is not {product}")
            return
        others = [each for each in (micro_name, parts_name) if each in k.given and each != name]
        k.set("batch", total, name, *others, note=product)
        if parts != 1:
            k.set("training.micro_batches", parts, parts_name)
        k.took(f"training.micro_batches: {parts}", parts_name)

    def _length(self) -> None:
        k = self.keys
        lengths = [name for each in _LENGTHS if k.has(name := f"{_TRAINER}{each}")]
        values = {k.value(each) for each in lengths}
        if values <= {None}:
            advice = f"give max_length among the Trainer's arguments, or --given {_TRAINER}max_length=N"
            k.problems.append(f"how long sequences are is not said; {advice}")
        elif len(values) != 1:
            k.problems.append(f"{' and '.join(lengths)} differ")
        else:
            k.set("seq_len", k.count(lengths[0]), *lengths)

    def _given(self, own: str, trainers: str) -> tuple[int | None, str]:
        """A count that DeepSpeed has, or where it says "auto" or nothing the Trainer; None where neither."""
        k, beside = self.keys, f"{_TRAINER}{trainers}"
        accelerates = f"accelerate.deepspeed_config.{own}"
        names = [own, *([accelerates] if accelerates in k.program_arguments else [])]
        value, name = k.chosen(*names, beside)
        if name != beside:
            if "trainer" in self.contents and beside in k.given and k.value(beside) != value:
                k.problems.append(f"{k.spelled(name)} and {k.spelled(beside)} differ; leave one, or say auto")
            k.took(f"as {name}", beside)
            return value, name
        automatic = any(each in k.given and k.given[each].value == "auto" for each in names)
        if "trainer" not in self.contents and beside not in k.given:
            if automatic:
                k.problems.append(f"{own} is auto, but no Trainer's arguments are given beside")
            return None, own
        return value, beside

    def _precision(self) -> None:
        k = self.keys
        chosen = {}
        for kind in ("bf16", "fp16"):
            own, trainers = f"{kind}.enabled", f"{_TRAINER}{kind}"
            value, name = k.chosen(own, trainers)
            if name == own and trainers in k.given and k.value(trainers) != value:
                k.problems.append(f"{k.spelled(own)} and {k.spelled(trainers)} differ")
            k.ignore(f"{kind} is off", own, trainers)
            if value is True:
                chosen[kind] = [each for each in (own, trainers) if each in k.given]
        mixed = k.value("accelerate.mixed_precision")
        set_fp8(k)
        if mixed == "fp8":
            chosen.setdefault("bf16", []).append("accelerate.mixed_precision")
        elif mixed != "no":
            chosen.setdefault(mixed, []).append("accelerate.mixed_precision")
        if len(chosen) > 1:
            k.problems.append("bf16 and fp16 are both asked for; leave one")
        precision, names = next(iter(chosen.items()), ("fp32", []))
        k.set("precision", precision, *names, note="" if names else "neither bf16 nor fp16")
        k.ignore("none is asked for", "accelerate.mixed_precision")

    def _beside(self) -> None:
        """What has an effect on steps, or more memory than they, in some jobs alone."""
        k = self.keys
        for name in ("flops_profiler", "comms_logger"):
            if not (k.value(name) or {}).get("enabled"):
                k.ignore("it is off", name)
        evaluated = f"{_TRAINER}per_device_eval_batch_size"
        evaluates = {k.value(f"{_TRAINER}{name}") for name in ("eval_strategy", "evaluation_strategy")}
        if evaluates <= {None, "no"}:
            k.ignore("nothing is evaluated", evaluated, f"{_TRAINER}eval_accumulation_steps")
        micro, _ = self._given("train_micro_batch_size_per_gpu", "per_device_train_batch_size")
        if (k.value(evaluated) or 0) <= (micro or 1):
            k.ignore("evaluation holds no more than a step of training", evaluated)
        if k.value("accelerate.distributed_type") != "FSDP" or k.value("accelerate.mixed_precision") != "no":
            k.ignore(
                "weights are loaded in it; those that are trained are float32 and half precision as the rest "
                "of the job says",
                *(f"{_TRAINER}{name}" for name in ("torch_dtype", "dtype")),
            )

    def _optimizer(self) -> None:
        k = self.keys
        for name in ("optimizer.type", f"{_TRAINER}optim"):
            if k.value(name) is not None and k.value(name).lower() not in _ADAM:
                k.refuse("another optimizer than Adam", name)
            k.took("Adam, the optimizer that there is", name)
        k.first_steps()
