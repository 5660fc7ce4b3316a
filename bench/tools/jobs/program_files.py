"""The files of programs around transformers: the program's own configuration, a model's config.json, and a
DeepSpeed configuration, in a file of its own, within the program's, or as one that the program brings along.
Of a job of DeepSpeed or accelerate: which file is what, and what a script says in plain values.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import ArgumentTable, argument_table, flat
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles, mapping_in
from spbench.bench.tools.jobs.python_calls import training_script
from spbench.bench.tools.jobs.transformers_step import Adapted, Said

#: what the keys of a DeepSpeed configuration begin with
OF_DEEPSPEED = "deepspeed."
#: configurations of DeepSpeed that programs bring along, by their file's name: stage, and what the host holds
_BROUGHT = {
    **{f"zero{n}": (n, "") for n in (1, 2, 3)},
    **{f"zero{n}_torch_compile": (n, "") for n in (1, 2)},
    "zero3_bf16": (3, ""),
    "zero3_bf16_cpuoffload_all": (3, "all"),
    "zero3_bf16_cpuoffload_params": (3, "params"),
    "zero2_offload": (2, "optimizer"),
    "zero3_offload": (3, "all"),
    "ds_z2_config": (2, ""),
    "ds_z3_config": (3, ""),
    "ds_z2_offload_config": (2, "optimizer"),
    "ds_z3_offload_config": (3, "all"),
}


def configuration(files: JobFiles, *signs: Collection[str]) -> Mapping[str, Any] | None:
    """The content of the file that has all keys of one of the signs; None where no file has, or another file
    is neither a config.json nor a configuration of DeepSpeed.

    Raises:
        UserError: a file is damaged.
    """
    found: Mapping[str, Any] | None = None
    for file in files.files:
        content = mapping_in(file) or {}
        if found is None and any({*sign} <= {*content} for sign in signs):
            found = content
        elif "model_type" not in content and "zero_optimization" not in content:
            return None
    return found


def model_files(files: JobFiles) -> list[JobFile]:
    """The files that are a model's config.json. A YAML of a program may have a ``model_type`` of its own."""
    return [
        file
        for file in files.files
        if file.path.suffix == ".json" and "model_type" in (mapping_in(file) or {})
    ]


def script_of(files: JobFiles) -> JobFile | None:
    """The only script among the files, beside configurations; None where there is none or several."""
    scripts = [f for f in files.files if f.path.suffix != ".py" and mapping_in(f) is None]
    return scripts[0] if len(scripts) == 1 else None


def with_deepspeed(table: ArgumentTable) -> ArgumentTable:
    """The table with the keys of DeepSpeed beside the program's."""
    of_deepspeed = {
        f"{OF_DEEPSPEED}{name}": replace(each, spellings=(f"{OF_DEEPSPEED}{name}",))
        for name, each in argument_table("deepspeed").arguments.items()
        if not name.startswith(("TrainingArguments.", "accelerate."))
    }
    return replace(table, arguments={**of_deepspeed, **table.arguments})


def with_trainer(table: ArgumentTable) -> ArgumentTable:
    """The table with the arguments of Hugging Face's Trainer beside the program's."""
    prefix = "TrainingArguments."
    of_trainer = {
        (name := long.removeprefix(prefix)): replace(each, spellings=(name,))
        for long, each in argument_table("deepspeed").arguments.items()
        if long.startswith(prefix) and each.outcome != "mapped"
    }
    return replace(table, arguments={**of_trainer, **table.arguments})


def values_of(files: JobFiles, content: Mapping[str, Any], table: ArgumentTable) -> Iterator[tuple[str, Any]]:
    """The values of the program's configuration, and of DeepSpeed's."""
    yield from flat(content, table.arguments)
    for file in files.files:
        beside = mapping_in(file) or {}
        if "zero_optimization" in beside and beside is not content:
            yield from flat(beside, table.arguments, OF_DEEPSPEED)


def deepspeed_of(k: Account, key: str, otherwise: str = "fsdp") -> dict[str, Any]:
    """The fields ``sharding``, ``host`` and ``buffer`` of a step from DeepSpeed's configuration.

    Args:
        key: that names a file of DeepSpeed.
        otherwise: the sharding where the job has no DeepSpeed.
    """
    own = [name for name in k.given if name.startswith(OF_DEEPSPEED)]
    if not own:
        return _brought(k, key, otherwise)
    k.took("its file is given", key)
    fields = zero_of(k, OF_DEEPSPEED)
    mapped = [name for name in own if getattr(k.program_arguments.get(name), "outcome", "") == "mapped"]
    k.ignore("as the program around DeepSpeed says", *mapped)
    return fields


