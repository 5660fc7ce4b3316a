"""Models by their names on Hugging Face: what counts of the config.json of each, as published. Nothing here
imports torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple


class Published(NamedTuple):
    """A model with published sizes.

    Attributes:
        name: as its authors write it.
        parameters: how many, in all digits or rounded as 8.2B, without modules of multi-token prediction;
            None where no count was found.
        counted: where that count was read.
        source: where the sizes were read; not always the model's own config.json.
        config: ``model_type`` and the fields that count.
    """

    name: str
    parameters: str | None
    counted: str | None
    source: str
    config: Mapping[str, Any]


@cache
def _by_name() -> Mapping[str, Published]:
    """By the name in lower case; further names are of the same sizes, as of an instruction-tuned model."""
    table = json.loads((files(__package__) / "published.json").read_text(encoding="utf-8"))
    models: dict[str, Published] = {}
    for name, entry in table.items():
        for each in (name, *entry.get("also", ())):
            models[each.lower()] = Published(each, *(entry[field] for field in Published._fields[1:]))
    return models


def published_models() -> list[Published]:
    """All of them, further names too."""
    return [*_by_name().values()]


def published_model(name: str) -> Published | None:
    """The model of that name, in upper or lower case; None: its sizes are not known here."""
    return _by_name().get(name.lower())
