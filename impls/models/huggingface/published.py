"""Models by their names on Hugging Face: what counts of the config.json of each, as published. Nothing here
imports torch."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from pathlib import PurePosixPath
from typing import Any, NamedTuple

#: words of a name that say how weights were trained, cut or stored, which changes no size
_OF_WEIGHTS = re.compile(
    r"meta|base|instruct|it|chat|math|thinking|safeguard|merged?|source|hf|sparse|2of4|dequantized|linearized|bnb|"
    r"(?:int|nf|nvfp|mxfp|fp)[48]|(?:bf|fp)16|awq|gptq|aqlm|[2348]bit|[1-8]x[0-9]+|0324|0528|1106|2507"
)


class Published(NamedTuple):
    """A model with published sizes.

    Attributes:
        name: as its authors write it.
        parameters: how many, in all digits or rounded as 8.2B, without modules of multi-token prediction;
            None where no count was found.
        counted: where that count was read.
        source: where the sizes were read; not always the model's own config.json.
        config: ``model_type`` and the fields that count.
        tower: parameters of what stands beside its text, for images; 0: nothing does.
    """

    name: str
    parameters: str | None
    counted: str | None
    source: str
    config: Mapping[str, Any]
    tower: int = 0


@cache
def _by_name() -> Mapping[str, Published]:
    """By the name in lower case; further names are of the same sizes, as of an instruction-tuned model."""
    table = json.loads((files(__package__) / "published.json").read_text(encoding="utf-8"))
    models: dict[str, Published] = {}
    for name, entry in table.items():
        for each in (name, *entry.get("also", ())):
            models[each.lower()] = Published(each, **{k: v for k, v in entry.items() if k != "also"})
    return models


def published_models() -> list[Published]:
    """All of them, further names too."""
    return [*_by_name().values()]


def published_model(name: str) -> Published | None:
    """The model of that name, in upper or lower case; None: its sizes are not known here."""
    return _by_name().get(name.lower())


@cache
def _words_of(name: str) -> tuple[str, ...]:
    """The words of a name, or of a path's last part, that may say a size."""
    words = re.split("[-_]", PurePosixPath(name.lower()).name)
    return tuple(word for word in words if word and not _OF_WEIGHTS.fullmatch(word))


@cache
def _by_words() -> Mapping[tuple[str, ...], Published | None]:
    """By the words that may say a size; None: of several sizes."""
    models: dict[tuple[str, ...], Published | None] = {}
    for each in published_models():
        words = _words_of(each.name)
        first = models.setdefault(words, each)
        if first is None or first.config is not each.config:
            models[words] = None
    return models


def near_model(name: str) -> Published | None:
    """The model whose name differs in the owner, or in words that change no size: a copy of it, or one that
    was tuned or quantized. ``name`` may be a path. None where there is none."""
    return _by_words().get(_words_of(name))


@cache
def _not_modelled() -> Mapping[str, str]:
    text = (files(__package__) / "not_modelled.json").read_text(encoding="utf-8")
    return {str(pattern): str(lacking) for pattern, lacking in json.loads(text).items()}


def lacking_for(name: str) -> str:
    """What the layers of a model of that name have that no model here has; "": that is not known."""
    last = PurePosixPath(name.lower()).name
    return next((what for pattern, what in _not_modelled().items() if re.match(pattern, last)), "")
