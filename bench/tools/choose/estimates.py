"""Estimates of layouts from closed forms and a few small traces; they decide in which order layouts are
traced, and what is plainly too slow or too large.

Two small traces give the seconds of one layer for one sample on one rank. An estimate divides these by the
layout's ranks, and adds the strategy's messages (closed forms at the links' rates), the filling of the
pipeline, and the backend's messages. Only traces tell how much computation hides; see :mod:`.learned`.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from spbench import impls
from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure import Costs, GroupLinks, load_cluster, model_parameters, planned_strategy
from spbench.bench.tools.choose.layouts import ORDER, Fold, Layout, Way, groups_of, of_one_axis
from spbench.bench.tools.choose.references import BackendFigures, Depths, Reference, at_depth

#: shares of computation that hide a backend's messages: one micro-batch hides the messages of once a step,
#: each micro-batch those of its own. None are hidden if rows go to experts of other ranks, because the rows
#: wait on the same links until the next layer's weights have arrived
_HIDDEN_ONCE, _HIDDEN_EACH = 0.5, 0.8
#: how often each micro-batch moves the weights of experts through memory, however few its rows are: they are
#: read in forward and in backward, and their gradients are written
_MOVED = 3
#: for each byte of states on the host: bytes that AdamW reads and writes, and bytes that cross the link
_UPDATED, _COPIED = 28 / 16, 8 / 16
#: copies of the rows for experts of other ranks that a rank holds at once, beyond a trace on one rank
_DISPATCHED = 2


_NOTHING = Depths(0.0, 0.0)


@dataclass(frozen=True)
class WayFigures:
    """What a rank holds and sends with a way to divide a sample: each number by layer and outside layers.

    Attributes:
        sent_s: seconds of the messages that the strategy sends for one sample of one micro-batch.
        elements: how many elements of parameters a rank has.
        alike: the axes of the strategy along which ranks hold the same of most parameters.
        experts: elements of routed experts, before they are shared out over ranks; they are not among
            ``elements``.
        dispatched: bytes of the rows in which a rank's tokens of one sample go to their experts.
    """

    sent_s: Depths
    elements: Depths
    alike: tuple[str, ...]
    experts: Depths = _NOTHING
    dispatched: Depths = _NOTHING


#: the axes of a mesh that have several ranks, and the ranks along all axes
_Place = tuple[tuple[str, ...], tuple[tuple[str, int], ...]]


@cache
def _place(axes: tuple[str, ...], sizes: tuple[tuple[str, int], ...]) -> _Place:
    """The place of a collective along ``axes``, of which folded ones have the same groups on all meshes with
    as many ranks that divide a sample."""
    ranks = dict(sizes)
    mesh = {axis: ranks.get(axis, 1) for axis in ORDER}
    if axes and impls.folds(axes):
        mesh = of_one_axis(mesh) | impls.folded_sizes(mesh | impls.given_folds(ranks))
    return tuple(axis for axis in axes if mesh[axis] > 1), tuple(mesh.items())


class CollectivePrices:
    """Seconds of collectives among the ranks of a mesh, each worked out once for all layouts that share it.

    Args:
        cell: the question's cell.

    Attributes:
        s_of_byte: seconds of a byte that a kernel moves through the card's memory; 0: not known.
    """

    def __init__(self, cell: Cell):
        cluster = load_cluster(cell.cluster)
        self._costs = Costs(cluster, cluster.calibration_of(cell.precision), model_parameters(cell))
        bandwidth = self._costs.memory_bandwidth()
        self.s_of_byte = 1 / bandwidth if bandwidth > 0 else 0.0
        self._linked, self._priced = cache(self._groups), cache(self._seconds)

    def seconds(
        self, collective: str, nbytes: float, axes: tuple[str, ...], sizes: Mapping[str, int]
    ) -> float:
        """Seconds of one call among the ranks along these axes, while all their groups call at once."""
        place = _place(axes, tuple(sizes.items()))
        if not place[0] or not nbytes or collective in ("recv", "barrier"):
            return 0.0
        return self._priced(collective, nbytes, place)

    def _groups(self, place: _Place) -> tuple[list[list[int]], list[GroupLinks]]:
        groups = groups_of(place[0], dict(place[1])).tolist()
        return groups, self._costs.links(groups)

    def _seconds(self, collective: str, nbytes: float, place: _Place) -> float:
        groups, links = self._linked(place)
        if collective == "send":
            nexts = np.roll(groups, -1, axis=1)
            latency, per_byte = self._costs.transfers(np.ravel(groups).tolist(), nexts.ravel().tolist(), 1)
            return float((latency + per_byte * nbytes).max())
        return max(self._costs.collectives(collective, nbytes, groups, links))


class Estimates:
    """Estimates of the seconds and bytes of the layouts of one question.

    Args:
        cell: the question's cell, on one rank.
        gpus: how many GPUs each layout has.
        references: by the model's memory-saving settings ("savings") as text; "" for none.
        backends: the figures of each backend by its settings as text.
    """

    def __init__(
        self,
        cell: Cell,
        gpus: int,
        references: Mapping[str, Reference],
        backends: Mapping[str, BackendFigures],
    ):
        self.cell, self.gpus = cell, gpus
        self.references, self.backends = references, backends
        model = impls.model_preset(*cell.model_arguments)
        self.layers: int = getattr(model, "layers", 1)
        #: periods of layers in the model; what is said of "a layer" is of one period
        self.periods = self.layers / model.period
        self._of_backends: dict[tuple[Way, int, int, Fold | None], np.ndarray] = {}
        self._sites = cache(self._few_layers)
        #: seconds of one call of a collective, and of a byte that a kernel moves
        self.seconds, self._s_of_byte = (prices := CollectivePrices(cell)).seconds, prices.s_of_byte

    def _few_layers(self, layers: int, vocabulary_parts: int) -> list[impls.Site]:
        """The sites of the model with one or two layers."""
        cell = at_depth(self.cell, layers)
        return [*impls.model_preset(*cell.model_arguments).sites(1, cell.shape[1], vocabulary_parts)]

    def figures(self, way: Way, options: Mapping[str, Any]) -> WayFigures:
        """What a rank sends and holds with a way to divide a sample.

        Raises:
            Unsupported: the strategy cannot divide the model so.
        """
        sizes = {"dp": self.gpus // way.ranks, **way.axes}
        sent, elements, experts, rows = [], [], [], []
        settings = {"strategy": way.strategy, "strategy_options": dict(options), "sizes": Sizes(**way.axes)}
        strategy = planned_strategy(self.cell.model_copy(update=settings))
        parts, precision = strategy.vocabulary_parts, impls.PRECISIONS[self.cell.precision]
        for layers in (1, 2):
            sites = self._sites(layers, parts)
            if layers == 1:  # deeper models ask for the same, more often
                strategy.check(sites)
            entries = strategy.traffic(sites, precision.parameters.itemsize)
            sent.append(
                sum(
                    each.count * self.seconds(each.collective, each.payload_bytes, each.axes, sizes)
                    for each in entries
                    if each.phase in ("forward", "backward")
                )
            )
            sums = impls.planned_sums(sites, strategy, 1)
            of_mesh = [each for each in sums if not impls.folds(each.axes)]
            weights = (s.count * s.dims.get("experts", 0) for s in sites if s.kind == "parameters")
            experts.append(float(sum(weights)))
            elements.append(float(sum(each.elements for each in sums)) - experts[-1])
            routed = ((s.count, s.dims) for s in sites if s.kind == "experts")
            of_sample = sum(n * d["B"] * d["L"] * d["K"] * d["H"] for n, d in routed)
            rows.append(of_sample * precision.parameters.itemsize / way.ranks)
        most = max(of_mesh, key=lambda each: each.elements, default=None)
        alike = most.axes if most else ()
        return WayFigures(Depths(*sent), Depths(*elements), alike, Depths(*experts), Depths(*rows))

    def computing(self, layouts: Sequence[Layout], way: WayFigures) -> np.ndarray:
        """Seconds of a step without messages among replicas, [layouts, savings]. Here and below, layouts
        differ only in their folds, the sizes of the axes that split experts."""
        layout, (batch, _) = layouts[0], self.cell.shape
        ranks, b = layout.way.ranks, layout.micro_batch
        parts = batch // (layout.dp * b)
        layer_s, ends_s, _, _ = self._of_savings
        of_experts = self._experts_s(layouts, way)
        layer = b * (layer_s / ranks + way.sent_s.layer) + of_experts[:, :1]
        ends = b * (ends_s / ranks + way.sent_s.ends) + of_experts[:, 1:]
        stage = self.periods / layout.pp
        most, last = (max(sizes), sizes[-1]) if (sizes := layout.stage_layers) else (stage, stage)
        slowest = np.maximum(most * layer, last * layer + ends)  # the loss is on the last stage
        seconds: np.ndarray = parts * slowest + (layout.pp - 1) * stage * layer / layout.virtual_stages
        return seconds

    def times(self, layouts: Sequence[Layout], way: WayFigures, computing: np.ndarray) -> np.ndarray:
        """Seconds of a step, [layouts, backends, savings].

        Args:
            computing: the result of :meth:`computing`.
        """
        (batch, _), layout = self.cell.shape, layouts[0]
        parts = batch // (layout.dp * layout.micro_batch)
        sent = np.stack([self._replicas_s(each, way) for each in layouts])[..., None]
        part = computing[:, None] / parts
        alone = np.array([each.fold is None or each.fold == (1, 1) for each in layouts])[:, None, None]
        sums = np.maximum(0.0, sent[:, 0] - _HIDDEN_ONCE * part)
        each_s, again_s = (np.maximum(0.0, sent[:, at] - _HIDDEN_EACH * part * alone) for at in (1, 2))
        each_s = each_s + sent[:, 3]
        # stages keep whole gradients until their last backward, and most also gathered weights
        sent_s = sums + (parts * each_s if layout.pp == 1 else each_s + (parts - 1) * again_s)
        seconds: np.ndarray = computing[:, None] + sent_s + self._host_s(layouts, way)[..., None]
        return seconds

    def _experts_s(self, layouts: Sequence[Layout], way: WayFigures) -> np.ndarray:
        """[layouts, 2]: seconds of a layer and of the rest, in which a micro-batch's rows go to experts, and
        kernels move the experts' weights."""
        itemsize, b = impls.PRECISIONS[self.cell.precision].parameters.itemsize, layouts[0].micro_batch
        moved_s = _MOVED * itemsize * self._s_of_byte
        both = [
            (b * way.dispatched.layer, moved_s * way.experts.layer),
            (b * way.dispatched.ends, moved_s * way.experts.ends),
        ]
        return np.array(
            [[self._dispatch_s(at, n) + s / math.prod(at.fold or (1,)) for n, s in both] for at in layouts]
        )

    def _dispatch_s(self, layout: Layout, nbytes: float) -> float:
        """Seconds in which rows of ``nbytes`` and their gradients go to experts and back."""
        if layout.fold is None or not nbytes:
            return 0.0
        ep, etp = layout.fold
        both = ("all_to_all", nbytes, "ep", ep), ("all_gather", nbytes * etp, "etp", etp)
        calls = ((name, float(f"{n:.2g}"), (axis,)) for name, n, axis, ranks in both if ranks > 1)
        return 4 * sum(self.seconds(*call, layout.sizes) for call in calls)

    def _held(self, layout: Layout, way: WayFigures) -> list[tuple[tuple[str, ...], float, int]]:
        """(axes along which ranks hold the same, elements of a rank, ranks of a stage that hold the same) for
        the parameters outside routed experts, and for those of the experts, if there are any."""
        around = "dp", *way.alike
        elements, experts = (n.of_stage(self.periods, layout.pp) for n in (way.elements, way.experts))
        held = [(around, elements, impls.ranks_along(around, layout.sizes))]
        if layout.fold is not None:
            ranks = math.prod(layout.fold)
            held.append((("edp",), experts / ranks, layout.stage_ranks // ranks))
        return held

    def _host_s(self, layouts: Sequence[Layout], way: WayFigures) -> np.ndarray:
        """[layouts, backends]: seconds in which hosts update their part of the parameters and copy it over
        the link to the card; all ranks of a node update at once."""
        own = np.array([sum(n / ranks for _, n, ranks in self._held(each, way)) for each in layouts])
        cluster = load_cluster(self.cell.cluster)
        host, ranks = cluster.host_memory, min(self.gpus, cluster.devices_per_node)
        nbytes = np.array([each.host_bytes for each in self.backends.values()], dtype=float)
        updated_s = _UPDATED * ranks * nbytes / (host.update_bytes_per_s.value or float("inf"))
        copied_s = _COPIED * nbytes / (host.bytes_per_s or float("inf"))
        return np.asarray(own[:, None] * (updated_s + copied_s))

    def _replicas_s(self, layout: Layout, way: WayFigures) -> np.ndarray:
        """[4, backends]: seconds of a backend's messages once a step, with each micro-batch, and with each
        further one in stages; and of copies to and from buffers for the second kind."""
        key = (layout.way, layout.dp, layout.pp, layout.fold)
        if key in self._of_backends:
            return self._of_backends[key]
        held, sizes = self._held(layout, way), layout.sizes
        seconds = [
            sum(self.seconds(name, float(f"{n * own:.2g}"), axes, sizes) for axes, own, _ in held)
            for name, n in self._messages[0]
        ]
        elements = sum(own for _, own, _ in held)
        copied = [2 * self._s_of_byte * elements * sum(e.each.values()) for e in self.backends.values()]
        sent: np.ndarray = np.vstack([self._messages[1] @ np.array(seconds, dtype=float), copied])
        self._of_backends[key] = sent
        return sent

    @cached_property
    def _messages(self) -> tuple[list[tuple[str, float]], np.ndarray]:
        """The (collective, bytes) that backends send for each element of parameters, and which of them each
        backend sends once a step, with each micro-batch, and with each in stages: [3, backends, messages]."""
        sent = [[e.once.items(), e.each.items(), e.again.items()] for e in self.backends.values()]
        messages = [*dict.fromkeys(item for all_of in sent for items in all_of for item in items)]
        which = [[[each in all_of[at] for each in messages] for all_of in sent] for at in range(3)]
        return messages, np.array(which, dtype=float).reshape(3, len(sent), len(messages))

    def states(self, layouts: Sequence[Layout], way: WayFigures) -> np.ndarray:
        """Bytes of states of training on a rank, [layouts, backends]."""
        held_bytes = [(each.whole_bytes, each.shared_bytes) for each in self.backends.values()]
        whole, shared = np.array(held_bytes, dtype=float).T
        layout = layouts[0]
        several = self.cell.shape[0] > layout.dp * layout.micro_batch
        beside = np.array([e.in_backward[layout.pp > 1] for e in self.backends.values()], dtype=float).T
        whole, shared, of_layer = whole + beside[0], shared + several * beside[1], beside[2]
        held = (self._held(each, way) for each in layouts)
        of_all = np.array([sum((whole + shared / ranks) * n for _, n, ranks in each) for each in held])
        experts = [way.experts.layer / math.prod(each.fold or (1,)) for each in layouts]
        at_once = (way.elements.layer + np.array(experts)[:, None]) / self.layers * self.periods
        return np.asarray(of_all + of_layer * at_once)

    def activations(self, layouts: Sequence[Layout], way: WayFigures) -> np.ndarray:
        """Bytes of all but states of training on the fullest rank at its peak, [layouts, savings]."""
        (batch, _), layout = self.cell.shape, layouts[0]
        stages, runs = layout.pp, layout.virtual_stages
        # with runs of layers in turns, the first rank has as many before its first backward, and one more
        most = stages if runs == 1 else ((runs - 1) * stages + 2 * (stages - 1) + 1) / runs
        at_once = min(most, batch // (layout.dp * layout.micro_batch))
        _, _, layer, ends = self._of_savings
        sample = self.periods / layout.pp * layer * at_once + ends
        sent = [
            _DISPATCHED * way.dispatched.layer if (each.fold or (1, 1)) != (1, 1) else 0.0 for each in layouts
        ]
        nbytes: np.ndarray = layout.micro_batch * (sample / layout.way.ranks + np.array(sent)[:, None])
        return nbytes

    @cached_property
    def _of_savings(self) -> np.ndarray:
        """[4, savings]: seconds of a layer and of all outside layers, bytes of a layer and outside layers."""
        depths = [(each.seconds, each.activation_bytes) for each in self.references.values()]
        rows = [(s.layer, s.ends, b.layer, b.ends) for s, b in depths]
        return np.array(rows, dtype=float).T
