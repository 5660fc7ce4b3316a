"""What a kernel, a transfer and a collective cost on a cluster.

Kernels: the roofline, max(FLOPs / rate, bytes / bandwidth), plus a launch overhead, or at least the cluster's
floor; matmuls and attention by the rates of their kind (:mod:`measure.clusters.rates`), or by tables of
measured calls. Copies between
device and host: bytes over the device's share of the link; what the host's cores do: bytes over their share.
Communication: latency plus bytes over bandwidth; of collectives by the model that the cluster names.
Ranks fill nodes in order. Within a node each device has a link of its own; between nodes, those that send at
once share the node's network cards, and within it the ways out of its parts
(:mod:`measure.simulator.group_links`). Collectives that overlap in time do not slow each other down.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from spbench.bench.measure.clusters.card_kernels import RatesUnknown, rate_of_call
from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.clusters.figures import named
from spbench.bench.measure.clusters.rates import (
    AttentionRates,
    CollectiveModel,
    Link,
    MatmulRate,
    operator_seconds,
)
from spbench.bench.measure.simulator.collective_costs import measured_seconds, nccl_seconds, ring_seconds
from spbench.bench.measure.simulator.group_links import (
    GroupLinks,
    LinkRate,
    links_of,
    seconds_a_byte,
    shared_seconds,
)
from spbench.bench.measure.simulator.program import (
    ATTENTION,
    HOST_COPY,
    HOST_READ,
    HOST_UPDATE,
    KERNEL,
    MATMUL,
    PRECISION_NAMES,
    Program,
    attention_calls,
)
from spbench.bench.measure.simulator.table_prices import (
    attention_rate,
    backward_share,
    groups_of,
    head_share,
    in_attention_table,
    matmul_seconds,
)
from spbench.impls import FROM_PAGEABLE, GROUPED_MATMULS, TO_PAGEABLE

#: seconds of a collective of that kind, with that payload in bytes, of a group of two ranks or more
_COLLECTIVES: dict[CollectiveModel, Callable[[str, float, GroupLinks], float]] = {
    "ring": ring_seconds,
    "measured": measured_seconds,
    "nccl": nccl_seconds,
}


Ranks = TypeVar("Ranks", int, np.ndarray)
#: of each group its ranks
Groups = Sequence[Sequence[int]]


def node_of(ranks: Ranks, cluster: Cluster) -> Ranks:
    """The node of a rank, or the nodes of an array of ranks."""
    return ranks // cluster.devices_per_node


class Costs:
    """Prices on a cluster, with calibration.

    Args:
        cluster: the profile.
        calibration: its correction; the default takes datasheets at their word.
        parameters: of the whole model.
        attention: the kernel of softmax attention, "flash" for the card's default.

    Attributes:
        step_overhead_s: of a step, beside its kernels and its communication.
        host: figures of the process that launches; None: launching takes no time.
        overlap_loss: seconds of computing lost for each second that communication runs beside it.
    """

    def __init__(
        self, cluster: Cluster, calibration: Calibration, parameters: int = 0, attention: str = "flash"
    ):
        self.cluster, self.attention = cluster, attention
        shares = ("compute_efficiency", "memory_efficiency", "link_efficiency")
        of_all = {name: getattr(calibration, name) * calibration.efficiency for name in shares}
        self.calibration = calibration.model_copy(update=of_all)
        self.step_overhead_s = calibration.step_overhead_s + parameters * calibration.parameter_overhead_s
        device = cluster.device
        self.launch_s = device.launch_overhead_s.value or 0.0
        self.floor_s = device.kernel_floor_s.value or 0.0
        self.host = cluster.host
        self.overlap_loss = device.overlap_loss.value or 0.0
        self.rates = [
            (figure.value or 0.0) if (figure := named(device.peak_flops_per_s, name)) is not None else 0.0
            for name in PRECISION_NAMES
        ]
        network, node = cluster.network, cluster.node_link or cluster.network
        # a missing figure is refused by check_rates where it matters; here it only must not be used
        self.between, self.within = self._link(network), self._link(node)
        self.nics = network.nics_per_node

    def _link(self, link: Link) -> LinkRate:
        bandwidth = link.bandwidth_bytes_per_s.value or float("nan")
        return LinkRate(link.latency_s.value or 0.0, bandwidth * self.calibration.link_efficiency)

    def node(self, rank: int) -> int:
        """The node that a rank is on."""
        return node_of(rank, self.cluster)

    def kernels(self, program: Program) -> np.ndarray:
        """Seconds of each event that is a kernel, without launch overhead; 0 for the others."""
        calibration = self.calibration
        computing = program.flops > 0
        rate, operands_s = self._rates(program)
        if np.any(rate[computing] == 0):
            missing = {PRECISION_NAMES[i] for i in np.unique(program.precision[computing & (rate == 0)])}
            raise RatesUnknown(
                f"{self.cluster.name}: device.peak_flops_per_s has no {', '.join(sorted(missing))}"
            )
        compute = np.divide(program.flops, rate, out=np.zeros(len(program)), where=computing)
        compute += operands_s
        seconds = (
            np.maximum(compute, program.nbytes / self.memory_bandwidth())
            + program.strided * calibration.strided_element_s
        )
        self._set_matmuls(program, seconds)
        self._set_grouped_matmuls(program, seconds)
        self._set_operators(program, seconds)
        self._set_host_copies(program, seconds)
        self._set_host_updates(program, seconds)
        self._set_host_reads(program, seconds)
        return np.where(program.kind == KERNEL, np.maximum(seconds, self._floors(program)), 0.0)

    def _set_matmuls(self, program: Program, seconds: np.ndarray) -> None:
        """Put into ``seconds`` what matmuls take by the card's table, if it has one; lengthen matmuls whose
        rows are not aligned, if it has a rate for them."""
        for number, matmuls in self._matmuls():
            of_kind = (program.category == MATMUL) & (program.precision == number)
            if matmuls.table.value is not None:
                calls = np.flatnonzero(of_kind & program.shape.any(axis=1))
                by_table = matmul_seconds(
                    matmuls.table.value,
                    program.shape[calls],
                    program.nbytes[calls],
                    partial(matmuls.seconds, self.rates[number]),
                )
                strided = program.strided[calls] * self.calibration.strided_element_s
                kept = self.calibration.compute_efficiency * (matmuls.sustained.value or 1.0)
                seconds[calls] = by_table / kept + strided
            for nbytes, part in matmuls.unaligned.items():
                seconds[of_kind & (program.aligned == nbytes)] /= part.value or 1.0

    def _set_grouped_matmuls(self, program: Program, seconds: np.ndarray) -> None:
        """Put what matmuls of several experts in one call take into ``seconds``, where the card has rates of
        their own."""
        for precision, rate in self.cluster.device.grouped_matmul.items():
            number = PRECISION_NAMES.index(precision)
            calls = program.calls_of(GROUPED_MATMULS) & (program.precision == number)
            alone = rate.seconds(self.rates[number], program.flops[calls], program.nbytes[calls])
            seconds[calls] = alone / (rate.sustained.value or 1.0)

    def _set_operators(self, program: Program, seconds: np.ndarray) -> None:
        """Put into ``seconds`` the measured times of operators that move memory."""
        for name, times in self.cluster.device.operators.items():
            if name in program.names:
                calls = program.calls_of([name])
                seconds[calls] = operator_seconds(times.value or (), program.nbytes[calls])

    def _set_host_copies(self, program: Program, seconds: np.ndarray) -> None:
        """Put what copies between device and host take into ``seconds``."""
        copies, memory = program.category == HOST_COPY, self.cluster.host_memory
        if not copies.any():
            return
        bytes_per_s = self._known(
            memory.bytes_per_s, "link_bandwidth_bytes_per_s", "over which device and host copy"
        )
        seconds[copies] = program.nbytes[copies] / bytes_per_s
        of_pageable = {
            TO_PAGEABLE: memory.pageable_to_host_bytes_per_s.value,
            FROM_PAGEABLE: memory.pageable_to_device_bytes_per_s.value,
        }
        for name, rate in of_pageable.items():
            if rate is not None:
                these = program.calls_of([name])
                seconds[these] = program.nbytes[these] / min(rate, bytes_per_s)

    def _known(self, figure: float | None, name: str, what: str) -> float:
        if figure is None:
            raise RatesUnknown(f"{self.cluster.name}: host_memory.{name} is unknown, {what}")
        return figure

    def _set_host_updates(self, program: Program, seconds: np.ndarray) -> None:
        """Put into ``seconds`` the weight updates on the host's cores, which a node's ranks share at once."""
        updates, rate = program.category == HOST_UPDATE, self.cluster.host_memory.update_bytes_per_s.value
        if updates.any():
            rate = self._known(rate, "update_bytes_per_s", "at which the host's cores update weights")
            sharing = min(program.world, self.cluster.devices_per_node)
            seconds[updates] = program.nbytes[updates] * sharing / rate

    def _set_host_reads(self, program: Program, seconds: np.ndarray) -> None:
        """Put what the host takes to read tensors of int64 element by element into ``seconds``: of each a
        view, a kernel, and the wait for it."""
        if self.host is None:
            return
        each = self.floor_s + sum(map(self.host.seconds, ("view_s", "operator_s", "launch_latency_s")))
        reads = program.category == HOST_READ
        seconds[reads] = program.nbytes[reads] / 8 * each

    def _floors(self, program: Program) -> np.ndarray:
        """The least seconds of each event if it is a kernel. A softmax alone, though of the attention
        category, has the floor of others."""
        attention = self.cluster.device.attention_floor_s.value or 0.0
        computes = (program.category == ATTENTION) & (program.flops > 0)
        return np.where(computes, max(attention, self.floor_s), self.floor_s)

    def _rates(self, program: Program) -> tuple[np.ndarray, np.ndarray]:
        """[events]: FLOP/s of each event by its precision and category (0: not known); and [events]: the
        seconds that moving a matmul's operands adds to multiplying them."""
        peak, device = np.array(self.rates), self.cluster.device
        efficiency = (device.compute_efficiency.value or 1.0) * self.calibration.compute_efficiency
        reached, own = (peak * efficiency)[program.precision], device.attention_efficiency.value
        operands_s = np.zeros(len(program))
        for number, matmuls in self._matmuls():
            of_precision = program.precision == number
            share = (matmuls.share.value or 1.0) * self.calibration.compute_efficiency
            reached[of_precision] = peak[number] * share
            products = of_precision & (program.category == MATMUL)
            bandwidth = matmuls.bandwidth_bytes_per_s.value or float("inf")
            operands_s[products] = program.nbytes[products] / bandwidth
        if own is not None:
            of_attention = peak * own * self.calibration.efficiency
            reached = np.where(program.category == ATTENTION, of_attention[program.precision], reached)
        if device.attention is not None:
            self._set_attention_rates(program, device.attention, reached)
        return reached, operands_s

    def _matmuls(self) -> list[tuple[int, MatmulRate]]:
        """The rates of matmuls that the card has, with the index of their precision."""
        of_precision = self.cluster.device.matmul or {}
        return [(PRECISION_NAMES.index(name), matmuls) for name, matmuls in of_precision.items()]

    def _set_attention_rates(self, program: Program, rates: AttentionRates, reached: np.ndarray) -> None:
        """Put the rates of attention without scores, in half precisions, into ``reached``, where the card has
        one for the kernel."""
        share, cores = self.calibration.efficiency, self.cluster.device.multiprocessors.value
        on_grid = (rates.default if self.attention == "flash" else self.attention) == "flash_attention_2"
        for call, events in attention_calls(program):
            rate = rate_of_call(
                self.cluster.device, self.attention, call.head_size, call.direction, call.mask
            )
            if rate is None:
                continue
            tabled = in_attention_table(rate, call)
            alone = (
                attention_rate(rate, call, groups_of(program, events[0])) if tabled else rate.at(call.length)
            )
            reached[events] = alone * share * (rate.sustained.value or 1.0)
            if on_grid:
                reached[events] *= head_share(call.head_size, rate.head_size)
                if call.direction == "backward" and cores:
                    reached[events] *= backward_share(call.heads, call.keys, call.head_size, cores)

    def memory_bandwidth(self) -> float:
        """Bytes a second of the device's own memory that kernels reach; nan: not known."""
        device = self.cluster.device
        bandwidth = device.memory_bandwidth_bytes_per_s.value or float("nan")
        return bandwidth * (device.memory_efficiency.value or 1.0) * self.calibration.memory_efficiency

    def transfers(
        self, sources: Sequence[int], destinations: Sequence[int], at_once: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """(latency in seconds, seconds a byte) of the transfer from each source to its destination.

        All sources send at once, each to ``at_once`` peers.
        """
        ends = np.array([sources, destinations], dtype=int)
        here, there = node_of(ends, self.cluster)
        apart, other = here != there, ends[0] != ends[1]
        latency = np.where(apart, self.between[0], self.within[0]) * other
        per_byte = np.zeros(len(sources))
        inside = ~apart & other
        shared = np.array(seconds_a_byte(self.cluster, ends[:, ~apart].T.tolist()))[other[~apart]]
        per_byte[inside] = np.maximum(at_once / self.within[1], shared / self.calibration.link_efficiency)
        users = np.bincount(here[apart], minlength=1)[here[apart]]
        # a card is shared by all that leave its node
        per_byte[apart] = at_once / (self.between[1] * np.minimum(1.0, self.nics / users))
        return latency, per_byte

    def links(self, groups: Groups) -> list[GroupLinks]:
        """The links of each group, while all groups run one collective at once."""
        return links_of(groups, self.cluster, self.within, self.between, self.calibration.link_efficiency)

    def collectives(
        self, kind: str, nbytes: float, groups: Groups, links: Sequence[GroupLinks] = ()
    ) -> list[float]:
        """Seconds of one collective on each of the groups, which all run it at once; ``links``: the result of
        :meth:`links`, if it is there already."""
        seconds, links = _COLLECTIVES[self.cluster.collective_model], links or self.links(groups)
        least = shared_seconds(self.cluster, kind, nbytes, groups)
        distinct = {id(each): each for each in links if each.size > 1}
        of = {at: seconds(kind, nbytes, each) for at, each in distinct.items()}
        both, efficiency = zip(map(id, links), least, strict=True), self.calibration.link_efficiency
        return [max(of[at], shared / efficiency) if at in of else 0.0 for at, shared in both]
