"""Clusters: devices and links, each rate and limit with its source.

A figure that is not known is null, and then nothing is timed or limited by it. A file that says ``extends:
NAME`` need only have the figures in which it differs from that packaged cluster.
"""

from collections.abc import Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import PositiveFloat, PositiveInt, model_validator

from spbench.bench import yaml_files
from spbench.bench.errors import UserError, refuse_unknown
from spbench.bench.files import read_file
from spbench.bench.measure.clusters import figures as unit
from spbench.bench.measure.clusters import rates
from spbench.bench.measure.clusters.figures import Sourced, figures, implausible, inherited, named
from spbench.bench.measure.clusters.rate_tables import wrong_tables

PACKAGE = "spbench.scenarios.clusters"

#: precisions that devices have rates of
Precision = Literal["fp16", "bf16", "fp32", "fp64", "fp8"]
Library = Literal["cublas", "transformer_engine"]
#: how far a rate is from the one that is missing, from the best grade to the worst; see
#: :mod:`measure.simulator.substitutes`
Grade = Literal["extrapolated", "transferred", "substituted"]
Rates = Literal["datasheet", "sourced", "fitted", "fitted elsewhere"] | Grade
NOT_MEASURED: Any = Sourced(value=None, source="not measured")
#: how many scalars a calibration may have: one with more would explain nothing
MAX_SCALARS = 3


class Device(yaml_files.StrictModel):
    """One accelerator.

    Attributes:
        memory_total_bytes: the bytes of the card's memory.
        memory_context_bytes: bytes that the CUDA context and its libraries take before the first tensor.
        memory_peer_bytes: bytes that NCCL takes in addition for each other device of the node in a group of
            all-to-alls; null counts as none.
        memory_bandwidth_bytes_per_s: the bandwidth of the card's own memory.
        peak_flops_per_s: the peak rate by precision (fp16, bf16, fp32, fp64, and fp8 for recipes of matmuls).
        compute_efficiency: share of the peak rate that matmuls reach; null counts as all of it.
        matmul: rates of matmuls by precision, in place of ``compute_efficiency``.
        grouped_matmul: rates by precision of calls that do the matmuls of several experts; a precision
            without an entry has the rates of other matmuls.
        attention: rates of attention kernels, by kernel, direction, mask, head size and length.
        memory_efficiency: share of the memory bandwidth that kernels reach; null counts as all of it.
        attention_efficiency: share of the peak rate that attention reaches in calls without a rate in
            ``attention``, counting the FLOPs that the mask leaves; null: the share of matmuls. It was
            measured with the default kernel, and is used for other kernels whose rate cannot be carried over.
        attention_floor_s: the least time of an attention kernel, however small the call; null counts as none.
        overlap_loss: seconds of computing lost for each second in which a collective or a message runs,
            because communication takes multiprocessors and memory bandwidth; null counts as none.
        operators: measured calls of operators that move memory, by the operator's name (see
            :func:`operator_seconds`), in place of the memory bandwidth.
        scans: by operators that pass a state from block to block, [how many recurrences run at once, seconds
            of a step]. However few bytes they move, they take no less than their steps one after another.
        launch_overhead_s: seconds from the end of a kernel to the start of the next; null counts as none.
        kernel_floor_s: the least time from the start of a kernel to the start of the next, where the host
            launches them no faster; null counts as none. It takes the place of ``launch_overhead_s``.
        multiprocessors: streaming multiprocessors, on which a kernel's thread blocks run; null: kernels of
            few blocks are not slowed down.
        l2_cache_bytes: the size of the cache that all multiprocessors share.
        same_processor: the name of the extended file's card, if this card differs from that one only in
            memory or links, so that both have the same rates; null: another name is another card
            (:func:`inherited`).
        workspaces: bytes that a library takes from torch's allocator and keeps: ``cublas`` at torch's first
            matmul in each of two threads, the forward pass's and autograd's; ``transformer_engine`` at its
            first matmul. A library without an entry, or with null, takes none.
    """

    name: str
    same_processor: Sourced[str] = NOT_MEASURED
    memory_total_bytes: Sourced[unit.MemoryBytes]
    memory_context_bytes: Sourced[unit.BufferBytes]
    memory_peer_bytes: Sourced[unit.BufferBytes] = NOT_MEASURED
    memory_bandwidth_bytes_per_s: Sourced[unit.MemoryRate]
    peak_flops_per_s: dict[Precision, Sourced[unit.FlopsPerS]] = {}
    compute_efficiency: Sourced[unit.Share] = NOT_MEASURED
    matmul: dict[Precision, rates.MatmulRate] | None = None
    grouped_matmul: dict[Precision, rates.MatmulRate] = {}
    memory_efficiency: Sourced[unit.Share] = NOT_MEASURED
    attention_efficiency: Sourced[unit.Share] = NOT_MEASURED
    attention: rates.AttentionRates | None = None
    attention_floor_s: Sourced[unit.Latency] = NOT_MEASURED
    overlap_loss: Sourced[unit.Loss] = NOT_MEASURED
    operators: dict[str, Sourced[rates.OperatorTimes]] = {}
    scans: dict[str, Sourced[rates.OperatorTimes]] = {}
    launch_overhead_s: Sourced[unit.Latency] = NOT_MEASURED
    kernel_floor_s: Sourced[unit.Latency] = NOT_MEASURED
    multiprocessors: Sourced[unit.Many] = NOT_MEASURED
    l2_cache_bytes: Sourced[unit.MemoryBytes] = NOT_MEASURED
    workspaces: dict[Library, Sourced[unit.BufferBytes]] = {}

    @model_validator(mode="after")
    def _operators_in_order(self) -> Self:
        of_operators = {f"operators.{name}": times for name, times in self.operators.items()}
        for name, times in {**of_operators, **{f"scans.{n}": each for n, each in self.scans.items()}}.items():
            sizes = [pair[0] for pair in times.value or () if len(pair) == 2]
            if not sizes or len(sizes) < len(times.value or ()) or sizes != sorted(set(sizes)):
                first = "bytes" if name in of_operators else "recurrences"
                raise ValueError(f"{name}: give [{first}, seconds] of one call or more, by ascending {first}")
        return self

    @model_validator(mode="after")
    def _one_way_to_launch(self) -> Self:
        if self.launch_overhead_s.value and self.kernel_floor_s.value:
            raise ValueError("launch_overhead_s and kernel_floor_s exclude each other: set one to null")
        return self


