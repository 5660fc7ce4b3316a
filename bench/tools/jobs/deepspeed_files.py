"""The files of a DeepSpeed job: which is its configuration, and which are those beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spbench.bench.errors import shown
from spbench.bench.files import parse_json
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.yaml_files import parse_yaml

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
_WORDS = {
    "model": "config.json of a model",
    "accelerate": "configuration of accelerate",
    "deepspeed": "configuration of DeepSpeed",
    "trainer": "file of the Trainer's arguments",
}


@dataclass
class DeepSpeedFiles:
    """What each file holds; a Trainer's arguments may have DeepSpeed's configuration in them.

    Attributes:
        model: the path of the config.json.
        model_type: in it.
    """

    model: str | None = None
    model_type: str = ""
    given: dict[str, Mapping[str, Any]] = field(default_factory=dict)


def sorted_files(files: JobFiles) -> DeepSpeedFiles | None:
    """The files by what they are; None where none is a configuration of DeepSpeed or accelerate.

    Raises:
        UserError: a file is damaged, two are of one kind, or one is of none beside others that are.
    """
    contents = [(file, content_of(file)) for file in files.files]
    kinds = [_kind(content) for _, content in contents]
    if not {"accelerate", "deepspeed"} & {*kinds}:
        return None
    found = DeepSpeedFiles()
    for (file, content), kind in zip(contents, kinds, strict=True):
        if content is None or not kind:
            known = ", ".join(_WORDS.values())
            raise file.wrong(f"not one of the files of a DeepSpeed job ({known})")
        if kind in found.given:
            raise file.wrong(f"a second {_WORDS[kind]}; one is read")
        found.given[kind] = content
        if kind == "model":
            found.model, found.model_type = str(file.path), str(content["model_type"])
    return found


def _kind(content: Mapping[str, Any] | None) -> str:
    return next((kind for kind, signs in _SIGNS.items() if signs & {*(content or {})}), "")


def content_of(file: JobFile) -> Mapping[str, Any] | None:
    """The mapping that a file holds; None for another kind of file."""
    if file.path.suffix == ".json":
        return _json(file)
    if file.path.suffix in (".yaml", ".yml"):
        return parse_yaml(file.path, file.content)
    return None


def _json(file: JobFile) -> Mapping[str, Any] | None:
    content = parse_json(file.path, file.content, object_pairs_hook=_once)
    return content if isinstance(content, dict) else None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content: dict[str, Any] = {}
    for key, value in pairs:
        if key in content:
            raise ValueError(f"{shown(key)} is given twice; leave one")
        content[key] = value
    return content