def zero_of(k: Account, prefix: str, beside: str = "") -> dict[str, Any]:
    """The fields ``sharding``, ``host`` and ``buffer`` of a step from DeepSpeed's configuration.

    Args:
        prefix: that its keys begin with in the program's table.
        beside: what keys of accelerate begin with that count before them; "": there are none.
    """
    zero = f"{prefix}zero_optimization."
    stage, name = k.chosen(*[f"{beside}zero_stage"] * bool(beside), f"{zero}stage")
    buckets = [f"{zero}{each}_bucket_size" for each in ("reduce", "allgather")]
    overlap = f"{zero}overlap_comm"
    if stage not in (1, 2, 3):
        k.refuse("DeepSpeed's own data parallelism, without ZeRO" if stage == 0 else "a stage of ZeRO", name)
        return {"sharding": Said("zero3", (name,))}
    size = k.value(buckets[0])
    if stage < 3 and size != "auto":
        gib = size * 2 * (2 if k.value(overlap) is True else 1) / 2**30
        held = f"DeepSpeed's buckets of reduce_bucket_size, {gib:.2f} GiB more, are not held"
        k.approximate(held, *buckets, overlap)
    if stage == 3 and k.value(overlap) is False:
        because = "messages are hidden behind computation, where theirs are waited for"
        k.stand_in("messages beside which nothing is computed", "time", because, overlap)
    fetched = [f"{zero}stage3_{each}" for each in ("prefetch_bucket_size", "max_live_parameters")]
    k.ignore(f"of another stage of ZeRO than {stage}, or as large as the job makes them", *fetched, *buckets)
    k.ignore("so it is by default" if stage == 3 else "without buckets it does nothing", overlap)
    if stage == 3:
        k.leave("time and memory", "weights of a layer are gathered at once, none ahead", *fetched)
    host, places = _host(k, zero, beside, stage)
    return {
        "sharding": Said(f"zero{stage}", (name,)),
        "host": Said(host, places),
        "buffer": Said(size if stage == 3 else None, buckets[:1]),
    }


def _host(k: Account, zero: str, beside: str, stage: int) -> tuple[str, tuple[str, ...]]:
    """What a stage of ZeRO keeps on the host, and the keys that say so."""
    held, names, key = dict[str, bool](), list[str](), ""
    for kind in ("optimizer", "param"):
        accelerates = [f"{beside}offload_{kind}_device"] * bool(beside)
        place, key = k.chosen(*accelerates, f"{zero}offload_{kind}.device")
        if place not in ("cpu", "none", None):
            k.refuse("keeping weights or optimizer on a disk", key)
        held[kind] = place == "cpu"
        names += k.given_of(key)
    if held["param"] and stage < 3:
        k.refuse("weights on the host below ZeRO-3", key)
    both = held["optimizer"] and held["param"]
    return "all" if both else "optimizer" if held["optimizer"] else "params" * held["param"], tuple(names)


def _brought(k: Account, key: str, otherwise: str) -> dict[str, Said]:
    """The same of a configuration that the program brings along, by the name of its file."""
    name = k.value(key)
    if not name:
        return {"sharding": Said(otherwise)}
    known = _BROUGHT.get(PurePosixPath(name).stem) if isinstance(name, str) else None
    if known is None:
        k.problems.append(f"{k.spelled(key)}: give this configuration of DeepSpeed beside")
        return {"sharding": Said("zero3", (key,))}
    stage, host = known
    return {"sharding": Said(f"zero{stage}", (key,)), "host": Said(host, (key,))}


def adapters_of(k: Account, key: str, *ranks: str) -> dict[str, Any]:
    """The fields of adapters of a step from a section that has them by peft's names.

    Args:
        key: of the section.
        ranks: names of the rank, which is 8 where the section has none.
    """
    section = k.value(key) or {}
    rank = next((section[name] for name in ranks if section.get(name)), 8 if section else 0)
    targets = section.get("target_modules", section.get("lora_modules"))
    said = (targets, section.get("modules_to_save"), section.get("use_dora"))
    of_experts = "shared" if section.get("share_expert_lora") else "each"
    return {
        "lora": Said(rank, k.given_of(key)),
        "adapted": Adapted(*(Said(value, k.given_of(key)) for value in said)),
        "adapted_experts": Said(of_experts if section.get("target_parameters") else "frozen"),
    }