class Calibration(yaml_files.StrictModel):
    """Corrections of one precision's datasheet rates on a cluster; the defaults correct nothing.

    Attributes:
        efficiency: every kernel and message takes 1 / efficiency times as long, in addition to the three
            factors below and to the device's own efficiencies.
        compute_efficiency: a factor to the rate of matmuls, and of attention if the device has no rates.
        memory_efficiency: a factor to the memory bandwidth of kernels, in addition to the device's.
        link_efficiency: share of every link's bandwidth that communication reaches.
        step_overhead_s: seconds added to each step.
        parameter_overhead_s: seconds added to each step for each parameter of the whole model.
        strided_element_s: seconds for each element of a matmul's operands and result that lies in a block of
            a wider matrix (block-wise attention scores).
        fitted_on: the cells that the values were fitted on.
    """

    efficiency: unit.Factor = 1.0
    compute_efficiency: unit.Factor = 1.0
    memory_efficiency: unit.Factor = 1.0
    link_efficiency: unit.Factor = 1.0
    step_overhead_s: unit.LongSeconds = 0.0
    parameter_overhead_s: unit.ElementSeconds = 0.0
    strided_element_s: unit.ElementSeconds = 0.0
    fitted_on: list[str] = []

    @property
    def scalars(self) -> dict[str, float]:
        """The values that differ from their defaults, by name."""
        return {k: v for k, v in self.model_dump(exclude_defaults=True).items() if k != "fitted_on"}

    @property
    def label(self) -> str:
        """ "calibrated" if any value differs from its default, else "uncalibrated"."""
        return "calibrated" if self.scalars else "uncalibrated"

    @model_validator(mode="after")
    def _few(self) -> Self:
        if len(self.scalars) > MAX_SCALARS:
            raise ValueError(f"at most {MAX_SCALARS} values may differ from their defaults: {self.scalars}")
        return self


