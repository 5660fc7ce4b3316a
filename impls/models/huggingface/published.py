"""Published models by their names on Hugging Face, with the fields of their config.json that count. This
module does not import torch."""

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any, NamedTuple

#: words of a model's name that tell how weights were trained, cut or stored, and that change no size
_OF_WEIGHTS = re.compile(
    r"meta|base|instruct|it|chat|math|thinking|safeguard|merged?|source|hf|sparse|2of4|dequantized|linearized|bnb|"
    r"(?:int|nf|nvfp|mxfp|fp)[48]|(?:bf|fp)16|awq|gptq|aqlm|[2348]bit|[1-8]x[0-9]+|0324|0528|1106|2507"
)


class Published(NamedTuple):
    """A model with published sizes.

    Attributes:
        name: the name as the model's authors write it.
        parameters: the published number of parameters, in all digits or rounded (8.2B), without modules of
            multi-token prediction; None: no published number.
        counted: the source of that number.
        source: the source of the sizes; not always the model's own config.json.
        config: ``model_type`` and the fields from which the model's options follow.
        tower: the parameters of a tower for images, which the model leaves out; 0: there is no tower.
    """

    name: str
    parameters: str | None
    counted: str | None
    source: str
    config: Mapping[str, Any]
    tower: int = 0


@cache
def _by_name() -> Mapping[str, Published]:
    """All published models by the name in lower case. An instruction-tuned model has an entry of its own."""
    table = json.loads((files(__package__) / "published.json").read_text(encoding="utf-8"))
    models: dict[str, Published] = {}
    for name, entry in table.items():
        for each in (name, *entry.get("also", ())):
            models[each.lower()] = Published(each, **{k: v for k, v in entry.items() if k != "also"})
    return models


def published_models() -> list[Published]:
    """All published models; models of the same sizes have an entry each."""
    return [*_by_name().values()]


def published_model(name: str) -> Published | None:
    """The published model of that name, in upper or lower case; None: no entry has the name."""
    return _by_name().get(name.lower())


@cache
def _words_of(name: str) -> tuple[str, ...]:
    """The words, in lower case, of a model's name or of a path's last part that may tell a size."""
    words = re.split("[-_]", PurePosixPath(name.lower()).name)
    return tuple(word for word in words if word and not _OF_WEIGHTS.fullmatch(word))


@cache
def _by_words() -> Mapping[tuple[str, ...], Published | None]:
    """The published model by the words of its name that may tell a size; None: models of several sizes."""
    models: dict[tuple[str, ...], Published | None] = {}
    for each in published_models():
        words = _words_of(each.name)
        first = models.setdefault(words, each)
        if first is None or first.config is not each.config:
            models[words] = None
    return models


def near_model(name: str) -> Published | None:
    """The published model whose name differs from ``name`` in the owner or in words that change no size, as a
    copy's or a quantized model's does; None: no such model. ``name`` may be a path."""
    return _by_words().get(_words_of(name))


@cache
def _not_modelled() -> Mapping[str, str]:
    text = (files(__package__) / "not_modelled.json").read_text(encoding="utf-8")
    return {str(pattern): str(lacking) for pattern, lacking in json.loads(text).items()}


def lacking_for(name: str) -> str:
    """The reason why no model here covers a model of that name, such as "sparse attention by an index"; "" if
    the name matches no pattern."""
    last = PurePosixPath(name.lower()).name
    return next((what for pattern, what in _not_modelled().items() if re.match(pattern, last)), "")
