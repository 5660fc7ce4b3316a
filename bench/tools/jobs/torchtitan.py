"""Jobs of torchtitan, of Llama 3 and Qwen3: its TOML, and its configurations in Python where they are plain
values."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from spbench.bench.setting_values import EXPANDABLE_SEGMENTS
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.keys import Key, Keys, flat, known_keys
from spbench.bench.tools.jobs.torchtitan_files import content_of
from spbench.bench.tools.jobs.torchtitan_models import set_model
from spbench.bench.tools.jobs.variables import ALLOCATOR
from spbench.bench.yaml_files import read_yaml

#: by context_parallel_rotate_method; with the strategy's own options
ROTATIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "allgather": ("all_gather_kv", {"gradients": "ring"}),
    "alltoall": ("ring_attention", {}),
}
#: the axes of a mesh, from the slowest-varying rank to the fastest
_MESH = ["pp", "dp", "sp", "tp"]


@cache
def versions() -> Mapping[str, tuple[str, Mapping[str, Key]]]:
    """Of each version, the newest first, the program and its keys."""
    content = read_yaml(Path(__file__).with_name("torchtitan_keys.yaml"))
    return {v: (str(name), known_keys(content, v)) for v, name in content["versions"].items()}


def read(files: JobFiles) -> Job | None:
    """A job of torchtitan; None where there are several files, or the file is none of its configurations.

    Raises:
        UserError: the file is damaged, or what it has is no plain values.
    """
    content = content_of(files.files[0]) if len(files.files) == 1 else None
    return None if content is None else TorchtitanJob(content, files).job()


class TorchtitanJob:
    """The translation of one job.

    Args:
        content: of its file.
    """

    def __init__(self, content: Mapping[str, Any], files: JobFiles):
        self.files = files
        unknown = {}
        for version, (_, known) in versions().items():
            unknown[version] = sum(name not in known for name, _ in flat(content, known))
        self.version = min(unknown, key=lambda version: unknown[version])  # of equals the newest
        program, known = versions()[self.version]
        self.keys = Keys(program, known, dict(flat(content, known)))

    def named(self, key: str) -> str:
        """The whole name of a key, whose section has changed."""
        return next(name for name in self.keys.known if name.rpartition(".")[2] == key)

    def job(self) -> Job:
        k = self.keys
        set_model(k, self.version)
        replicas = self._parallelism()
        if replicas is not None:
            self._batch(replicas)
        self._recomputation()
        self._optimizer()
        self._compile()
        return k.job("torchtitan", k.program, self.files, k.arguments())

    def _parallelism(self) -> int | None:
        """Set strategy, sizes and backend; returns how many replicas there are."""
        k, gpus = self.keys, self.files.gpus
        names = [
            self.named(f"{kind}_degree")
            for kind in (
                "data_parallel_replicate",
                "tensor_parallel",
                "pipeline_parallel",
                "context_parallel",
            )
        ]
        copies, tp, pp, cp = (k.count(name) for name in names)
        shard_name = self.named("data_parallel_shard_degree")
        shards, others = k.value(shard_name), copies * tp * pp * cp
        if pp > 1:
            k.refuse("a pipeline whose stages shard their weights", names[2])
        k.problems += self.files.machine_problems(others * shards if shards > 0 else None)
        if shards == 0 or shards < -1:
            k.problems.append(f"{shard_name}: {shards} is neither -1 nor a number of ranks")
            return None
        if gpus is None and shards < 0:
            return None
        ranks = gpus if gpus is not None else others * shards
        if ranks % others or (shards > 0 and others * shards != ranks):
            k.problems.append(
                f"{ranks} GPUs are not the degrees' product: replicate {copies} x shard {shards} x "
                f"context {cp} x tensor {tp} x pipeline {pp}"
            )
            return None
        shards = ranks // others
        if shards * cp == 1:
            what = "weights in float32, which autocast makes bfloat16 where they are used"
            k.problems.append(f"{shard_name} is 1: {what}: not modelled")
        elif copies > 1:
            k.refuse("weights that are sharded over a part of the replicas", names[0])
        self._strategy(tp, cp, names[1], names[3])
        note = "" if k.value(shard_name) > 0 else f"{ranks} GPUs / {others}"
        k.set("sizes.dp", shards, shard_name, note=note)
        if cp > 1:
            k.set("sizes.sp", cp, names[3])
        if tp > 1:
            k.set("sizes.tp", tp, names[1])
        k.set("mesh", [axis for axis in _MESH if axis != "pp"], note="the order of torchtitan's meshes")
        self._backend()
        return shards * copies

    def _strategy(self, tp: int, cp: int, tp_name: str, cp_name: str) -> None:
        k = self.keys
        loss, rotation = self.named("disable_loss_parallel"), self.named("context_parallel_rotate_method")
        balancer = "parallelism.context_parallel_load_balancer"
        around, options = [], {}
        if tp > 1:
            around.append("megatron_sp")
            options["vocabulary"] = "split", [tp_name]
            options["loss"] = "gathered" if k.value(loss) else "parallel", [loss]
        k.ignore(
            "of tensor parallelism, which the job has not", loss, self.named("enable_async_tensor_parallel")
        )
        if cp > 1:
            strategy, own = ROTATIONS[k.value(rotation)]
            around.append(strategy)
            options |= {name: (value, [rotation]) for name, value in own.items()}
            balanced = k.value(balancer) if balancer in k.known else "headtail"
            if balanced == "ptrr":
                k.refuse("sequences balanced by blocks of a mask", balancer)
            options["placement"] = "zigzag" if balanced else "contiguous", [balancer]
            if self.version != "c":
                k.approximate(
                    "a sequence's keys and values are sent once; torchtitan repeats them first for the "
                    "queries that share them"
                )
        k.ignore("of context parallelism, which the job has not", rotation, balancer)
        at = ([tp_name] if tp > 1 else []) + ([cp_name, rotation] if cp > 1 else [])
        note = "" if at else "no rank has a part of a layer or a sequence"
        k.set("strategy", "+".join(around) or "single", *at, note=note)
        for option, (value, from_keys) in options.items():
            k.set(f"strategy_options.{option}", value, *from_keys)

    def _backend(self) -> None:
        k = self.keys
        policy = "parallelism.fsdp_reshard_after_forward"
        given = k.value(policy) if policy in k.known else "default"
        names = [policy] if policy in k.known else []
        k.set("training.backend", "zero2" if given == "never" else "zero3", *names, note="FSDP2")
        if self.version == "c":
            k.set("training.wrap", "embedding", note="units: embedding, each layer, norm and output")
        if given != "always":
            k.set("training.reshard_rest", False, *names)
        k.set("training.reduce_dtype", "fp32", "training.mixed_precision_reduce")
        if self.version != "c" and given == "default":
            k.approximate("the last layer's weights are freed after forward and gathered again, not kept")

    def _batch(self, replicas: int) -> None:
        k = self.keys
        name = self.named("batch_size") if self.version == "a" else "training.local_batch_size"
        local, whole_name = k.count(name), "training.global_batch_size"
        whole = k.value(whole_name) if whole_name in k.known else -1
        at_once = local * replicas
        if whole < 0:
            k.set("batch", at_once, name, note=f"{local} x {replicas} replicas")
        elif whole == 0 or whole % at_once:
            k.problems.append(f"{whole_name} {whole} is no multiple of {name} {local} x {replicas} replicas")
            return
        else:
            k.set("batch", whole, whole_name)
            k.took(f"batch: {whole}", name)
            if whole > at_once:
                k.set("training.micro_batches", whole // at_once, whole_name, name)
        length = k.count("training.seq_len")
        k.set("seq_len", length, "training.seq_len")
        half = k.value("training.mixed_precision_param") == "bfloat16"
        k.set("precision", "bf16" if half else "fp32", "training.mixed_precision_param")

    def _recomputation(self) -> None:
        k = self.keys
        name, option = "activation_checkpoint.mode", "activation_checkpoint.selective_ac_option"
        stops = "activation_checkpoint.early_stop"
        mode, every = k.value(name), k.value(option)
        if mode == "none" or (mode == "selective" and every not in ("op", "0", "1")):
            k.approximate("keys and values are kept once, not repeated for the queries that share them")
        if mode != "selective":
            k.ignore(f"of selective checkpointing; {name} is {mode}", option)
        if mode == "none":
            k.took("recompute: none", name)
            k.ignore("nothing runs again", stops)
            return
        if mode == "memory_budget":
            k.refuse("what a compiler chooses to keep within a budget", name)
            return
        if mode == "full":
            k.set("model_options.recompute", "full", name)
        elif every == "op":
            k.set("model_options.recompute", "operators", name, option)
        elif every.isdecimal() and len(every) < 4:
            k.set("model_options.recompute", "full", name, option)
            if int(every) > 1:
                k.set("model_options.recompute_method", "interval", option)
                k.set("model_options.recompute_layers", int(every), option)
        else:
            k.problems.append(f"{option}: {every!r} is neither 'op' nor a number of layers")
        if stops not in k.known or k.value(stops):
            k.set(
                "model_options.recompute_early_stop",
                True,
                stops,
                note="" if stops in k.known else "torch's default",
            )

    def _optimizer(self) -> None:
        k = self.keys
        name = k.value("optimizer.name")
        if name not in ("Adam", "AdamW"):
            k.refuse("another optimizer than Adam", "optimizer.name")
        k.took("Adam, the optimizer that there is", "optimizer.name")
        if k.value(offloaded := "training.enable_cpu_offload"):
            k.set("training.optimizer", "host", offloaded, note="torch's CPUOffloadPolicy")
            k.set("training.parameters", "host", offloaded)
        way = "optimizer.fused" if self.version == "a" else "optimizer.implementation"
        if k.value(way) in (True, "fused"):
            k.took("a fused Adam, the one that there is", way)
        else:
            k.approximate("Adam's step is fused, and makes no tensors of its own", way)
        launcher = "run_llama_train.sh" if self.version == "a" else "run_train.sh"
        k.approximate(
            f"torch's allocator is as by default; {launcher} (not multinode_trainer.slurm) has "
            f"{ALLOCATOR[0]} {EXPANDABLE_SEGMENTS}, which is training.cuda_alloc_conf"
        )
        k.set("training.moments", "later", note="a first step, before Adam has made its moments,")
        k.set("training.steps", 2, note="and one after it")

    def _compile(self) -> None:
        k = self.keys
        if self.version == "c":
            switch, parts = "compile.enable", k.value("compile.components")
            compiled = k.value(switch) and ("model" in parts or "loss" in parts)
            k.ignore("nothing is compiled", "compile.components")
        else:
            switch = "training.compile"
            compiled = k.value(switch)
        overlapped = self.named("enable_async_tensor_parallel")
        if compiled:
            k.approximate(
                "what is compiled is counted operator by operator: Inductor keeps and makes fewer tensors",
                *(name for name in (switch, "compile.components") if name in k.given),
            )
        if k.value(overlapped) and compiled:
            k.approximate("messages of tensor parallelism are waited for, not hidden in products", overlapped)
        else:
            k.ignore("without a compiled model it does nothing", overlapped)
        if self.version == "a":
            if k.value("float8.enable_float8_linear"):
                k.refuse("products in eight bits", "float8.enable_float8_linear")
        elif k.value("model.converters"):
            k.refuse("what converters make of layers (products in eight bits)", "model.converters")
