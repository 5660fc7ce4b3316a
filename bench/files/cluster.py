"""Clusters: devices and links, each figure with its source.

A figure that is not known is null: nothing is measured or limited by it. A file may say ``extends: NAME`` and
only what differs from that packaged cluster.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    ConfigDict,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from spbench.bench.errors import UserError, suggestion
from spbench.bench.files.inferred import InferredSetting
from spbench.bench.files.yaml_files import find_file, merge, packaged, parse_yaml, read_file, validate

PACKAGE = "spbench.scenarios.clusters"

Number = TypeVar("Number")
Precision = Literal["fp16", "bf16", "fp32", "fp64"]
#: a model with more freedom than this explains nothing
MAX_SCALARS = 3


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Figure(_Strict, Generic[Number]):
    """A number, where it comes from, and, where it is not simply read there, how it follows from that.

    Attributes:
        fitted_on: for a calibrated figure, the published cells that it was fitted on.
        inferred_from: for one that was chosen by looking at published numbers, these.
    """

    value: Number | None
    source: str
    note: str = ""
    fitted_on: list[str] = []
    inferred_from: list[InferredSetting] = []


class Device(_Strict):
    """One accelerator.

    Attributes:
        memory_total_bytes: what the card has.
        memory_context_bytes: what the CUDA context and its libraries take before the first tensor.
        memory_bandwidth_bytes_per_s: of the card's own memory.
        peak_flops_per_s: by precision (fp16, bf16, fp32, fp64).
        launch_overhead_s: from the end of one kernel to the start of the next; null counts as none.
    """

    name: str
    memory_total_bytes: Figure[PositiveInt]
    memory_context_bytes: Figure[NonNegativeInt]
    memory_bandwidth_bytes_per_s: Figure[PositiveFloat]
    peak_flops_per_s: dict[Precision, Figure[PositiveFloat]] = {}
    launch_overhead_s: Figure[NonNegativeFloat] = Figure(value=None, source="not measured")


class Link(_Strict):
    """A link, one way.

    Attributes:
        latency_s: of the smallest message.
        bandwidth_bytes_per_s: of large messages.
    """

    latency_s: Figure[NonNegativeFloat]
    bandwidth_bytes_per_s: Figure[PositiveFloat]


class Network(Link):
    """The links of a node to the others.

    Attributes:
        latency_s, bandwidth_bytes_per_s: of one network card.
        nics_per_node: how many cards the devices of a node share.
        inferred_from: the published numbers by which ``nics_per_node`` was chosen, if it was.
    """

    nics_per_node: PositiveInt = 1
    inferred_from: list[InferredSetting] = []


class Calibration(_Strict):
    """What datasheets do not say about one precision on a cluster; the defaults are the datasheet's promise.

    Attributes:
        compute_efficiency: share of the peak rate that matrix products and attention kernels reach.
        memory_efficiency: share of the memory bandwidth that kernels reach.
        link_efficiency: share of every link's bandwidth that communication reaches.
        step_overhead_s: added to each step.
        parameter_overhead_s: added to each step for each parameter of the model, whole.
        strided_element_s: for each element of a matrix product's operands and result that lies in a block
            of a wider matrix (block-wise attention scores).
        fitted_on: the cells that the values were fitted on.
    """

    compute_efficiency: PositiveFloat = 1.0
    memory_efficiency: PositiveFloat = 1.0
    link_efficiency: PositiveFloat = 1.0
    step_overhead_s: NonNegativeFloat = 0.0
    parameter_overhead_s: NonNegativeFloat = 0.0
    strided_element_s: NonNegativeFloat = 0.0
    fitted_on: list[str] = []

    @property
    def scalars(self) -> dict[str, float]:
        """The values that differ from their defaults."""
        return {k: v for k, v in self.model_dump(exclude_defaults=True).items() if k != "fitted_on"}

    @property
    def label(self) -> str:
        """ "calibrated" or "uncalibrated"."""
        return "calibrated" if self.scalars else "uncalibrated"

    @model_validator(mode="after")
    def _few(self) -> Self:
        if len(self.scalars) > MAX_SCALARS:
            raise ValueError(f"at most {MAX_SCALARS} values may differ from their defaults: {self.scalars}")
        return self


class MeasuredRate(_Strict):
    """What one operation of one size took on a machine; see :class:`RatePoint`.

    Attributes:
        bytes_per_s: of a rank's own memory, or the algorithm bandwidth of a collective.
        bus_bytes_per_s: the bus bandwidth of a collective.
    """

    operation: str
    size: str
    precision: Precision
    ranks: PositiveInt
    seconds: PositiveFloat
    flops_per_s: PositiveFloat | None = None
    bytes_per_s: PositiveFloat | None = None
    bus_bytes_per_s: PositiveFloat | None = None


class Cluster(_Strict):
    """A kind of machine that cells run on, or are taken to run on.

    Attributes:
        name: its file's, without the suffix.
        measured: rates by size, of which the figures are some; nothing is computed from the others.
    """

    name: str
    about: str
    device: Device
    devices_per_node: PositiveInt = 1
    #: between the devices of a node, a device; unknown or missing: they talk through the network
    node_link: Link | None = None
    network: Network
    calibration: dict[Precision, Calibration] = {}
    measured: list[MeasuredRate] = []

    @property
    def usable_memory_bytes(self) -> int | None:
        """Bytes of a device that tensors and the allocator's own waste can have; None: no limit."""
        total = self.device.memory_total_bytes.value
        return None if total is None else total - (self.device.memory_context_bytes.value or 0)

    def calibration_of(self, precision: str) -> Calibration:
        """The calibration of a precision; where there is none, what datasheets promise."""
        return {str(known): found for known, found in self.calibration.items()}.get(precision, Calibration())

    def figures(self) -> Iterator[tuple[str, Figure[Any]]]:
        """Every figure under its key path, as device.memory_total_bytes."""
        return _figures(self, "")

    @property
    def inferences(self) -> list[InferredSetting]:
        """What of the cluster was chosen by looking at published numbers."""
        return [*self.network.inferred_from, *(i for _, f in self.figures() for i in f.inferred_from)]


