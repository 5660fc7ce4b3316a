"""Rates and limits in cluster files, each with its source: a card's by the kind of work, a host's cores and
memory, and links with the measured rates of collectives.
"""

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
    """The process that launches a device's kernels: one thread, in eager mode. CUDA graphs and code of
    ``torch.compile`` launch kernels in another way and are not modelled.

    Attributes:
        operator_s: seconds for an operator that launches a kernel, from Python or autograd to the driver.
        view_s: seconds for an operator that launches nothing, such as a view.
        node_s: seconds to run a node of autograd, without its operators.
        module_s: seconds to call a module, without the operators in it.
        collective_s: seconds to post a collective, a send or a receive.
        step_s: seconds added to each step.
        launch_latency_s: seconds from a launch to the start of its kernel on an idle device.
        launches_ahead: how many kernels may be queued before the driver makes the host wait.
        synchronous: kernels run on the host's own thread, as on a CPU: it waits for each of them.
        scale: this host's seconds divided by those of the host on which the figures were measured.
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
        """Seconds of the figure with that name on this host; 0 where the figure is not known."""
        sourced: Sourced[float] = getattr(self, figure)
        return (sourced.value or 0.0) * (self.scale.value or 1.0)


class HostMemory(StrictModel):
    """The host's memory.

    Attributes:
        total_bytes: the bytes of a node's memory; null: no limit.
        link_bandwidth_bytes_per_s: the rate of copies to or from pinned memory, one way; null: not timed.
        pageable_to_host_bytes_per_s: the rate of a device's copies to newly allocated pageable memory of the
            host, whose pages Linux maps during the copy; null: the rate of pinned memory.
        pageable_to_device_bytes_per_s: the rate of copies from pageable memory; null: that of pinned memory.
        update_bytes_per_s: AdamW's rate on all cores of a node, 28 bytes a float32 parameter; null: not
            timed.
        devices_per_link: how many devices share a link, where all are taken to copy at once.
    """

    total_bytes: Sourced[unit.MemoryBytes] = Sourced(value=None, source="not known")
    link_bandwidth_bytes_per_s: Sourced[unit.LinkRate] = Sourced(value=None, source="not measured")
    pageable_to_host_bytes_per_s: Sourced[unit.LinkRate] = Sourced(value=None, source="not measured")
    pageable_to_device_bytes_per_s: Sourced[unit.LinkRate] = Sourced(value=None, source="not measured")
    update_bytes_per_s: Sourced[unit.LinkRate] = Sourced(value=None, source="not measured")
    devices_per_link: unit.Many = 1

    @property
    def bytes_per_s(self) -> float | None:
        """A device's share of the bandwidth of its link to the host, in bytes a second; None: not known."""
        bandwidth = self.link_bandwidth_bytes_per_s.value
        return None if bandwidth is None else bandwidth / self.devices_per_link


#: kernels of softmax attention that keep no matrix of scores; a model's option ``attention`` names one of
#: these, or "flash" for the default of the card's file
FlashAttention = Literal["flash_attention_1", "flash_attention_2", "flash_attention_3", "flash_attention_4"]
AttentionKernel = Literal[FlashAttention, "efficient_attention_with_mask", "triton", "cudnn"]
#: the pass of a call of attention, and the pairs of positions that have scores
Direction = Literal["forward", "backward"]
Mask = Literal["causal", "whole"]
#: pairs of the bytes that a call of an operator reads and writes and its seconds, by ascending bytes
OperatorTimes = list[list[PositiveFloat]]


def operator_seconds(times: Sequence[Sequence[float]], nbytes: np.ndarray) -> np.ndarray:
    """Seconds of calls that move ``nbytes`` bytes each: interpolated between the measured calls, the smallest
    call's time below them, in proportion to the bytes above them."""
    measured, taken = np.array(times).T
    seconds: np.ndarray = np.interp(nbytes, measured, taken) * np.maximum(1.0, nbytes / measured[-1])
    return seconds


#: the value of ``table`` where no table of rates was measured (:mod:`measure.clusters.rate_tables`)
NO_TABLE: Any = Sourced(value=None, source="none was measured")


