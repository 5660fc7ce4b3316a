"""Rates and limits in cluster files, each with its source: of a card by the kind of work, of a host's cores
and memory, and of links, with what collectives were measured to reach on them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import PositiveFloat, PositiveInt, field_validator, model_validator

from spbench.bench.errors import suggestion
from spbench.bench.measure.clusters import figures as unit
from spbench.bench.measure.clusters.figures import Sourced, named
from spbench.bench.yaml_files import InferredSetting, StrictModel


class Host(StrictModel):
    """A process that launches what its device does, one thread, in eager mode. CUDA graphs and code of
    ``torch.compile`` launch otherwise and are not modelled.

    Attributes:
        operator_s: of an operator that launches a kernel, from Python or autograd's engine to the driver.
        view_s: of an operator that launches nothing, as a view.
        node_s: of a node of autograd run, beside its operators.
        module_s: of a call of a module, beside what it calls.
        collective_s: of a collective, a send or a receive posted.
        step_s: of a step, beside all these.
        launch_latency_s: from a launch to the start of its kernel, on a device that waits for it.
        launches_ahead: how many launches of kernels the driver takes before it makes the host wait.
        synchronous: kernels run on the host's own thread, as on a CPU: it waits for each of them.
        scale: what this host takes for each of these, beside the one that they were measured on.
    """

    operator_s: Sourced[unit.Latency]
    view_s: Sourced[unit.Latency]
    node_s: Sourced[unit.Latency]
    module_s: Sourced[unit.Latency]
    collective_s: Sourced[unit.Latency]
    step_s: Sourced[unit.LongSeconds]
    launch_latency_s: Sourced[unit.Latency]
    launches_ahead: Sourced[unit.Many]
    synchronous: bool = False
    scale: Sourced[unit.HostScale] = Sourced(value=1.0, source="the host that the figures were measured on")

    def seconds(self, figure: str) -> float:
        """What one of the figures is on this host; 0 where it is not known."""
        sourced: Sourced[float] = getattr(self, figure)
        return (sourced.value or 0.0) * (self.scale.value or 1.0)


class HostMemory(StrictModel):
    """The host's memory.

    Attributes:
        total_bytes: of a node; null: no limit.
        link_bandwidth_bytes_per_s: of copies to or from pinned memory, one way; null: they have no time.
        pageable_to_host_bytes_per_s: of a copy of one device to memory of the host that is not pinned and was
            just allocated, whose pages the kernel makes while it is written; null: that of pinned memory.
        pageable_to_device_bytes_per_s: of a copy from such memory; null: that of pinned memory.
        update_bytes_per_s: of AdamW on all cores of a node, 28 bytes a float32 parameter; null: not timed.
        devices_per_link: how many devices share a link, all of which copy at once.
    """

    total_bytes: Sourced[unit.MemoryBytes] = Sourced(value=None, source="not known")
    link_bandwidth_bytes_per_s: Sourced[unit.LinkRate] = Sourced(value=None, source="not measured")
    pageable_to_host_bytes_per_s: Sourced[unit.LinkRate] = Sourced(value=None, source="not measured")
    pageable_to_device_bytes_per_s: Sourced[unit.LinkRate] = Sourced(value=None, source="not measured")
    update_bytes_per_s: Sourced[unit.LinkRate] = Sourced(value=None, source="not measured")
    devices_per_link: unit.Many = 1

    @property
    def bytes_per_s(self) -> float | None:
        """A device's share of its link; None: not known."""
        bandwidth = self.link_bandwidth_bytes_per_s.value
        return None if bandwidth is None else bandwidth / self.devices_per_link


#: kernels of softmax attention that hold no scores; a model's option ``attention`` names one of them, or
#: "flash" for that which the card's file has as its default
AttentionKernel = Literal[
    "flash_attention_1", "flash_attention_2", "flash_attention_3", "flash_attention_4", "triton", "cudnn"
]
#: of a call of attention: its pass, and the pairs of positions that it has scores of
Direction = Literal["forward", "backward"]
Mask = Literal["causal", "whole"]
#: pairs: bytes that a call of an operator reads and writes, and its seconds; by ascending bytes
OperatorTimes = list[list[PositiveFloat]]


