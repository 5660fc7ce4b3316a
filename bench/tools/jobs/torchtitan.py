"""Jobs of torchtitan, of Llama 3 and Qwen3: its TOML, and its configurations in Python where they are plain
values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import ArgumentTable, argument_table, flat
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles, mapping_in
from spbench.bench.tools.jobs.rules import call
from spbench.bench.tools.jobs.torchtitan_models import (
    TorchtitanModel,
    micro_batches,
    registered,
    set_pipeline,
)
from spbench.bench.yaml_files import read_yaml

#: strategies and their options, by context_parallel_rotate_method
ROTATIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "allgather": ("all_gather_kv", {"gradients": "ring"}),
    "alltoall": ("ring_attention", {}),
}


#: sections of which a TOML file of torchtitan has some
_SECTIONS = {"model", "training", "parallelism", "activation_checkpoint", "experimental"}


@cache
def versions() -> Mapping[str, ArgumentTable]:
    """The table of keys of each version: versions in TOML from the newest on, then registries in Python."""
    content = read_yaml(Path(__file__).with_suffix(".yaml"))
    return {version: argument_table("torchtitan", version) for version in content["versions"]}


def read(files: JobFiles) -> Job | None:
    """A job of torchtitan; None if there are several files, or the file is no configuration of torchtitan.

    Raises:
        UserError: the file is damaged, or has values that are not plain.
    """
    content = _content_of(files.files[0]) if len(files.files) == 1 else None
    return None if content is None else TorchtitanJob(content, files).job()


def _content_of(file: JobFile) -> Mapping[str, Any] | None:
    """The sections of a file; None if it is no TOML with some of them and no Python that makes a
    configuration. UserError if the file is damaged, or has values that are not plain."""
    if file.path.suffix == ".py":
        return registered(file)
    content = mapping_in(file) if file.path.suffix == ".toml" else None
    if content is None:
        return None
    sections = {name for name, section in content.items() if isinstance(section, dict)}
    return content if len(_SECTIONS & sections) >= 2 else None


class TorchtitanJob(TorchtitanModel):
    """The translation of one job.

    Args:
        content: of its file.
        launched: torchtitan's own script starts it.
    """

    def __init__(self, content: Mapping[str, Any], files: JobFiles, *, launched: bool = True):
        self.files, self.launched = files, launched
        unknown = {
            version: sum(name not in table.arguments for name, _ in flat(content, table.arguments))
            for version, table in versions().items()
        }
        self.version = min(unknown, key=lambda version: unknown[version])  # of equals the newest
        table = versions()[self.version]
        self.keys: Account = key_account(table, flat(content, table.arguments), overrides=files.environment)
        self.keys.facts |= {"version": self.version, "recent": self.recent}

    def job(self) -> Job:
        """The job, with what became of each key."""
        k = self.keys
        self.set_model()
        if self._parallelism():
            self._batch()
        self._recomputation()
        self._optimizer()
        self._compile()
        return k.job("torchtitan", self.files, k.arguments())

    def _parallelism(self) -> bool:
        """Set strategy, sizes and backend; returns whether the number of replicas is known."""
        k, gpus = self.keys, self.files.gpus
        kinds = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel")
        keys = [self.named(f"{kind}_degree") for kind in kinds]
        copies, tp, pp, cp = map(k.count, keys)
        shard_key = self.named("data_parallel_shard_degree")
        asked, others = k.value(shard_key), copies * tp * pp * cp
        self.stages = k.facts["stages"] = pp
        set_pipeline(self, pp, keys[2])
        k.problems += self.files.machine_problems(others * asked if asked > 0 else None)
        ranks = others * asked if gpus is None and asked > 0 else gpus
        shards = 0 if ranks is None or ranks % others else ranks // others
        fits = shards > 0 and asked in (-1, shards)
        self.replicas = shards * copies
        policy = "parallelism.fsdp_reshard_after_forward"
        parts = self.value("parallelism.expert_tensor_parallel_degree", 1)
        kept = "FSDP2, which keeps a stage's weights between micro-batches"
        k.facts |= {"shard_key": shard_key, "tensor_key": keys[1], "copied": keys[:1] if copies > 1 else []}
        k.facts |= {"copies": copies, "tensor": tp, "context": cp, "asked": asked, "ranks": ranks}
        k.facts |= {"fits": fits, "replicas": self.replicas, "unsharded": shards * cp == 1}
        k.facts["replicas_note"] = "" if asked > 0 else f"{ranks} GPUs / {others // copies}"
        k.facts |= {"mesh": ["pp"] * (pp > 1) + ["dp", "sp", "tp"], "freed": self.value(policy, "default")}
        k.facts |= {"parts": parts, "unlike_parts": parts not in (1, tp)}
        k.facts |= {
            "policy": [policy] if policy in k.program_arguments else [],
            "backend_note": kept if pp > 1 else "FSDP2",
        }
        k.facts |= self._facts_of_strategy(keys[1:2] * (tp > 1), keys[3:] * (cp > 1))
        call(k, "parallelism")
        return fits

    def _facts_of_strategy(self, tensor: list[str], context: list[str]) -> dict[str, Any]:
        """The facts of the strategy, from the keys of tensor and of context parallelism, if there is some."""
        k, rotation = self.keys, self.named("context_parallel_rotate_method")
        split = self.value("parallelism.enable_sequence_parallel", True)
        tensor_by, context_by = "megatron_sp" if split else "tensor_parallel", ROTATIONS[k.value(rotation)][0]
        keys = [*tensor, *context, *[rotation] * bool(context)]
        return {
            "tensor_by": tensor_by,
            "strategy": "+".join([tensor_by] * bool(tensor) + [context_by] * bool(context)) or "single",
            "strategy_keys": keys,
            "strategy_note": "" if keys else "no rank has a part of a layer or a sequence",
            "gathered": k.value(self.named("disable_loss_parallel")),
            "balanced": self.value("parallelism.context_parallel_load_balancer", "headtail"),
        }

    def _batch_of_tokens(self) -> None:
        """Set batch and length of a version that counts tokens of a micro-batch."""
        k, local_name = self.keys, "training.num_tokens_per_microbatch_per_dp_rank"
        length_name, total_name = "training.max_context_length", "training.num_tokens_per_train_step"
        local, length, total = k.count(local_name), k.count(length_name), k.value(total_name)
        if local % length:
            k.problems.append(f"{local_name} {local} is no multiple of {length_name} {length}")
            return
        parts, parts_name = micro_batches(self, local) if self.stages > 1 else (1, "")
        at_once = local * self.replicas * parts
        total = at_once if total < 0 else total
        if total == 0 or total % at_once:
            k.problems.append(
                f"{total_name} {total} is no multiple of {local_name} x {self.replicas} replicas"
            )
            return
        note = f"sequences of {length} tokens, {self.replicas} replicas"
        k.set("batch", total // length, local_name, total_name, length_name, note=note)
        self._micro_batches(total // at_once, parts, total_name, local_name, parts_name)
        k.set("seq_len", length, length_name)
        if chunks := self.value(name := "loss.num_chunks", 0):
            parts = k.count(self.named("context_parallel_degree"))
            k.set("model_options.loss_tile", -(-local // (chunks * parts)), name, note="tokens of a chunk")
        graphs = "training.disable_cuda_graphs"
        if not k.value(graphs):
            k.leave(
                "both", "CUDA graphs keep their tensors apart, and kernels start without the host", graphs
            )
            k.remarks.append("forward and backward are no CUDA graph, whose memory is kept apart")
        k.ignore("no CUDA graph is modelled", graphs)
        k.map("training.mixed_precision_param")

    def _batch(self) -> None:
        if self.version == "d":
            self._batch_of_tokens()
            return
        k, total_name = self.keys, "training.global_batch_size"
        name = "training.batch_size" if self.version == "a" else "training.local_batch_size"
        local, total = k.count(name), self.value(total_name, -1)
        at_once, replicas = local * self.replicas, f"{local} x {self.replicas} replicas"
        if total < 0:
            k.set("batch", at_once, name, note=replicas)
        elif total == 0 or total % at_once:
            k.problems.append(f"{total_name} {total} is no multiple of {name} {replicas}")
            return
        else:
            k.set("batch", total, total_name)
            k.took(f"batch: {total}", name)
        parts, parts_name = micro_batches(self, local) if self.stages > 1 else (1, "")
        self._micro_batches(max(1, total // at_once), parts, total_name, name, parts_name)
        k.set("seq_len", k.count("training.seq_len"), "training.seq_len")
        k.map("training.mixed_precision_param")

    def _micro_batches(self, runs: int, parts: int, total_key: str, local_key: str, parts_key: str) -> None:
        """Set how many micro-batches a step has: a pipeline's, or runs whose gradients are added up."""
        self.keys.facts |= {"runs": runs, "pieces": parts}
        self.keys.facts |= {"total_key": total_key, "local_key": local_key, "parts_key": parts_key}
        call(self.keys, "micro_batches")

    def _recomputation(self) -> None:
        k, stops = self.keys, "activation_checkpoint.early_stop"
        every = k.value("activation_checkpoint.selective_ac_option")
        is_number = every.isdecimal() and len(every) < 4
        k.facts |= {"every": int(every) if is_number else None, "every_text": repr(every)}
        k.facts["stops"] = self.value(stops, True)
        k.facts["stops_note"] = "" if stops in k.program_arguments else "torch's default"
        call(k, "recomputation")

    def _optimizer(self) -> None:
        k, old = self.keys, self.version == "a"
        launcher = "run_llama_train.sh" if old else "run_train.sh"
        k.facts["optimizer_key"] = "optimizer.fused" if old else "optimizer.implementation"
        k.facts["launcher"] = launcher if self.launched else ""
        call(k, "optimizer")
        k.first_steps()

    def _compile(self) -> None:
        k, switch = self.keys, "compile.enable" if self.recent else "training.compile"
        components = self.value("compile.components", ["model", "loss"])
        split = k.count(self.named("tensor_parallel_degree")) > 1
        k.facts |= {
            "compile_key": switch,
            "components": components,
            "compiled": k.value(switch) and bool({"model", "loss"} & {*components}),
            # ranks of tensor parallelism share the vocabulary in the loss
            "parallel_loss": split and not k.value(self.named("disable_loss_parallel")),
        }
        call(k, "compiler")
        self.set_fp8()
