"""Jobs of torchtitan, of Llama 3 and Qwen3: its TOML, and its configurations in Python where they are plain
values."""

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from spbench.bench.tools.jobs import torchtitan_models
from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import ArgumentTable, argument_table, flat, table_content
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles, mapping_in
from spbench.bench.tools.jobs.rules import call

#: strategies and their options, by context_parallel_rotate_method
ROTATIONS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "allgather": ("all_gather_kv", {"gradients": "ring"}),
    "alltoall": ("ring_attention", {}),
}
#: converters that make linear layers multiply in eight bits
_LINEAR = ("quantize.linear.float8", "float8")
#: keys of the batch, the length and all of a step, in sequences and in tokens
_BATCH = (
    ("local_batch_size", "seq_len", "global_batch_size"),
    ("num_tokens_per_microbatch_per_dp_rank", "max_context_length", "num_tokens_per_train_step"),
)
#: sections of which a TOML file of torchtitan has some
_SECTIONS = {"model", "training", "parallelism", "activation_checkpoint", "experimental"}


@cache
def versions() -> Mapping[str, ArgumentTable]:
    """The table of keys by version: first the versions in TOML, the newest first, then those in Python."""
    every = table_content("torchtitan")["versions"]
    return {version: argument_table("torchtitan", version) for version in every}


def read(files: JobFiles) -> Job | None:
    """A job of torchtitan; None if there are several files, or the file is no configuration of torchtitan.
    UserError if the file is damaged, or has values that are not plain."""
    content = _content_of(files.files[0]) if len(files.files) == 1 else None
    return None if content is None else TorchtitanJob(content, files).job()


def _content_of(file: JobFile) -> Mapping[str, Any] | None:
    """The sections of a file; None if the file is neither a TOML with torchtitan's sections nor Python that
    makes a configuration. UserError if the file is damaged, or has values that are not plain."""
    if file.path.suffix == ".py":
        return torchtitan_models.registered(file)
    content = mapping_in(file) if file.path.suffix == ".toml" else None
    if content is None:
        return None
    sections = {name for name, section in content.items() if isinstance(section, dict)}
    return content if len(_SECTIONS & sections) >= 2 else None


def job_around(
    kind: str,
    own: ArgumentTable,
    sections: Mapping[str, Any],
    files: JobFiles,
    account: Account | None = None,
) -> Job:
    """The job of a program of kind ``kind`` around torchtitan, with the program's ``own`` keys and
    torchtitan's (``sections``); ``account``: that of its own keys, if these are not in ``sections``."""
    job = TorchtitanJob(sections, files, launched=False)
    keys = job.keys
    keys.table = replace(keys.table, program=own.program, arguments={**keys.table.arguments, **own.arguments})
    given = ((n, each.wrong(keys.given[n].value)) for n, each in own.arguments.items() if n in keys.given)
    keys.problems += [f"{n}: {wrong}" for n, wrong in given if wrong]
    made = job.job()
    if account is None:
        return replace(made, kind=kind)
    of_table = [each for each in account.arguments() if each.name in account.program_arguments]
    return replace(
        made,
        kind=kind,
        arguments=[*of_table, *made.arguments],
        problems=[*account.problems, *made.problems],
        remarks=[*account.remarks, *made.remarks],
    )


