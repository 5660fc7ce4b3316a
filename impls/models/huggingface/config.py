"""A Hugging Face config.json as one of our models: which fields count, which are ignored, which are refused.

A family is a class derived from :class:`Config` in a module of this package. Every field of a file is one of

- a field of the class, from which the model's options follow;
- one of ``fixed``, whose other values would change the architecture in a way that the model does not have;
- one of :data:`IGNORED` or of the class's ``ignored``, which change neither shapes nor costs;
- null, which is as if it were left out, but for fields of the class that null is a value of.

Anything else is refused by name, since a field that is silently passed over may be the one that matters.
"""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from spbench.impls.discovery import named_classes
from spbench.impls.models.model import Model
from spbench.impls.options import LARGEST, LARGEST_OF

#: fields that say how many experts a layer has, how many a token meets, and the features of each
_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_MET = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "moe_k")
_FEATURES = ("moe_intermediate_size", "intermediate_size")
#: the preset that is the model with one MLP of what a token meets, by model_type
_PRESETS = {
    "qwen3_next": "qwen3-next-dense",
    "minimax": "minimax-01-dense",
    "minimax_text_01": "minimax-01-dense",
}
#: the family here that is another without its experts
_DENSE = {"qwen3_moe": "qwen3", "qwen2_moe": "qwen2", "mixtral": "mistral"}


def why_not(content: Mapping[str, Any]) -> str:
    """The parts of a model that no model here has, and the dense one to take in its place; "" where its
    fields name no such part."""
    inner = content.get("text_config")
    fields = {**content, **inner} if isinstance(inner, Mapping) else content
    if not (parts := [*_parts(fields)]):
        return ""
    return f"its layers have {' and '.join(parts)}, which no model here has{_stand_in(fields)}"


def _parts(fields: Mapping[str, Any]) -> Iterator[str]:
    if name := _counted(fields, _EXPERTS):
        yield f"a mixture of experts (MoE: {name} = {fields[name]})"
    if _counted(fields, ("kv_lora_rank",)):
        yield f"multi-head latent attention (MLA: kv_lora_rank = {fields['kv_lora_rank']})"


def _stand_in(fields: Mapping[str, Any]) -> str:
    family = fields.get("model_type")
    if family in _PRESETS:
        return f"; the preset {_PRESETS[family]} is it with one MLP of what a token meets"
    met, features = _counted(fields, _MET), _counted(fields, _FEATURES)
    if family not in _DENSE or met is None or features is None:
        return ""
    shared = fields.get("shared_expert_intermediate_size") or 0
    size = fields[met] * fields[features] + (shared if type(shared) is int else 0)
    return (
        f'; for the work of a token, not the memory of its weights, take model_type "{_DENSE[family]}" with '
        f"intermediate_size {size}, what the {fields[met]} experts that it meets have"
    )


def _counted(fields: Mapping[str, Any], names: tuple[str, ...]) -> str | None:
    """The first of these fields that has a whole number of more than one."""
    return next((name for name in names if type(fields.get(name)) is int and fields[name] > 1), None)


#: fields of any family that change neither shapes nor costs of a training step: what the file is and who
#: wrote it, types of stored weights, ids of tokens, initial values, the length that it was trained for, and
#: what only generation, classification or transformers' own interface reads
IGNORED = frozenset(
    {
        "_attn_implementation",
        "_name_or_path",
        "architectures",
        "auto_map",
        "bos_token_id",
        "chunk_size_feed_forward",
        "classifier_dropout",
        "custom_pipelines",
        "decoder_start_token_id",
        "dtype",
        "eos_token_id",
        "finetuning_task",
        "gradient_checkpointing",
        "id2label",
        "initializer_range",
        "label2id",
        "max_position_embeddings",
        "num_labels",
        "output_attentions",
        "output_hidden_states",
        "pad_token_id",
        "pretraining_tp",
        "problem_type",
        "return_dict",
        "sep_token_id",
        "task_specific_params",
        "torch_dtype",
        "transformers_version",
        "use_cache",
        "vocab_file",
    }
)


class Config(BaseModel):
    """The fields of a family's config.json that count.

    Attributes:
        name: the family's ``model_type``.
        fixed: fields that must have one of these values where they are given.
        ignored: fields beside :data:`IGNORED` that change neither shapes nor costs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: ClassVar[str] = ""
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    @abstractmethod
    def model(self) -> Model:
        """The model, its kernels as a preset of its class has them.

        Raises:
            ValueError: the sizes do not fit each other.
        """

    @model_validator(mode="before")
    @classmethod
    def _what_counts(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        counting = {}
        for field, value in content.items():
            if field in cls.model_fields:
                if value is not None or cls.model_fields[field].default is not None:
                    counting[field] = value
            elif value is None:
                continue
            elif field in cls.fixed:
                if value not in cls.fixed[field]:
                    known = " or ".join(map(_shown, cls.fixed[field]))
                    raise not_covered(field, value, f"{cls.name} models here have {known} alone")
            elif field not in IGNORED | cls.ignored:
                why = f"no {cls.name} model here has it; leave it out if it changes neither shapes nor costs"
                raise not_covered(field, value, why)
        return counting


def not_covered(field: str, value: Any, why: str) -> ValueError:
    """The refusal of a field's value."""
    return ValueError(f"field {field} = {_shown(value)} is not covered: {why}")


def _shown(value: Any) -> str:
    """As JSON has it, at most 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def families() -> Mapping[str, type[Config]]:
    """The class of each family, by ``model_type``."""
    families = named_classes(__package__, Config)
    return {name: cls for name, cls in families.items() if name}


def counting_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """What counts of a config.json: ``model_type`` and the fields that its model follows from.

    Raises:
        ValueError: an unknown family, a field that is missing or not covered, or sizes that cannot be.
    """
    config = _config(content)
    config.model()
    return {"model_type": config.name, **config.model_dump(exclude_unset=True)}


def model_from_config(content: Mapping[str, Any]) -> Model:
    """The model of a config.json, with the errors of :func:`counting_fields`."""
    return _config(content).model()


def _config(content: Mapping[str, Any]) -> Config:
    family, known = content.get("model_type"), families()
    if not isinstance(family, str) or family not in known:
        why = why_not(content) or f"the families here are {', '.join(sorted(known))}"
        raise not_covered("model_type", family, why)
    try:
        config = known[family].model_validate({k: v for k, v in content.items() if k != "model_type"})
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        field = ".".join(map(str, problem["loc"]))
        if problem["type"] == "value_error":
            raise ValueError(str(problem["ctx"]["error"])) from error
        if problem["type"] == "missing":
            raise ValueError(f"field {field} is missing") from error
        wrong = problem["msg"].replace("Input should", "it must")
        raise ValueError(f"field {field} = {_shown(problem['input'])}: {wrong}") from error
    for field, value in config:
        most = LARGEST_OF["layers"] if "layer" in field else LARGEST
        if type(value) is int and value > most:
            raise ValueError(f"field {field} = {value}: it must be at most {most}")
    return config