class MeasuredRate(yaml_files.StrictModel):
    """What one operation of one size took on a machine, and the rates that follow; see :class:`RatePoint`.

    Attributes:
        bytes_per_s: the bandwidth of a rank's own memory, or the algorithm bandwidth of a collective.
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


class Cluster(yaml_files.StrictModel):
    """A kind of machine that cells run on, or are simulated on.

    Attributes:
        name: the name of its file, without the suffix.
        collective_model: how collectives are timed: "ring" by latency and bandwidth of each hop,
            "measured" by the links' ``collectives``, "nccl" by NCCL's own model of its algorithms, which
            needs ``nccl``.
        measured: measured rates by size, from which no time is computed.
    """

    name: str
    about: str
    device: Device
    devices_per_node: unit.Many = 1
    #: a device's link to the other devices of its node; null: they communicate through the network
    node_link: rates.Link | None = None
    network: rates.Network
    collective_model: rates.CollectiveModel = "ring"
    nccl: rates.NcclSettings | None = None
    #: the process that launches each device's kernels; null: launching takes no time
    host: rates.Host | None = None
    host_memory: rates.HostMemory = rates.HostMemory()
    calibration: dict[Precision, Calibration] = {}
    measured: list[MeasuredRate] = []

    @model_validator(mode="after")
    def _collectives_known(self) -> Self:
        by_name = {"node_link": self.node_link, "network": self.network}
        links = {name: link for name, link in by_name.items() if link is not None}
        for name, link in links.items():
            link.check_crossings(self.devices_per_node, name)
        known = any(link.collectives or link.table.value for link in links.values())
        if self.collective_model == "measured" and not known:
            raise ValueError("collective_model: measured needs collectives of node_link or network")
        if self.collective_model == "nccl" and self.nccl is None:
            raise ValueError("collective_model: nccl needs the settings nccl, with a generation")
        return self

    @property
    def usable_memory_bytes(self) -> int | None:
        """The bytes of a device's memory that are left for tensors, for fragmentation of the allocator and
        for NCCL's buffers of all-to-alls; None: no limit."""
        total = self.device.memory_total_bytes.value
        return None if total is None else total - (self.device.memory_context_bytes.value or 0)

    def calibration_of(self, precision: str) -> Calibration:
        """The calibration of a precision; one that corrects nothing where the file has none."""
        return named(self.calibration, precision) or Calibration()

    def rates_of(self, precision: str) -> Rates:
        """The class of a precision's rates. "fitted": a scalar or rate was fitted to published step times;
        "sourced": benchmarks tell which share of the datasheet's rate kernels reach; "datasheet": there is
        nothing but the datasheet."""
        fitted = any(each.fitted_on for _, each in self.sourced)
        if fitted or self.calibration_of(precision).scalars:
            return "fitted"
        matmuls = named(self.device.matmul, precision)
        share = matmuls.share if matmuls else self.device.compute_efficiency
        return "datasheet" if share.value is None else "sourced"

    @property
    def content(self) -> dict[str, Any]:
        """The content of a file of this cluster, without ``extends``. Keys that are whole numbers stay
        numbers, unlike in JSON."""
        return self.model_dump(exclude={"name"})

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        """A copy as pydantic makes it, whose :attr:`sourced` is computed again from the copy's own rates."""
        copied = super().model_copy(update=update, deep=deep)
        copied.__dict__.pop("sourced", None)
        return copied

    @cached_property
    def sourced(self) -> Sequence[tuple[str, Sourced[Any]]]:
        """Every rate and limit with its key path, such as device.memory_total_bytes. Kept, because the roles
        of cells ask for it often."""
        return tuple((at, each) for at, each, _ in figures(self) if isinstance(each, Sourced))

    @property
    def tables(self) -> list[str]:
        """The names of the tables of measured rates that this cluster uses, see
        :mod:`measure.clusters.rate_tables`."""
        return sorted({str(each.value) for at, each in self.sourced if at.endswith(".table") and each.value})

    @property
    def inferences(self) -> list[yaml_files.InferredSetting]:
        """The settings of the cluster that were chosen by looking at published numbers."""
        return [*self.network.inferred_from, *(i for _, each in self.sourced for i in each.inferred_from)]


def cluster_names() -> list[str]:
    """The names of the packaged clusters."""
    return list(yaml_files.packaged(PACKAGE))


def load_cluster(name: str) -> Cluster:
    """The packaged cluster of that name, or the cluster in the YAML file at that path, read anew at each
    call. UserError if there is no such cluster, or its file is wrong."""
    path = yaml_files.find_file(name, PACKAGE, "cluster")
    return cluster_of_content(path, read_file(path))


@cache
def cluster_of_content(path: Path, content: bytes) -> Cluster:
    """The cluster of a file with that path and content; raises the errors of :func:`load_cluster`."""
    declared = _resolved(path, content)
    if "name" in declared:
        raise UserError(f"{path}: name: leave it out; a cluster has the name of its file, {path.stem!r}")
    cluster = yaml_files.validate(Cluster, {**declared, "name": path.stem}, str(path))
    for problem in (*implausible(cluster), *wrong_tables(cluster.sourced)):
        raise UserError(f"{path}: {problem}")
    if (usable := cluster.usable_memory_bytes) is not None and usable <= 0:
        raise UserError(f"{path}: device.memory_context_bytes: leaves nothing of memory_total_bytes")
    return cluster


@cache
def _resolved(path: Path, content: bytes) -> dict[str, Any]:
    """The content of a file, merged over the content of the packaged cluster that the file extends."""
    own = yaml_files.parse_yaml(path, content)
    host = own.get("host")
    if isinstance(host, dict) and "extends" in host:
        below = _packaged_below(path, host.pop("extends"), "host.extends")
        own["host"] = yaml_files.merge(below.get("host") or {}, host)
    if (base := own.pop("extends", None)) is None:
        return own
    below = _packaged_below(path, base, "extends")
    device, card = own.get("device"), below["device"]["name"]
    same = device.get("same_processor") if isinstance(device, dict) else None
    if isinstance(same, dict) and same.get("value") not in (card, None):
        raise UserError(f"{path}: device.same_processor: {base} has a card of another name, {card}")
    return yaml_files.merge(inherited(below, own, base), own)


def _packaged_below(path: Path, base: Any, where: str) -> dict[str, Any]:
    """The content of the packaged cluster ``base`` that a file extends at its key ``where``; UserError if no
    other packaged cluster has that name."""
    names = yaml_files.packaged(PACKAGE)
    others = [name for name, file in names.items() if file != path]
    refuse_unknown(f"{path}: {where}: unknown cluster", base, others)
    return dict(_resolved(names[base], read_file(names[base])))