class TorchtitanJob(torchtitan_models.TorchtitanModel):
    """The translation of one job of torchtitan.

    Args:
        content: the sections of the job's file.
        launched: whether torchtitan's own script starts the job.
    """

    def __init__(self, content: Mapping[str, Any], files: JobFiles, *, launched: bool = True):
        self.files, self.launched = files, launched
        unknown = {
            version: sum(name not in table.arguments for name, _ in flat(content, table.arguments))
            for version, table in versions().items()
        }
        self.version = min(unknown, key=lambda version: unknown[version])  # the first, so the newest
        table = versions()[self.version]
        self.keys: Account = key_account(table, flat(content, table.arguments), overrides=files.environment)
        self.keys.facts |= {"version": self.version, "recent": self.recent}

    def job(self) -> Job:
        """The job, with all settings and with an outcome for each key of its file."""
        account = self.keys
        self.set_model()
        if self._parallelism():
            self._batch()
        self._kernels()
        return account.job("torchtitan", self.files, account.arguments())

    def _parallelism(self) -> bool:
        """Set strategy, sizes and backend; returns whether the number of replicas is known."""
        account, gpus = self.keys, self.files.gpus
        kinds = ("data_parallel_replicate", "tensor_parallel", "pipeline_parallel", "context_parallel")
        keys = [self.named(f"{kind}_degree") for kind in kinds]
        copies, tp, pp, cp = map(account.count, keys)
        shard_key = self.named("data_parallel_shard_degree")
        asked, others = account.value(shard_key), copies * tp * pp * cp
        self.stages = account.facts["stages"] = pp
        torchtitan_models.set_pipeline(self, pp, keys[2])
        account.problems += self.files.machine_problems(others * asked if asked > 0 else None)
        ranks = others * asked if gpus is None and asked > 0 else gpus
        shards = 0 if ranks is None or ranks % others else ranks // others
        fits = shards > 0 and asked in (-1, shards)
        self.replicas = shards * copies
        of_ranks = {"copies": copies, "tensor": tp, "context": cp, "asked": asked, "ranks": ranks}
        account.facts |= of_ranks | {
            "shard_key": shard_key,
            "tensor_key": keys[1],
            "copied": keys[:1] * (copies > 1),
            "fits": fits,
            "replicas": self.replicas,
            "unsharded": shards * cp == 1,
            "replicas_note": "" if asked > 0 else f"{ranks} GPUs / {others // copies}",
            **self._facts_of_strategy(keys[1:2] * (tp > 1), keys[3:] * (cp > 1)),
        }
        call(account, "parallelism")
        return fits

    def _facts_of_strategy(self, tensor: list[str], context: list[str]) -> dict[str, Any]:
        """The facts on the strategy, by name; ``tensor`` and ``context``: the keys that ask for tensor and
        for context parallelism, empty if the job has none."""
        account, rotation = self.keys, self.named("context_parallel_rotate_method")
        split = self.value("parallelism.enable_sequence_parallel", True)
        tensor_by = "megatron_sp" if split else "tensor_parallel"
        context_by, _ = ROTATIONS[account.value(rotation)]
        keys = [*tensor, *context, *[rotation] * bool(context)]
        strategy = "+".join([tensor_by] * bool(tensor) + [context_by] * bool(context)) or "single"
        return {"tensor_by": tensor_by, "strategy": strategy, "strategy_keys": keys}

    def _batch(self) -> None:
        """Set the batch and the length; version d counts tokens of a micro-batch, others sequences."""
        account, of_tokens = self.keys, self.version == "d"
        local_name, length_name, total_name = (f"training.{each}" for each in _BATCH[of_tokens])
        local_name = "training.batch_size" if self.version == "a" else local_name
        local, length = account.count(local_name), account.count(length_name)
        total = self.value(total_name, -1)
        if of_tokens and local % length:
            account.problems.append(f"{local_name} {local} is no multiple of {length_name} {length}")
            return
        parts, parts_name = torchtitan_models.micro_batches(self, local) if self.stages > 1 else (1, "")
        replicas = f"{local} x {self.replicas} replicas"
        at_once = local * self.replicas * (parts if of_tokens else 1)
        if total == 0 or (total > 0 and total % at_once):
            account.problems.append(f"{total_name} {total} is no multiple of {local_name} {replicas}")
            return
        if of_tokens:
            note = f"sequences of {length} tokens, {self.replicas} replicas"
            batch = (at_once if total < 0 else total) // length
            account.set("batch", batch, local_name, total_name, length_name, note=note)
        elif total < 0:
            account.set("batch", at_once, local_name, note=replicas)
        else:
            account.set("batch", total, total_name)
            account.took(f"batch: {total}", local_name)
        self._micro_batches(max(1, total // at_once), parts, total_name, local_name, parts_name)
        account.set("seq_len", length, length_name)
        self._chunks_and_graphs(local if of_tokens else local * length)
        account.map("training.mixed_precision_param")

    def _chunks_and_graphs(self, tokens: int) -> None:
        """Set the chunks in which registries cut the loss of ``tokens``, and tell of their CUDA graphs."""
        account, graphs = self.keys, "training.disable_cuda_graphs"
        if graphs not in account.program_arguments:
            return
        if chunks := self.value(name := "loss.num_chunks", 0):
            parts = account.count(self.named("context_parallel_degree"))
            tile = -(-tokens // (chunks * parts))
            account.set("model_options.loss_tile", tile, name, note="tokens of a chunk")
        if not account.value(graphs):
            why = "CUDA graphs keep their tensors apart, and kernels start without the host"
            account.leave("both", why, graphs)
            account.remarks.append("forward and backward are no CUDA graph, whose memory is kept apart")
        account.ignore("no CUDA graph is modelled", graphs)

    def _micro_batches(self, runs: int, parts: int, total_key: str, local_key: str, parts_key: str) -> None:
        """Set a step's number of micro-batches: ``runs``, whose gradients are added up, times the ``parts``
        into which a pipeline cuts each run."""
        self.keys.facts |= {"runs": runs, "pieces": parts}
        self.keys.facts |= {"total_key": total_key, "local_key": local_key, "parts_key": parts_key}
        call(self.keys, "micro_batches")

    def _kernels(self) -> None:
        """Set recomputation, the optimizer, and which parts of the model are compiled or in eight bits."""
        account, converters = self.keys, self.value("model.converters", [])
        account.facts["launched"] = self.launched
        account.facts["other_converters"] = [each for each in converters if each not in _LINEAR]
        call(account, "recomputation")
        call(account, "optimizer")
        account.first_steps()
        call(account, "compiler")
        call(account, "eight_bits")
