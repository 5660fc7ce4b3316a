"""The option that all backends have whose optimizer may be on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from spbench.impls.options import Options, Saving, check_choices


@dataclass(frozen=True)
class OptimizerOptions(Options):
    """Where the optimizer is.

    Attributes:
        optimizer: where masters and moments are, and what updates the weights: the "device", or the "host"
            with its memory and its cores; the backend says as which program has it.

    Raises:
        ValueError: it is another word.
    """

    optimizer: Literal["device", "host"] = "device"

    def __post_init__(self) -> None:
        check_choices(self, {"optimizer": ("device", "host")})

    def savings(self) -> Iterator[Saving]:
        if self.optimizer == "device":
            yield Saving({"optimizer": "host"}, "the host holds masters and moments, and updates the weights")
