"""Looks at cells of a search, how many layouts had each outcome, floors of a time, and the order in which the
best layouts are named: first ties with the fastest, the simplest first, then the others."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.measure import load_cluster, packaged_model
from spbench.bench.tools.choose.candidates import kind_of_layout
from spbench.bench.tools.choose.fit_verdict import TABLES, Verdict
from spbench.bench.tools.choose.layouts import Refused, things_to_set
from spbench.bench.tools.choose.look import Depth
from spbench.bench.tools.choose.suggestions import dotted
from spbench.impls import Place

#: how many layouts an answer names
NAMED = 5
#: the share of a card that a layout should leave free
SPARE = 0.05
#: the part of a step's matmul seconds that a scalar, fitted to a few cells, adds for blocks of wider matrices
IN_BLOCKS = "in_blocks_s"
#: settings that make a layout faster by a smaller factor are not worth setting: of measured pairs this close
#: hardly half were in the simulated order
TOSS = 1.02


@dataclass(frozen=True)
class Seen(Verdict):
    """The verdict on a cell of a search, by the closest look at the cell so far.

    Attributes:
        depth: the depth of that look.
    """

    depth: Depth = "all_layers"

    @property
    def kind(self) -> tuple[str, str]:
        """(strategy, mesh as text); see :func:`.kind_of_layout`."""
        return kind_of_layout(self.cell.strategy, self.cell.mesh_sizes)

    @property
    def step_s(self) -> float:
        """Seconds of a step."""
        seconds: float = self.measurement["step_time_s"]
        return seconds

    @property
    def parts(self) -> dict[str, float]:
        """Seconds of each part of a step, by name."""
        return {**self.measurement["breakdown"], **self.measurement["parts"]}

    @property
    def step_parts(self) -> dict[str, float]:
        """Seconds of the parts of a step that answers name, by name."""
        seconds = {name: float(self.parts.get(name, 0.0)) for name in TABLES.forms["step_parts"]}
        return {**seconds, "matmul_s": seconds["matmul_s"] - seconds[IN_BLOCKS]}

    @property
    def uncharged_s(self) -> float:
        """Seconds of a step without those that a fitted scalar adds for blocks; see :data:`IN_BLOCKS`."""
        return self.step_s - self.parts.get(IN_BLOCKS, 0.0)

    @property
    def peak(self) -> int:
        """Allocated bytes of the fullest rank at its peak."""
        nbytes: int = self.measurement["peak_memory_bytes"]
        return nbytes

    @property
    def is_full(self) -> bool:
        """Whether the cell leaves too little of its card to be sure that it fits (docs/trust.md)."""
        return self.memory.spare_bytes < SPARE * self.memory.card_bytes

    @property
    def exact(self) -> bool:
        """Whether all layers were traced, as in `spbench run`, and not only few."""
        return self.depth == "all_layers"

    @property
    def traced(self) -> str:
        """In words, how much of the cell was traced."""
        return "whole" if self.exact else "with few layers"

    def __str__(self) -> str:
        return f"{self.cell.strategy} {self.cell.mesh_text}"


@dataclass
class SearchResult:
    """The outcome of a search.

    Attributes:
        best: layouts that fit, the fastest first, one for each strategy and mesh; named ones are traced
            whole.
        of_strategies: the best layout that fits of each strategy, the fastest first.
        own: the layout that a job has already, traced whole; None: there is none, or it cannot be traced.
        nearest: the layout that needs least if none fits; None: one fits, or none could be traced.
        counts: how many layouts had each outcome.
        refused: the reasons why layouts are impossible, by the layout in words.
        traced: the closest look at each traced cell.
        same: for each strategy that takes the same steps as another, the other; see :class:`Learned`.
        impossible: why there is no layout at all; "" if there is one.
    """

    best: list[Seen] = field(default_factory=list)
    of_strategies: list[Seen] = field(default_factory=list)
    own: Seen | None = None
    nearest: Seen | None = None
    counts: Counter[str] = field(default_factory=Counter)
    refused: Refused = field(default_factory=Refused)
    traced: list[Seen] = field(default_factory=list)
    same: Mapping[str, str] = field(default_factory=dict)
    impossible: str = ""


def tie_limit(best: Sequence[Seen]) -> float:
    """Step times up to this ratio to the shortest are ties with it; 1.0: nothing fits.

    Args:
        best: layouts that fit, the fastest first.
    """
    return packaged_model().tie(best[0].measurement["rates"]) if best else 1.0


def is_tie(seen: Seen, best: Sequence[Seen]) -> bool:
    """Whether the step time of a layout is at most :func:`tie_limit` times the shortest, with or without the
    seconds that a fitted scalar adds for blocks (:data:`IN_BLOCKS`), because the scalar is uncertain."""
    fastest, limit = best[0], tie_limit(best)
    return seen.step_s <= fastest.step_s * limit or seen.uncharged_s <= fastest.uncharged_s * limit


def ranked(best: Sequence[Seen]) -> list[Seen]:
    """Layouts that fit, sorted in the order in which an answer names them: ties with the fastest first, the
    simplest of these first. ``best`` has the fastest first."""

    def place(seen: Seen) -> tuple[bool, tuple[int, ...], float]:
        tie = is_tie(seen, best)
        return not tie, complexity(seen.cell) if tie else (), seen.step_s

    return sorted(best, key=place)


def stands_for(own: Seen, seen: Seen) -> bool:
    """Whether a job's own layout differs from ``seen`` only in settings, and is not slower by more than
    2%."""

    def kind(cell: Cell) -> tuple[Any, ...]:
        return cell.strategy, cell.mesh_text, cell.training.backend, cell.training.micro_batches

    return own.fits and kind(own.cell) == kind(seen.cell) and own.step_s <= TOSS * seen.step_s


def simpler(best: Sequence[Seen], named: Seen) -> list[Seen]:
    """Layouts that are simpler than ``named`` and than each faster layout of the result; strategies and
    memory switches count before axes of several ranks.

    Args:
        best: layouts that fit, the fastest first.
    """
    simpler_ones, most = list[Seen](), complexity(named.cell)[:2]
    for seen in best:
        if (shape := complexity(seen.cell)[:2]) < most:
            simpler_ones.append(seen)
            most = shape
    return simpler_ones


def complexity(cell: Cell) -> tuple[int, ...]:
    """(strategies and memory switches, axes of several ranks, runs of layers of a stage, settings): numbers
    of things to set up, the most important first."""
    options = cell.training.backend_options
    things = things_to_set(cell.strategy, cell.model_options, options)
    axes = sum(n > 1 for n in cell.sizes.by_axis.values())
    settings = len(cell.model_options) + len(cell.strategy_options) + len(options)
    return things, axes, cell.training.virtual_stages, settings + (cell.mesh is not None)


#: the collective in which a rank sends to each other rank, so that a share of the bytes leaves the node
_TO_EACH = "all_to_all"
#: messages from a rank to the next rank, which leave a node by one network card
_TO_NEXT = ("send", "recv")


def links_floor_s(cell: Cell, measurement: Mapping[str, Any]) -> float | None:
    """Seconds of the bytes that a rank sends at the bandwidth of the links, while links within a node and
    across nodes work at the same time; None: the cluster lacks a bandwidth of a link."""
    within_s = across_s = 0.0
    for row in measurement["formula"]:
        times = _row_s(cell, row)
        if times is None:
            return None
        within_s, across_s = within_s + times[0], across_s + times[1]
    return max(within_s, across_s)


def _row_s(cell: Cell, row: Mapping[str, Any]) -> tuple[float, float] | None:
    """(seconds within a node, seconds across nodes) of one row of the closed form; None: no bandwidth."""
    cluster, sent = load_cluster(cell.cluster), float(row["sent_bytes"])
    nodes = np.array(Place(cell.mesh_sizes).members(*row["axis"].split("_"))) // cluster.devices_per_node
    ranks, here = len(nodes), int((nodes == nodes[0]).sum())  # ranks of the group, in all and in one node
    if not sent or ranks == 1:
        return 0.0, 0.0
    card = cluster.network.bandwidth_bytes_per_s.value
    node = cluster.node_link.bandwidth_bytes_per_s.value if cluster.node_link else card
    if not node or (here < ranks and not card):
        return None
    if here == ranks:
        return sent / node, 0.0
    assert card is not None
    share = card * min(1.0, cluster.network.nics_per_node / cluster.devices_per_node)
    if row["collective"] == _TO_EACH:
        leaves = (ranks - here) / (ranks - 1)
        return sent * (1 - leaves) / node, sent * leaves / share
    # in a ring one rank of a node sends to the next node, through the network cards of all ranks in its node
    by = share * here
    if row["collective"] in _TO_NEXT:
        by = min(by, card)
    return (sent / node if here > 1 else 0.0), sent / by


def settings_beside(asked: Cell, cell: Cell) -> dict[str, Any]:
    """The settings of a layout besides strategy, ranks, backend and micro-batches, by dotted name."""
    own = {k: v for k, v in cell.model_options.items() if asked.model_options.get(k) != v}
    settings = dotted("model_options", own) | dotted("strategy_options", cell.strategy_options)
    if cell.training.virtual_stages > 1:
        settings["training.virtual_stages"] = cell.training.virtual_stages
    if cell.mesh is not None:
        settings["mesh"] = cell.mesh
    return settings
