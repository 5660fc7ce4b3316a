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
        names = [self.named(f"{kind}_degree") for kind in kinds]
        copies, tp, pp, cp = (k.count(name) for name in names)
        shard_name = self.named("data_parallel_shard_degree")
        shards, others = k.value(shard_name), copies * tp * pp * cp
        self.stages = k.facts["stages"] = pp
        set_pipeline(self, pp, names[2])
        k.problems += self.files.machine_problems(others * shards if shards > 0 else None)
        if shards == 0 or shards < -1:
            k.problems.append(f"{shard_name}: {shards} is neither -1 nor a number of ranks")
            return False
        if gpus is None and shards < 0:
            return False
        ranks = gpus if gpus is not None else others * shards
        if ranks % others or (shards > 0 and others * shards != ranks):
            k.problems.append(
                f"{ranks} GPUs are not the degrees multiplied: replicate {copies} x shard {shards} x "
                f"context {cp} x tensor {tp} x pipeline {pp}"
            )
            return False
        shards = ranks // others
        if shards * cp == 1:
            what = "weights in float32, which autocast makes bfloat16 where they are used"
            k.problems.append(f"{shard_name} is 1: {what}: not modelled")
        self._strategy(tp, cp, names[1], names[3])
        self.set_experts(tp, names[1])
        note = "" if k.value(shard_name) > 0 else f"{ranks} GPUs / {others // copies}"
        k.set("sizes.dp", copies * shards, *names[:1] * (copies > 1), shard_name, note=note)
        if copies > 1:
            k.set("training.data_parallel_replicate_degree", copies, names[0])
        for axis, size, name in (("pp", pp, names[2]), ("sp", cp, names[3]), ("tp", tp, names[1])):
            if size > 1:
                k.set(f"sizes.{axis}", size, name)
        mesh = ["pp"] * (pp > 1) + ["dp", "sp", "tp"]
        k.set("mesh", mesh, note="the order of torchtitan's meshes")
        self._backend()
        self.replicas = shards * copies
        return True

    def _strategy(self, tp: int, cp: int, tp_name: str, cp_name: str) -> None:
        k = self.keys
        loss, rotation = self.named("disable_loss_parallel"), self.named("context_parallel_rotate_method")
        balancer, parts = "parallelism.context_parallel_load_balancer", []
        options: dict[str, tuple[str, str]] = {}
        if tp > 1:
            split = self.value("parallelism.enable_sequence_parallel", True)
            parts.append("megatron_sp" if split else "tensor_parallel")
            k.took(f"strategy: {parts[0]}", *filter(k.has, ("parallelism.enable_sequence_parallel",)))
            options["vocabulary"] = "split", tp_name
            options["loss"] = "gathered" if k.value(loss) else "parallel", loss
        overlapped = self.named("enable_async_tensor_parallel")
        k.ignore("of tensor parallelism, which the job has not", loss, overlapped)
        if cp > 1:
            strategy, own = ROTATIONS[k.value(rotation)]
            parts.append(strategy)
            options |= {name: (value, rotation) for name, value in own.items()}
            balanced = self.value(balancer, "headtail")
            if balanced == "ptrr":
                k.refuse("sequences balanced by blocks of a mask", balancer)
            options["placement"] = "zigzag" if balanced else "contiguous", balancer
            if not self.recent:
                k.approximate(
                    "a sequence's keys and values are sent once; torchtitan repeats them first for the "
                    "queries that share them"
                )
        k.ignore("of context parallelism, which the job has not", rotation, balancer)
        names = [tp_name] * (tp > 1) + [cp_name, rotation] * (cp > 1)
        note = "" if names else "no rank has a part of a layer or a sequence"
        k.set("strategy", "+".join(parts) or "single", *names, note=note)
        for option, (value, name) in options.items():
            k.set(f"strategy_options.{option}", value, name)

    def _backend(self) -> None:
        k, policy = self.keys, "parallelism.fsdp_reshard_after_forward"
        kept = "FSDP2, which keeps a stage's weights between micro-batches"
        k.facts |= {
            "freed": self.value(policy, "default"),
            "policy": [policy] if policy in k.program_arguments else [],
            "backend_note": kept if self.stages > 1 else "FSDP2",
        }
        call(k, "backend")

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

    def _micro_batches(
        self, runs: int, parts: int, total_name: str, local_name: str, parts_name: str
    ) -> None:
        """Set how many micro-batches a step has: a pipeline's, or runs whose gradients are added up."""
        if parts_name and runs > 1:
            self.keys.refuse_given("a pipeline that runs several times a step: not modelled", total_name)
        if runs > 1:
            self.keys.set("training.micro_batches", runs, total_name, local_name)
        elif parts > 1:
            self.keys.set("training.micro_batches", parts, local_name, parts_name)
        self.keys.took("one micro-batch" if parts == 1 else f"micro_batches: {parts}", parts_name)

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
