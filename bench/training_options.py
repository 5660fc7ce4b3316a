"""How a step is run: what stands under ``training`` in a cell."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, field_validator, model_validator

from spbench.bench.counts import Repeats
from spbench.bench.declarations import declared
from spbench.impls.backends.registry import DEFAULT_BACKEND, backends


class TrainingOptions(BaseModel):
    """How the step is run; see :class:`Training`. Further keys are the options of the backend.

    Attributes:
        step: "inference" is a forward pass alone, of the whole batch.
        moments: "later": the first step's update makes Adam's moments; "kept": they are there before.
        batch_on_device: "part" keeps this rank's part of the batch, "whole" all of it.
        micro_batches: parts of a replica's batch that are run one after another.
        virtual_stages: runs of layers that a rank of the pipeline holds; several with "interleaved" alone.
        steps: traced one after another: communication and times are those of the last, peaks the largest.
        cublas_workspace: as the environment variable CUBLAS_WORKSPACE_CONFIG, pairs of KiB and count such as
            ":4096:8"; None: the cluster's.
    """

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)

    step: Literal["training", "inference"] = "training"
    moments: Literal["kept", "later"] = "kept"
    backend: str = DEFAULT_BACKEND
    batch_on_device: Literal["part", "whole"] = "part"
    micro_batches: Repeats = 1
    schedule: Literal["1f1b", "gpipe", "interleaved"] = "1f1b"
    virtual_stages: Repeats = 1
    steps: Repeats = 1
    cublas_workspace: str | None = None

    @model_validator(mode="after")
    def _check_virtual_stages(self) -> TrainingOptions:
        if self.virtual_stages > 1 and self.schedule != "interleaved":
            raise ValueError("virtual_stages is for schedule: interleaved; leave it out, or set that")
        if self.virtual_stages == 1 and self.schedule == "interleaved":
            raise ValueError("schedule: interleaved needs virtual_stages: 2 or more")
        return self

    @field_validator("cublas_workspace")
    @classmethod
    def _check_workspace(cls, config: str | None) -> str | None:
        if config is not None and not re.fullmatch(r"(:\d+:\d+)+", config):
            raise ValueError(
                f'{config!r} is no CUBLAS_WORKSPACE_CONFIG: write pairs :KIB:COUNT, as ":4096:8"'
            )
        return config

    @model_validator(mode="after")
    def _leave_out_defaults(self) -> TrainingOptions:
        """Forget options of the backend that are given as they are anyway, so that a cell has one key."""
        given = self.__pydantic_extra__
        if given:
            for name, default in _backend_defaults(self.backend).items():
                if name in given and given[name] == default and type(given[name]) is type(default):
                    del given[name]
        return self

    @property
    def backend_options(self) -> Mapping[str, Any]:
        """The options of the backend that differ from their defaults, by name."""
        return self.__pydantic_extra__ or {}


@declared
def _backend_defaults(name: str) -> dict[str, Any]:
    """The options of a backend as they are by default, by name; none if there is no such backend."""
    return asdict(backends()[name].options_type()) if name in backends() else {}