#: of a config.json, beside its fields
MODEL_PATH = "path of the file"
#: which configurations of TRL's trainers a job has, as keys
CLASSES = "classes"
#: arguments that TRL's SFTConfig has and TrainingArguments has not; and scripts of its trainers
_OF_TRL = {"packing", "dataset_text_field", "completion_only_loss", "assistant_only_loss", "padding_free"}
_OF_TRL |= {
    "packing_strategy",
    "chat_template_path",
    "activation_offloading",
    "dataset_num_proc",
    "eval_packing",
}
_SCRIPTS = re.compile(r"(?:.*[_-])?(sft|dpo|grpo|kto|rloo|orpo|cpo|ppo|gkd|reward)(?:[_-].*)?\.py")
#: of what a file is, by keys of which it has some: the Trainer's are the last, as they have most names
_SIGNS: Mapping[str, frozenset[str]] = {
    "model": frozenset({"model_type"}),
    "accelerate": frozenset({"compute_environment", "distributed_type", "deepspeed_config", "fsdp_config"}),
    "deepspeed": frozenset(
        {"zero_optimization", "train_batch_size", "train_micro_batch_size_per_gpu", "steps_per_print"}
    ),
    "trainer": frozenset(
        {"per_device_train_batch_size", "output_dir", "gradient_checkpointing", "learning_rate", "max_length"}
    ),
}
#: keys of programs around the Trainer, which have readers of their own
_OTHERS = {"base_model", "finetuning_type", "dist_config"}
_WORDS = {
    "model": "config.json of a model",
    "accelerate": "configuration of accelerate",
    "deepspeed": "configuration of DeepSpeed",
    "trainer": "file of the Trainer's arguments",
}


def _trains(content: Mapping[str, Any]) -> bool:
    """Whether a file of the Trainer's arguments alone is a job of TRL's: it names a model and data."""
    return {"model_name_or_path", "dataset_name"} <= {*content}


def sorted_files(files: JobFiles, *, of_script: bool = False) -> dict[str, Mapping[str, Any]] | None:
    """The content of each file by what it is, a key of :data:`_SIGNS`; None where none is a configuration of
    DeepSpeed or accelerate, unless they stand beside a script that starts the job (``of_script``).

    Raises:
        UserError: a file is damaged, two are of one kind, or one is of none beside others that are.
    """
    contents = []
    script: Mapping[str, Any] = {}
    for file in files.files:
        if file.path.suffix == ".py" and (of_script or len(files.files) > 1):
            script = training_script(file)
        else:
            contents.append((file, mapping_in(file) or {}))
    kinds = [next((kind for kind, signs in _SIGNS.items() if signs & {*c}), "") for _, c in contents]
    known = (
        of_script
        or {"accelerate", "deepspeed"} & {*kinds}
        or any(_trains(content) for _, content in contents)
    )
    scripts = not of_script and any(file.path.suffix in (".sh", ".bash", ".slurm") for file in files.files)
    if not known or scripts or any(_OTHERS & {*content} for _, content in contents):
        return None
    by_kind: dict[str, Mapping[str, Any]] = {}
    for (file, content), kind in zip(contents, kinds, strict=True):
        if not kind:
            kinds_read = ", ".join(_WORDS.values())
            raise file.wrong(f"not one of the files of a DeepSpeed job ({kinds_read})")
        if kind in by_kind:
            raise file.wrong(f"a second {_WORDS[kind]}; one is read")
        by_kind[kind] = {**content, MODEL_PATH: str(file.path)} if kind == "model" else content
    for kind, said in script.items():
        by_kind[kind] = {**said, **by_kind.get(kind, {})}
    by_kind.setdefault(CLASSES, {})
    trainer = by_kind.get("trainer", {})
    if not script and (_OF_TRL & {*trainer} or _trains(trainer)):
        by_kind[CLASSES] = {"SFTConfig": True}
    return by_kind


def class_of_script(name: str) -> Mapping[str, bool]:
    """The configuration of TRL that a script has by its name: sft.py is TRL's own, or one like it."""
    match = _SCRIPTS.fullmatch(name)
    return {f"{match[1].upper() if len(match[1]) < 6 else 'Reward'}Config": True} if match else {}
