"""Sizes of published models, from presets.yaml."""

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import yaml

ModelType = TypeVar("ModelType")


def published(module: str, model: type[ModelType]) -> dict[str, ModelType]:
    """The presets in presets.yaml of a module of this folder, as instances of ``model``, by name."""
    sections = _sections()[module].items()
    return {name: model(**options) for name, options in sections if not name.startswith("_")}


@cache
def _sections() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    text = Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8")
    sections: Mapping[str, Mapping[str, Mapping[str, Any]]] = yaml.safe_load(text)
    return sections