class MatmulRate(StrictModel):
    """Matmuls of one precision: seconds = FLOPs / (peak x share) + bytes / bandwidth.

    Attributes:
        table: the name of a table of matmuls, which replaces the formula within the table's sizes.
        sustained: the part of the rates in tables and of grouped matmuls that the card keeps in a step, when
            its power limit lowers the clock, unlike in short benchmarks; null: not known, and counted as all.
        unaligned: the part of the rate for matmuls whose rows are only a multiple of 8, 4 or 2 bytes.
        share: the share of the peak rate.
        bandwidth_bytes_per_s: the rate of moving operands and result; null: only the share counts.
        measured: FLOP/s of square matmuls by n, where a source has several; used only in figures.
    """

    table: Sourced[str] = NO_TABLE
    sustained: Sourced[unit.Share] = Sourced(value=None, source="not measured")
    unaligned: dict[Literal[2, 4, 8], Sourced[unit.Share]] = {}
    share: Sourced[unit.Share]
    bandwidth_bytes_per_s: Sourced[unit.MemoryRate] = Sourced(value=None, source="one share for all shapes")
    measured: Annotated[dict[PositiveInt, PositiveFloat], unit.FLOPS] = {}

    def seconds(self, peak: float, flops: np.ndarray, nbytes: np.ndarray) -> np.ndarray:
        """Seconds of matmuls by the formula of this class, at a peak rate in FLOP/s."""
        reached = peak * (self.share.value or 1.0)
        return flops / reached + nbytes / (self.bandwidth_bytes_per_s.value or float("inf"))


class AttentionRate(StrictModel):
    """An attention kernel: FLOPs a second = limit / (1 + half_length / length).

    Only the FLOPs that the mask leaves count, half of them under a causal mask. The length is that of queries
    or keys, whichever is less.

    Attributes:
        head_size: the head size of the measured calls.
        value_head_size: the head size of the values, if it differs as in latent attention, and then the rate
            is only for such calls; null: the same.
        direction: the pass; null: forward and backward were measured together, and the rate holds for each.
        mask: "causal" or "whole".
        table: the name of a table of forward causal calls with this head size and as many queries as keys.
        limit_flops_per_s: the rate that very long sequences approach.
        half_length: the length at half of that rate; null: one rate for all lengths.
        sustained: as in :class:`MatmulRate`.
        measured: FLOPs a second by measured length; the rates of other lengths are extrapolated.
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
        """FLOPs a second at that sequence length; nan: not known."""
        limit = self.limit_flops_per_s.value or float("nan")
        return limit / (1 + (self.half_length.value or 0.0) / length)

    def counts_as(self, direction: Direction) -> int:
        """The head size, rounded down, at which all matmuls of a call would have the call's FLOPs: forward
        has one matmul of each head size, backward has three of the queries' and two of the values'."""
        values = self.value_head_size or self.head_size
        if direction == "backward":
            return (3 * self.head_size + 2 * values) // 5
        return (self.head_size + values) // 2


class AttentionRates(StrictModel):
    """The rates of a card's kernels of softmax attention in half precision.

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
        """The measured rate of a kernel's most similar calls: the same direction or else both directions,
        then the same mask, then the nearest head size (:meth:`AttentionRate.counts_as`). The kernel "flash"
        is the default kernel. None: the kernel has no rate."""
        of_kernel = named(self.kernels, self.default if kernel == "flash" else kernel) or []
        rates = [r for r in of_kernel if r.value_head_size is None or r.counts_as(direction) == head_size]

        def unlike(rate: AttentionRate) -> tuple[int, bool, int]:
            other = 0 if rate.direction == direction else 1 if rate.direction is None else 2
            return other, rate.mask != mask, abs(rate.counts_as(direction) - head_size)

        return min(rates, key=unlike, default=None)


