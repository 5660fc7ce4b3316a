"""The files of programs around transformers: the program's own configuration, a model's config.json, and a
DeepSpeed configuration, in a file of its own, within the program's, or as one that the program brings along.
Of a job of DeepSpeed or accelerate: which file is what, and what a script says in plain values.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from spbench.bench.tools.jobs.argument_tables import OF_DEEPSPEED, ArgumentTable, flat
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles, mapping_in
from spbench.bench.tools.jobs.python_calls import training_script


def model_files(files: JobFiles) -> list[JobFile]:
    """The files that are a model's config.json. A YAML of a program may have a ``model_type`` of its own."""
    return [
        file
        for file in files.files
        if file.path.suffix == ".json" and "model_type" in (mapping_in(file) or {})
    ]


def values_of(files: JobFiles, content: Mapping[str, Any], table: ArgumentTable) -> Iterator[tuple[str, Any]]:
    """The values of the program's configuration, and of DeepSpeed's."""
    yield from flat(content, table.arguments)
    for file in files.files:
        beside = mapping_in(file) or {}
        if "zero_optimization" in beside and beside is not content:
            yield from flat(beside, table.arguments, OF_DEEPSPEED)


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
