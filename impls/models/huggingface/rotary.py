"""RoPE in a config.json: by ``rope_theta`` and ``rope_scaling``, or, from transformers 5 on, by
``rope_parameters``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import PositiveFloat, model_validator

from spbench.impls.models.huggingface.config import Config, not_covered

#: kinds of scaling that change angles alone, neither shapes nor costs; the angles here stay unscaled
ANGLES_ALONE = ("default", "linear", "dynamic", "llama3", "yarn")


class RotaryConfig(Config):
    """The fields of a family with RoPE.

    Attributes:
        rope_theta: base of the angles.
        partial_rotary_factor: the share of a head's features that are turned.
    """

    rope_theta: PositiveFloat = 10_000.0
    partial_rotary_factor: PositiveFloat = 1.0

    @model_validator(mode="before")
    @classmethod
    def _without_scaling(cls, content: Mapping[str, Any]) -> dict[str, Any]:
        plain = dict(content)
        for field in ("rope_scaling", "rope_parameters"):
            given = plain.pop(field, None) or {}
            if not isinstance(given, Mapping):
                raise not_covered(field, given, "it must be a mapping")
            kind = given.get("rope_type", given.get("type", "default"))
            if kind not in ANGLES_ALONE:
                raise not_covered(f"{field}.rope_type", kind, f"known are {', '.join(ANGLES_ALONE)}")
            for name in ("rope_theta", "partial_rotary_factor"):
                if name in given:
                    plain[name] = given[name]
        for name in ("rope_theta", "partial_rotary_factor"):
            if type(plain.get(name)) is int:  # 10000 is a float in JSON
                plain[name] = float(plain[name])
        return plain