#: collectives that can have rates; the rates of "any" are for collectives without an entry
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
        ranks: the size of the measured group; None: the rate holds for all sizes.
        latency_s: seconds of the smallest message.
        latency_per_rank_s: seconds added for each rank of the group beyond the first.
        bandwidth_bytes_per_s: the bus bandwidth, one way; of all-to-alls between nodes, of bytes that leave.
    """

    ranks: unit.Many | None = None
    latency_s: Sourced[unit.Latency]
    latency_per_rank_s: Sourced[unit.Latency] = Sourced(value=0.0, source="in latency_s")
    bandwidth_bytes_per_s: Sourced[unit.LinkRate]

    def latency(self, ranks: int) -> float:
        """Seconds of the smallest message in a group of that many ranks."""
        return (self.latency_s.value or 0.0) + (self.latency_per_rank_s.value or 0.0) * (ranks - 1)


class Crossing(StrictModel):
    """The shared way out of a part of a node, such as the devices below a PCIe switch or on a socket.

    Attributes:
        devices: how many neighbouring devices a part has.
        path: what ``nvidia-smi topo -m`` prints for two devices of different parts: PXB, PHB, NODE or SYS.
        bandwidth_bytes_per_s: the bandwidth of all messages together that leave a part, one way.
    """

    devices: unit.Many
    path: Literal["PXB", "PHB", "NODE", "SYS"]
    bandwidth_bytes_per_s: Sourced[unit.LinkRate]


class Link(StrictModel):
    """A link between devices; its rates are one way.

    Attributes:
        latency_s: seconds of the smallest message.
        bandwidth_bytes_per_s: the rate of large messages.
        name: the kind of link, as "EFA"; with another name than in the extended file it is another link.
        table: the name of a table of collectives measured in one node, used instead of ``collectives``.
        collectives: rates by collective, one entry for each size of the group, in ascending order. A
            collective without entries has those of ``any``. null removes the rates of an extended file.
        crossings: shared ways out of parts of a node, from the smallest parts to the largest; empty: all
            pairs of devices have their own way, as with NVSwitch; null: not known, and priced as empty.
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
        """Raise ValueError, with the link's name, unless each part of a node of ``devices`` devices holds
        several parts of the size below."""
        sizes = [*(each.devices for each in self.crossings or ()), devices]
        if any(b % a or a == b for a, b in pairwise(sizes)):
            parts = " and ".join(map(str, sizes[:-1]))
            raise ValueError(
                f"{name}.crossings: parts of {parts} devices do not divide a node of {devices} into several; "
                "give this node's parts, or crossings: null"
            )

    @property
    def known(self) -> bool:
        """Whether messages on the link can be timed: its latency and bandwidth are known."""
        return self.latency_s.value is not None and self.bandwidth_bytes_per_s.value is not None

    def rates_of(self, kind: str) -> list[BusRate]:
        """The rates of a collective; without any, the rates for "any" collective."""
        return named(self.collectives, kind) or self.collectives.get("any", [])

    def rate_of(self, kind: str, ranks: int) -> BusRate | None:
        """The rate of a collective in a group of ``ranks`` ranks: that of the largest measured group which is
        not larger, else of the smallest group; None: no rate is known."""
        rates = self.rates_of(kind)
        fitting = [rate for rate in rates if rate.ranks is None or rate.ranks <= ranks]
        return next(iter([*reversed(fitting), *rates]), None)


class Network(Link):
    """The links of a node to the others.

    Attributes:
        latency_s, bandwidth_bytes_per_s: the figures of one network card.
        nics_per_node: how many network cards the devices of a node share.
        one_card_a_part: whether a group with only some of a node's devices sends to other nodes through one
            network card; else through a card for each of its devices, as far as there are cards. A
            hypothesis: no measurement of such a group was found.
        inferred_from: the published numbers by which one of these figures was chosen.
    """

    bandwidth_bytes_per_s: Sourced[unit.CardRate]
    nics_per_node: unit.Many = 1
    one_card_a_part: bool = False
    inferred_from: list[InferredSetting] = []


class NcclSettings(StrictModel):
    """What NCCL's tuning model needs besides the links; see :mod:`measure.simulator.collective_costs`.

    Attributes:
        generation: the devices' generation, which chooses the constants.
        cpu: the maker of the nodes' processors, on which the rate of LL between nodes depends.
        channels: the number of NCCL's rings and trees; null: channels limit nothing.
        algorithms, protocols: NCCL's choices (NCCL_ALGO and NCCL_PROTO).
    """

    generation: Generation
    cpu: Literal["intel", "amd"] = "intel"
    channels: Sourced[unit.Many] = Sourced(value=None, source="not known")
    algorithms: list[NcclAlgorithm] = ["ring", "tree"]
    protocols: list[NcclProtocol] = ["ll", "ll128", "simple"]
