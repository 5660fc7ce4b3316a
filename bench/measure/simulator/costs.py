"""The seconds of kernels, transfers and collectives on a cluster.

Kernels cost the roofline, max(FLOPs / rate, bytes / bandwidth), but at least the cluster's floor, plus a
launch overhead. Matmuls and attention have rates of their kind (:mod:`measure.clusters.rates`), or tables of
measured calls. Copies between device and host cost bytes over the device's share of the link; weight updates
on the host's cores cost bytes over a rank's share of the cores. Communication costs latency plus bytes over
bandwidth, collectives by the model that the cluster names. Ranks fill nodes in order. Within a node each
device has its own link. Ranks that send at once share the node's network cards and, within the node, the
links of its parts (:mod:`measure.simulator.group_links`). Overlapping collectives do not slow each other.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import numpy as np

from spbench.bench.measure.clusters.card_kernels import RatesUnknown, played_kernel, rate_of_call
from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.clusters.figures import named
from spbench.bench.measure.clusters.rates import (
    AttentionRate,
    CollectiveModel,
    Link,
    MatmulRate,
    operator_seconds,
)
from spbench.bench.measure.simulator import table_prices
from spbench.bench.measure.simulator.collective_costs import measured_seconds, nccl_seconds, ring_seconds
from spbench.bench.measure.simulator.group_links import GroupLinks, LinkRate, seconds_a_byte, shared_seconds
from spbench.bench.measure.simulator.program import PRECISION_NAMES, Category, Kind, Program
from spbench.impls import FROM_PAGEABLE, GROUPED_MATMULS, TO_PAGEABLE

#: by model, a function of (collective, payload in bytes, group of two ranks or more) that returns seconds
_COLLECTIVES: dict[CollectiveModel, Callable[[str, float, GroupLinks], float]] = {
    "ring": ring_seconds,
    "measured": measured_seconds,
    "nccl": nccl_seconds,
}
Ranks = TypeVar("Ranks", int, np.ndarray)
#: the global ranks of each group
Groups = Sequence[Sequence[int]]


def node_of(ranks: Ranks, cluster: Cluster) -> Ranks:
    """The node of a rank, or the nodes of an array of ranks."""
    return ranks // cluster.devices_per_node


class Costs:
    """The prices of a cluster, corrected by a calibration.

    Args:
        cluster: the cluster's profile.
        calibration: the correction; the default uses the datasheets' figures.
        parameters: the number of parameters of the whole model.
        attention: the kernel of softmax attention, "flash" for the card's default.
        graphs: what CUDA graphs launch, see :func:`host_seconds`.

    Attributes:
        step_overhead_s: seconds of a step in addition to its kernels and communication.
        host: the figures of the process that launches kernels; None: launching takes no time.
        overlap_loss: seconds of computing lost for each second of communication that overlaps it.
    """

    def __init__(
        self,
        cluster: Cluster,
        calibration: Calibration,
        parameters: int = 0,
        attention: str = "flash",
        graphs: str = "none",
    ):
        self.cluster, self.attention, self.graphs = cluster, attention, graphs
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
        # check_rates refuses missing figures that matter; the others are nan, so that no price can use them
        self.between, self.within = self._link(network), self._link(node)
        self.nics = network.nics_per_node

    def _link(self, link: Link) -> LinkRate:
        bandwidth = link.bandwidth_bytes_per_s.value or float("nan")
        return LinkRate(link.latency_s.value or 0.0, bandwidth * self.calibration.link_efficiency)

    def node(self, rank: int) -> int:
        """The node that a rank is on."""
        return node_of(rank, self.cluster)

    def kernels(self, program: Program) -> np.ndarray:
        """[events]: the seconds of each kernel, without launch overhead; 0 for other events."""
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
        for events, taken in self._with_own_rates(program):
            seconds[events] = taken
        for name, times in self.cluster.device.scans.items():
            calls = program.calls_of([name])
            steps, at_once = program.shape[calls, :2].T
            seconds[calls] = np.maximum(seconds[calls], steps * operator_seconds(times.value or (), at_once))
        # a softmax without matmuls is of the attention category, but has the floor of other kernels
        attends = program.of(Category.ATTENTION) & (program.flops > 0)
        least = max(self.cluster.device.attention_floor_s.value or 0.0, self.floor_s)
        floors = np.where(attends, least, self.floor_s)
        return np.where(program.kind == Kind.KERNEL, np.maximum(seconds, floors), 0.0)

    def _set_matmuls(self, program: Program, seconds: np.ndarray) -> None:
        """Put the seconds of matmuls by the card's table, if the card has one, into ``seconds``; lengthen
        matmuls with unaligned rows, if the card has a rate for them."""
        for number, matmuls in self._matmuls():
            of_kind = program.of(Category.MATMUL) & (program.precision == number)
            if matmuls.table.value is not None:
                calls = np.flatnonzero(of_kind & program.shape.any(axis=1))
                by_table = table_prices.matmul_seconds(
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

    def _with_own_rates(self, program: Program) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """(events, their seconds) of the kinds of work that a cluster may have rates of: grouped matmuls
        (several experts in one call), operators that move memory, copies between device and host, updates of
        weights on the host's cores, which a node's ranks share, and int64 tensors that the host reads element
        by element (a view, a kernel, and the wait for the kernel)."""
        nbytes, memory = program.nbytes, self.cluster.host_memory
        for precision, matmuls in self.cluster.device.grouped_matmul.items():
            number = PRECISION_NAMES.index(precision)
            calls = program.calls_of(GROUPED_MATMULS) & (program.precision == number)
            alone = matmuls.seconds(self.rates[number], program.flops[calls], nbytes[calls])
            yield calls, alone / (matmuls.sustained.value or 1.0)
        for name, times in self.cluster.device.operators.items():
            if name in program.names:
                calls = program.calls_of([name])
                yield calls, operator_seconds(times.value or (), nbytes[calls])
        if (copies := program.of(Category.HOST_COPY)).any():
            name, what = "link_bandwidth_bytes_per_s", "over which device and host copy"
            bytes_per_s = self._known(memory.bytes_per_s, name, what)
            yield copies, nbytes[copies] / bytes_per_s
            for name, figure in (
                (TO_PAGEABLE, memory.pageable_to_host_bytes_per_s),
                (FROM_PAGEABLE, memory.pageable_to_device_bytes_per_s),
            ):
                if figure.value is not None:
                    calls = program.calls_of([name])
                    yield calls, nbytes[calls] / min(figure.value, bytes_per_s)
        if (updates := program.of(Category.HOST_UPDATE)).any():
            name, what = "update_bytes_per_s", "at which the host's cores update weights"
            rate = self._known(memory.update_bytes_per_s.value, name, what)
            sharing = min(program.world, self.cluster.devices_per_node)
            yield updates, nbytes[updates] * sharing / rate
        if self.host is not None:
            each = self.floor_s + sum(map(self.host.seconds, ("view_s", "operator_s", "launch_latency_s")))
            reads = program.of(Category.HOST_READ)
            yield reads, nbytes[reads] / 8 * each

    def _known(self, figure: float | None, name: str, what: str) -> float:
        if figure is None:
            raise RatesUnknown(f"{self.cluster.name}: host_memory.{name} is unknown, {what}")
        return figure

    def _rates(self, program: Program) -> tuple[np.ndarray, np.ndarray]:
        """([events]: the FLOP/s of each event, by its precision and category, 0 if not known; [events]: the
        seconds that moving a matmul's operands adds to its FLOPs)."""
        peak, device = np.array(self.rates), self.cluster.device
        efficiency = (device.compute_efficiency.value or 1.0) * self.calibration.compute_efficiency
        reached, own = (peak * efficiency)[program.precision], device.attention_efficiency.value
        operands_s = np.zeros(len(program))
        for number, matmuls in self._matmuls():
            of_precision = program.precision == number
            share = (matmuls.share.value or 1.0) * self.calibration.compute_efficiency
            reached[of_precision] = peak[number] * share
            products = of_precision & program.of(Category.MATMUL)
            bandwidth = matmuls.bandwidth_bytes_per_s.value or float("inf")
            operands_s[products] = program.nbytes[products] / bandwidth
        if own is not None:
            of_attention = peak * own * self.calibration.efficiency
            reached = np.where(program.of(Category.ATTENTION), of_attention[program.precision], reached)
        self._set_attention_rates(program, reached)
        return reached, operands_s

    def _matmuls(self) -> list[tuple[int, MatmulRate]]:
        """(index of a precision, the card's rate of matmuls in that precision), for each such rate."""
        of_precision = self.cluster.device.matmul or {}
        return [(PRECISION_NAMES.index(name), matmuls) for name, matmuls in of_precision.items()]

    def rated_attention(
        self, program: Program
    ) -> Iterator[tuple[table_prices.AttentionCall, np.ndarray, AttentionRate]]:
        """(kind of call, its events, its rate), for attention kernels that store no scores, in half
        precision, if the card has a rate of the kernel."""
        device = self.cluster.device
        for call, events in table_prices.attention_calls(program) if device.attention is not None else ():
            rate = rate_of_call(device, self.attention, call.head_size, call.direction, call.mask)
            if rate is not None:
                yield call, events, rate

    def _set_attention_rates(self, program: Program, reached: np.ndarray) -> None:
        """Put the FLOP/s of rated attention kernels into ``reached``."""
        share, cores = self.calibration.efficiency, self.cluster.device.multiprocessors.value
        on_grid = played_kernel(self.cluster.device, self.attention) == "flash_attention_2"
        for call, events, rate in self.rated_attention(program):
            tabled = table_prices.in_attention_table(rate, call)
            alone = (
                table_prices.attention_rate(rate, call, table_prices.groups_of(program, events[0]))
                if tabled
                else rate.at(call.length)
            )
            reached[events] = alone * share * (rate.sustained.value or 1.0)
            if on_grid:
                reached[events] *= table_prices.head_share(call.head_size, rate.head_size)
                if call.direction == "backward" and cores:
                    reached[events] *= table_prices.backward_share(
                        call.heads, call.keys, call.head_size, cores
                    )

    def memory_bandwidth(self) -> float:
        """The bytes/s of the device's memory that kernels reach; nan: not known."""
        device = self.cluster.device
        bandwidth = device.memory_bandwidth_bytes_per_s.value or float("nan")
        return bandwidth * (device.memory_efficiency.value or 1.0) * self.calibration.memory_efficiency

    def transfers(
        self, sources: Sequence[int], destinations: Sequence[int], at_once: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """([sends] latency in seconds, [sends] seconds for each byte) of the transfers from source ranks to
        destination ranks. All sources send at once, each to ``at_once`` peers.
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
        # all sends that leave a node share its cards
        per_byte[apart] = at_once / (self.between[1] * np.minimum(1.0, self.nics / users))
        return latency, per_byte

    def links(self, groups: Groups) -> list[GroupLinks]:
        """The links of each group, while all groups run the same collective at once. Two groups share one
        object if their nodes have equally many members and equally many groups leave the nodes."""
        of_node, known = self.cluster.devices_per_node, dict[tuple[tuple[int, int], ...], GroupLinks]()
        on_nodes = [Counter([rank // of_node for rank in members]) for members in groups]
        users = Counter([node for each in on_nodes if len(each) > 1 for node in each])
        keys = [tuple(sorted([(n, users[node]) for node, n in each.items()])) for each in on_nodes]
        rates = self.within, self.between, self.calibration.link_efficiency
        for key, each in zip(keys, on_nodes, strict=True):
            if key not in known:
                known[key] = GroupLinks(self.cluster, each.total(), each, users, *rates)
        return [known[key] for key in keys]

    def collectives(
        self, kind: str, nbytes: float, groups: Groups, links: Sequence[GroupLinks] = ()
    ) -> list[float]:
        """Seconds of one collective on each group, while all groups run the same collective at once.
        ``links``: the result of :meth:`links`; empty: this method asks for it."""
        seconds, links = _COLLECTIVES[self.cluster.collective_model], links or self.links(groups)
        least = shared_seconds(self.cluster, kind, nbytes, groups)
        distinct = {id(each): each for each in links if each.size > 1}
        of = {at: seconds(kind, nbytes, each) for at, each in distinct.items()}
        both, efficiency = zip(map(id, links), least, strict=True), self.calibration.link_efficiency
        return [max(of[at], shared / efficiency) if at in of else 0.0 for at, shared in both]