def operator_seconds(times: Sequence[Sequence[float]], nbytes: np.ndarray) -> np.ndarray:
    """Seconds of calls that move so many bytes: on straight lines between those measured, as long as the
    smallest below, in proportion to bytes above the largest."""
    measured, taken = np.array(times).T
    seconds: np.ndarray = np.interp(nbytes, measured, taken) * np.maximum(1.0, nbytes / measured[-1])
    return seconds


#: in place of the name of a table of rates (:mod:`measure.clusters.rate_tables`)
NO_TABLE: Any = Sourced(value=None, source="none was measured")


class MatmulRate(StrictModel):
    """Matmuls of one precision: seconds = FLOPs / (peak x share) + bytes / bandwidth.

    Attributes:
        table: of measured matmuls, in place of that model for those that lie within it.
        sustained: the part of the rates of table or grouped matmuls that the card keeps through a step, whose
            power limit lowers its clock; null: not known, and counted as all, as calls alone are too short.
        unaligned: the part that matmuls reach whose rows are a multiple of 8, 4 or 2 bytes only; else all.
        share: of the peak rate.
        bandwidth_bytes_per_s: of the operands and the result, which large matmuls pay least for; null: the
            share holds for all shapes.
        measured: FLOP/s of square matmuls by n, where a source has several; for figures alone.
    """

    table: Sourced[str] = NO_TABLE
    sustained: Sourced[unit.Share] = Sourced(value=None, source="not measured")
    unaligned: dict[Literal[2, 4, 8], Sourced[unit.Share]] = {}
    share: Sourced[unit.Share]
    bandwidth_bytes_per_s: Sourced[unit.MemoryRate] = Sourced(value=None, source="one share for all shapes")
    measured: Annotated[dict[PositiveInt, PositiveFloat], unit.FLOPS] = {}

    def seconds(self, peak: float, flops: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Seconds of matmuls by that model, at a peak rate."""
        reached = peak * (self.share.value or 1.0)
        return flops / reached + nbytes / (self.bandwidth_bytes_per_s.value or float("inf"))


class AttentionRate(StrictModel):
    """An attention kernel: FLOPs a second = limit / (1 + half_length / length).

    FLOPs are those that the mask leaves: of a causal one, half. Length is the lesser of queries and keys.

    Attributes:
        head_size: that it was measured at.
        value_head_size: that of the values, where it is another one, as in latent attention: the rate is of
            such calls alone; null: the same.
        direction: null: of a forward and a backward together, which holds for each of them.
        mask: "causal" or "whole".
        table: of measured calls with this head size, forward and causal, with as many queries as keys.
        limit_flops_per_s: that very long sequences come near to.
        half_length: the length that reaches half of it; null: one rate for all lengths.
        sustained: as of matmuls.
        measured: FLOPs a second by the lengths that were measured; the rate of others is extrapolated.
    """

    head_size: unit.Many
    value_head_size: unit.Many | None = None
    direction: Direction | None = None
    mask: Mask
    table: Sourced[str] = NO_TABLE
    limit_flops_per_s: Sourced[unit.FlopsPerS]
    half_length: Sourced[unit.Tokens] = Sourced(value=None, source="one rate for all lengths")
    sustained: Sourced[unit.Share] = Sourced(value=None, source="not measured")
    measured: Annotated[dict[PositiveInt, PositiveFloat], unit.FLOPS] = {}

    def at(self, length: int) -> float:
        """FLOPs a second of sequences of that length; nan: not known."""
        limit = self.limit_flops_per_s.value or float("nan")
        return limit / (1 + (self.half_length.value or 0.0) / length)

    def counts_as(self, direction: Direction) -> int:
        """The head size, rounded down, at which all matmuls of a call would have its FLOPs: forward has a
        matmul of each size, backward three of queries and keys and two of values. Shapes of calls have it."""
        values = self.value_head_size or self.head_size
        if direction == "backward":
            return (3 * self.head_size + 2 * values) // 5
        return (self.head_size + values) // 2


class AttentionRates(StrictModel):
    """What a card's kernels of softmax attention reach in half precisions.

    Attributes:
        default: the kernel that programs on this card run where a model does not say which.
        kernels: rates of each kernel that was measured.
    """

    default: AttentionKernel
    kernels: dict[AttentionKernel, list[AttentionRate]]

    @model_validator(mode="after")
    def _default_known(self) -> Self:
        if not self.kernels.get(self.default):
            names = [name for name, rates in self.kernels.items() if rates]
            raise ValueError(f"default {self.default!r} has no rates{suggestion(self.default, names)}")
        return self

    def rate_of(self, kernel: str, head_size: int, direction: Direction, mask: Mask) -> AttentionRate | None:
        """The measured rate of the most similar calls of a kernel ("flash": the default kernel): the same
        direction or else both directions, then the same mask, then the nearest head size, which is as
        :meth:`AttentionRate.counts_as` has it. None: the kernel has no rate."""
        of_kernel = named(self.kernels, self.default if kernel == "flash" else kernel) or []
        rates = [r for r in of_kernel if r.value_head_size is None or r.counts_as(direction) == head_size]

        def unlike(rate: AttentionRate) -> tuple[int, bool, int]:
            other = 0 if rate.direction == direction else 1 if rate.direction is None else 2
            return other, rate.mask != mask, abs(rate.counts_as(direction) - head_size)

        return min(rates, key=unlike, default=None)


#: collectives whose rates can be given; "any" stands for those that are not
RatedCollective = Literal[
    "any", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"
]
#: how the time of a collective is computed; see :mod:`measure.simulator.costs`
CollectiveModel = Literal["ring", "measured", "nccl"]
#: how NCCL's tables of constants call the generations of NVIDIA's devices
Generation = Literal["volta", "ampere", "hopper", "blackwell"]
NcclAlgorithm = Literal["ring", "tree"]
NcclProtocol = Literal["ll", "ll128", "simple"]


class BusRate(StrictModel):
    """The rate of a collective: seconds = latency + wire bytes / bus bandwidth, as nccl-tests reports it.

    Attributes:
        ranks: the group's size that it was measured at; None: it holds for all sizes.
        latency_s: of the smallest message.
        latency_per_rank_s: added for each rank of the group beyond the first.
        bandwidth_bytes_per_s: the bus bandwidth of large messages, one way.
    """

    ranks: unit.Many | None = None
    latency_s: Sourced[unit.Latency]
    latency_per_rank_s: Sourced[unit.Latency] = Sourced(value=0.0, source="in latency_s")
    bandwidth_bytes_per_s: Sourced[unit.LinkRate]

    def latency(self, ranks: int) -> float:
        """Seconds of the smallest message in a group of that many ranks."""
        return (self.latency_s.value or 0.0) + (self.latency_per_rank_s.value or 0.0) * (ranks - 1)


class Crossing(StrictModel):
    """The way out of a part of a node, which all that leave the part share, as neighbouring devices below a
    PCIe switch or on a socket do.

    Attributes:
        devices: of such a part, neighbours.
        path: what ``nvidia-smi topo -m`` prints for two devices of different parts: PXB, PHB, NODE or SYS.
        bandwidth_bytes_per_s: of all that leaves a part together, one way.
    """

    devices: unit.Many
    path: Literal["PXB", "PHB", "NODE", "SYS"]
    bandwidth_bytes_per_s: Sourced[unit.LinkRate]


class Link(StrictModel):
    """A link, one way.

    Attributes:
        latency_s: of the smallest message.
        bandwidth_bytes_per_s: of large messages.
        name: of its kind, as "EFA"; one that the extended file has not makes it another link.
        table: of measured collectives of one node, in place of ``collectives`` for the kinds that it has.
        collectives: what collectives reach on it, one entry a size of the group, in ascending order. Where a
            kind is missing, the entries of ``any`` stand for it. null takes away those of an extended file.
        crossings: what devices of a node share, from the smallest parts to the largest; none: each has its
            own way to each other, as with NVSwitch; null: not known, and priced as none.
    """

    name: str = ""
    latency_s: Sourced[unit.Latency]
    bandwidth_bytes_per_s: Sourced[unit.LinkRate]
    table: Sourced[str] = NO_TABLE
    collectives: dict[RatedCollective, list[BusRate]] = {}
    crossings: list[Crossing] | None = []

    @field_validator("collectives", mode="before")
    @classmethod
    def _none(cls, declared: Any) -> Any:
        return {} if declared is None else declared

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for kind, rates in self.collectives.items():
            sizes = [rate.ranks for rate in rates]
            given = [size for size in sizes if size is not None]
            if not rates or given != sorted(set(given)) or (len(rates) > 1 and len(given) < len(rates)):
                raise ValueError(
                    f"collectives.{kind}: give one rate, or one a number of ranks in ascending order"
                )
        return self

    def check_crossings(self, devices: int, name: str) -> None:
        """Raise ValueError, with the link's name, unless each part of a node of so many devices holds several
        of the one below."""
        sizes = [*(each.devices for each in self.crossings or ()), devices]
        if any(b % a or a == b for a, b in pairwise(sizes)):
            parts = " and ".join(map(str, sizes[:-1]))
            raise ValueError(
                f"{name}.crossings: parts of {parts} devices do not divide a node of {devices} into several; "
                "give this node's parts, or crossings: null"
            )

    @property
    def known(self) -> bool:
        """Whether messages on the link can be timed: latency and bandwidth are known."""
        return self.latency_s.value is not None and self.bandwidth_bytes_per_s.value is not None

    def rates_of(self, kind: str) -> list[BusRate]:
        """The rates of a collective; without any, the rates for "any" collective."""
        return named(self.collectives, kind) or self.collectives.get("any", [])

    def rate_of(self, kind: str, ranks: int) -> BusRate | None:
        """The rate of a collective in a group of that many ranks: that of the largest size measured which is
        not larger, else of the smallest; None: none is known."""
        rates = self.rates_of(kind)
        fitting = [rate for rate in rates if rate.ranks is None or rate.ranks <= ranks]
        return next(iter([*reversed(fitting), *rates]), None)


class Network(Link):
    """The links of a node to the others.

    Attributes:
        latency_s, bandwidth_bytes_per_s: of one network card.
        nics_per_node: how many cards the devices of a node share.
        one_card_a_part: a group on several nodes that has only some of a node's devices leaves it by one
            card, however many devices it has there; without it, by a card a device as far as there are any.
            A hypothesis: no measurement of such a group was found.
        inferred_from: the published numbers by which one of these was chosen, if it was.
    """

    bandwidth_bytes_per_s: Sourced[unit.CardRate]
    nics_per_node: unit.Many = 1
    one_card_a_part: bool = False
    inferred_from: list[InferredSetting] = []


class NcclSettings(StrictModel):
    """What NCCL's tuning model needs to know beside the links; see :mod:`measure.simulator.collective_costs`.

    Attributes:
        generation: of the devices, which chooses the constants.
        cpu: maker of the nodes' processors, on which the rate of LL between nodes depends.
        channels: of NCCL's rings and trees; null: no limit by channels.
        algorithms, protocols: those that NCCL may choose from (NCCL_ALGO and NCCL_PROTO).
    """

    generation: Generation
    cpu: Literal["intel", "amd"] = "intel"
    channels: Sourced[unit.Many] = Sourced(value=None, source="not known")
    algorithms: list[NcclAlgorithm] = ["ring", "tree"]
    protocols: list[NcclProtocol] = ["ll", "ll128", "simple"]
