"""A Hugging Face config.json as a model: which fields count, which are ignored, which are refused.

A family is a class derived from :class:`Config` in a module of this package. Every field of a file is one of

- a field of the class, from which the model's options follow;
- one of ``fixed``, whose other values would mean an architecture that no model here has;
- one of :data:`IGNORED` or of the class's ``ignored``, which change neither shapes nor costs;
- null, which counts as a missing field, unless null is a value of the class's field.

Any other field is refused by name, because a field that is silently ignored may be the one that matters.

For models of text and images only ``text_config`` counts: the tower for images is left out.
"""

import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError, model_validator

from spbench.impls.discovery import named_classes
from spbench.impls.models.model import Model
from spbench.impls.options import LARGEST, LARGEST_OF

#: the preset that is most like a model whose file no family here reads, by ``model_type``
_PRESETS = {"minimax": "minimax-01-dense", "minimax_text_01": "minimax-01-dense"}

#: fields of any family that change neither shapes nor costs of a training step: the file's kind and origin,
#: dtypes of stored weights, ids of tokens, initial values, the length of training sequences, and fields that
#: only generation, classification or transformers' own interface reads
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


#: the decoder's option for each field of a file, by the field names that most families use
_OPTION_OF = {
    "num_hidden_layers": "layers",
    "hidden_size": "hidden",
    "num_attention_heads": "heads",
    "num_key_value_heads": "kv_heads",
    "head_dim": "head_dim",
    "intermediate_size": "inner",
    "vocab_size": "vocabulary",
    "tie_word_embeddings": "tied",
    **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), "norm_epsilon"),
    "rope_theta": "rotary_base",
    "partial_rotary_factor": "rotary_share",
}


class Config(BaseModel):
    """The fields of a family's config.json from which the model's options follow.

    Attributes:
        name: the family's ``model_type``.
        fixed: the values that a field may have if the file has the field, by the field's name.
        ignored: further fields than :data:`IGNORED` that change neither shapes nor costs.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)

    name: ClassVar[str] = ""
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {}
    ignored: ClassVar[frozenset[str]] = frozenset()

    def said(self) -> dict[str, Any]:
        """The options of a decoder that fields say by their usual names."""
        fields = type(self).model_fields
        return {option: getattr(self, field) for field, option in _OPTION_OF.items() if field in fields}

    @abstractmethod
    def model(self) -> Model:
        """The model of this file, with the default kernels of its class.

        Raises:
            ValueError: the sizes contradict each other.
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
                    choices = " or ".join(map(_shown, cls.fixed[field]))
                    raise not_covered(field, value, f"{cls.name} models here have {choices} alone")
            elif field not in IGNORED | cls.ignored:
                why = f"no {cls.name} model here has it; leave it out if it changes neither shapes nor costs"
                raise not_covered(field, value, why)
        return counting


def not_covered(field: str, value: Any, why: str) -> ValueError:
    """The error, to be raised, that refuses a field's value."""
    return ValueError(f"field {field} = {_shown(value)} is not covered: {why}")


def _shown(value: Any) -> str:
    """The value as JSON, cut to 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def families() -> Mapping[str, type[Config]]:
    """The classes of all families, by ``model_type``."""
    families = named_classes(__package__, Config)
    return {name: cls for name, cls in families.items() if name}


def counting_fields(content: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config.json that count: ``model_type`` and those from which the model's options follow.

    Raises:
        ValueError: an unknown family, a missing or refused field, or sizes that contradict each other.
    """
    config = _config(content)
    config.model()
    return {"model_type": config.name, **config.model_dump(exclude_unset=True)}


def model_from_config(content: Mapping[str, Any]) -> Model:
    """The model of a config.json; raises the errors of :func:`counting_fields`."""
    return _config(content).model()


def _config(content: Mapping[str, Any]) -> Config:
    family, known = content.get("model_type"), families()
    if not isinstance(family, str) or family not in known:
        why = f"the families here are {', '.join(sorted(known))}"
        if isinstance(family, str) and family in _PRESETS:
            why = f"the preset {_PRESETS[family]} is it with one MLP of what a token meets; {why}"
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
    _check_sizes(config)
    return config


def _check_sizes(config: Config) -> None:
    for field, value in config:
        most = LARGEST_OF["layers"] if "layer" in field else LARGEST
        if isinstance(value, Config):
            _check_sizes(value)
        elif type(value) is int and value > most:
            raise ValueError(f"field {field} = {value}: it must be at most {most}")


class SizedConfig(Config):
    """The sizes that most families have, without defaults."""

    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt


class WithImagesConfig(Config):
    """The files of models of text and images. The type of a derived class's field ``text_config`` is the
    family of the text model."""

    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            *("boi_token_index", "eoi_token_index", "image_token_index", "image_token_id", "video_token_id"),
            *("vision_config", "vision_start_token_id", "vision_end_token_id", "language_model_only"),
            *("mm_tokens_per_image", "tie_word_embeddings"),
        }
    )

    @model_validator(mode="before")
    @classmethod
    def _text_alone(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        text, family = content.get("text_config"), cls.model_fields["text_config"].annotation
        if not isinstance(text, Mapping):
            return dict(content)
        assert isinstance(family, type)
        assert issubclass(family, Config)
        if (kind := text.get("model_type", family.name)) != family.name:
            raise not_covered("text_config.model_type", kind, f"it must be {family.name}")
        own = {k: v for k, v in text.items() if k != "model_type"}
        if "tie_word_embeddings" in content and "tie_word_embeddings" in family.model_fields:
            own = {"tie_word_embeddings": content["tie_word_embeddings"]} | own
        return {**content, "text_config": own}

    def model(self) -> Model:
        text: Config = self.text_config  # type: ignore[attr-defined]
        return text.model()