def _figures(part: BaseModel | dict[str, Any], path: str) -> Iterator[tuple[str, Figure[Any]]]:
    for key, value in part.items() if isinstance(part, dict) else part:
        if isinstance(value, Figure):
            yield f"{path}{key}", value
        elif isinstance(value, BaseModel | dict):
            yield from _figures(value, f"{path}{key}.")


def cluster_names() -> list[str]:
    """The clusters that come with the package."""
    return list(packaged(PACKAGE))


def load_cluster(name: str) -> Cluster:
    """The packaged cluster of that name, or the one in the YAML file at that path, as the file is now.

    Raises:
        UserError: there is none, or its file is wrong.
    """
    path = find_file(name, PACKAGE, "cluster")
    return _cluster(path, read_file(path))


@cache
def _cluster(path: Path, content: bytes) -> Cluster:
    declared = _resolved(path, content)
    if "name" in declared:
        raise UserError(f"{path}: name: leave it out; a cluster has the name of its file, {path.stem!r}")
    cluster = validate(Cluster, {**declared, "name": path.stem}, str(path))
    usable = cluster.usable_memory_bytes
    if usable is not None and usable <= 0:
        raise UserError(f"{path}: device.memory_context_bytes: leaves nothing of memory_total_bytes")
    return cluster


def _resolved(path: Path, content: bytes) -> dict[str, Any]:
    """What a file says and, below it, what the packaged cluster says that it extends."""
    own = parse_yaml(path, content)
    base = own.pop("extends", None)
    if base is None:
        return own
    known = packaged(PACKAGE)
    others = [name for name, file in known.items() if file != path]
    if base not in others:
        raise UserError(f"{path}: extends: unknown cluster {base!r}{suggestion(base, others)}")
    return merge(_resolved(known[base], read_file(known[base])), own)
