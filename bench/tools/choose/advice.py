"""The answer to one question of `spbench advise`: its layouts as records, ties, and why the winner wins."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from spbench.bench.cell import Cell
from spbench.bench.command_line.output import records
from spbench.bench.measure import (
    ATTENTION,
    load_cluster,
    packaged_model,
    priced_by_in_words,
    written,
)
from spbench.bench.tools.choose.fit_verdict import columns, words
from spbench.bench.tools.choose.layouts import folds_anew
from spbench.bench.tools.choose.possible import Absence
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.ranking import (
    IN_BLOCKS,
    NAMED,
    SPARE,
    SearchResult,
    Seen,
    has_experts,
    is_tie,
    ranked,
    stands_for,
    tie_limit,
)
from spbench.bench.tools.choose.subject import micro_batch_of
from spbench.bench.tools.choose.suggestions import dotted
from spbench.bench.tools.choose.whole_looks import Price
from spbench.bench.units import GIB, shown_price
from spbench.bench.yaml_text import dump
from spbench.impls import Place, model_preset

#: the collective in which a rank sends to each other rank, so that a share of the bytes leaves the node
_TO_EACH = "all_to_all"
#: messages from a rank to the next rank, which leave a node by one network card
_TO_NEXT = ("send", "recv")


@dataclass(frozen=True)
class Advice:
    """The answer to one question.

    Attributes:
        seconds, cpu_s: seconds that the search took, and CPU seconds of the search and its looks.
        prices: the prices of the winner's memory switches, and of other settings that it could have.
        absence: why the layouts of ``--why`` are not named; None: there is no such option.
    """

    question: Question
    result: SearchResult
    seconds: float = 0.0
    cpu_s: float = 0.0
    prices: Sequence[Price] = ()
    absence: Absence | None = None

    @property
    def ranked(self) -> list[Seen]:
        """The named layouts: first ties with the fastest, the simplest first, then others. The job's own
        layout replaces a layout that is as fast and differs only in settings, else it comes last."""
        named, own = ranked(self.result.best)[:NAMED], self.result.own
        if own is None or not named:
            return named
        at = next((at for at, seen in enumerate(named) if stands_for(own, seen)), len(named))
        return [*named[:at], own, *named[at + 1 :]]

    @property
    def tie_limit(self) -> float:
        """Step times up to this ratio to the shortest are ties with it; 1.0: nothing fits."""
        return tie_limit(self.result.best)

    def is_tie(self, seen: Seen) -> bool:
        """Whether the layout fits, and its time ties with the shortest; see :func:`.ranking.is_tie`."""
        return seen.fits and is_tie(seen, self.result.best)

    def hidden_ties(self) -> list[Seen]:
        """The ties with the fastest that are not named, the simplest first; no named tie is less simple."""
        return [seen for seen in ranked(self.result.best)[NAMED:] if self.is_tie(seen)]

    @property
    def winner(self) -> Seen | None:
        """The layout named first: the simplest of the ties with the fastest; None: nothing fits."""
        return next(iter(self.ranked), None)

    @property
    def asked(self) -> dict[str, Any]:
        """The question as plain data: model, cluster, GPUs, length, figures and batch."""
        cell = self.question.cell
        return {
            "model": cell.model,
            "cluster": self.question.cluster,
            **self.question.place,
            "batch": cell.batch,
        }

    def table(self) -> list[dict[str, Any]]:
        """A mapping for each layout: the question's fields, then the layout's."""
        return [{**self.asked, **record} for record in self.records()]

    def records(self) -> list[dict[str, Any]]:
        """One mapping of plain data for each named layout, the best first."""
        best = self.result.best
        ties = sum(map(self.is_tie, best)) > 1
        every = columns(
            "layout",
            yours=lambda seen: seen is self.result.own,
            tie=lambda seen: ties and self.is_tie(seen),
            micro_batch=lambda seen: micro_batch_of(seen.cell),
            settings=lambda seen: written(settings_beside(self.question.cell, seen.cell)),
            attention=lambda seen: model_preset(*seen.cell.model_arguments).attention_kernel,
            behind=lambda seen: seen.step_s / best[0].step_s - 1,
            sent_bytes=lambda seen: sum(row["sent_bytes"] for row in seen.measurement["formula"]),
            exposed_communication=lambda seen: seen.parts["exposed_communication_s"] / seen.step_s,
            bubble=lambda seen: seen.parts["bubble_s"] / seen.step_s,
            priced_by=lambda seen: seen.measurement.get("priced_by") or [],
            compute_floor_s=lambda seen: compute_floor_s(seen.measurement),
            links_floor_s=lambda seen: links_floor_s(seen.cell, seen.measurement),
        )
        return [{"rank": rank, **each} for rank, each in enumerate(records(every, self.ranked), start=1)]

    def fullness(self) -> str:
        """A warning if the winner is too full or tight, with the first tie that is not too full; else ""."""
        winner = self.winner
        if winner is None or not winner.fits or not winner.is_full:
            because = winner.certainty.reason if winner else ""
            return f"{winner} is tight: {because}" if because else ""
        left = winner.memory.spare_bytes / GIB
        text = f"{winner} leaves {left:.1f} GiB, less than {SPARE:.0%} of a card"
        ties = [s for s in ranked(self.result.best) if self.is_tie(s) and s.exact and s is not winner]
        if (roomy := next((s for s in ties if not s.is_full), None)) is None:
            return f"{text}, and so does every tie that was traced whole" if ties else text
        ratio = roomy.step_s / winner.step_s - 1
        return f"{text}; {roomy} takes {ratio:+.0%} and leaves {roomy.memory.spare_bytes / GIB:.1f}"

    def folding(self) -> str:
        """In words, how much the fastest layout gains because its experts lie on other groups of ranks than
        the rest; "": they do not, or there are no experts. Only layouts that were traced whole count."""
        whole = sorted((s for s in self.result.traced if s.fits and s.exact), key=lambda seen: seen.step_s)
        if not whole or not has_experts(whole[0].cell) or not folds_anew(whole[0].cell.sizes.by_axis):
            return ""
        head = f"folding: the fastest layout, {whole[0]}, has its experts over ranks of several axes"
        other = next((s for s in whole if not folds_anew(s.cell.sizes.by_axis)), None)
        if other is None:
            return f"{head}; none without it that was traced fits"
        mine, theirs = _parts(whole[0]), _parts(other)
        name = max(mine, key=lambda part: theirs[part] - mine[part])
        cause = f"{words()['step_parts'][name]} {theirs[name]:.3g} s against {mine[name]:.3g}"
        return f"{head}; without it {other} takes {other.step_s / whole[0].step_s - 1:+.0%}: {cause}"

    def priced_by(self) -> str:
        """In words, the work of the best layouts that is priced by a rate of other work; "": all work has
        rates."""
        return priced_by_in_words(seen.measurement for seen in self.result.best)

    def attention(self) -> str:
        """In words, the winner's attention kernel, and how long its step would take with other kernels, the
        shortest first; "": no other kernel was priced."""
        others = sorted((p for p in self.prices if p.settings.startswith(ATTENTION)), key=lambda p: p.ratio)
        if self.winner is None or not others:
            return ""
        kernel = model_preset(*self.winner.cell.model_arguments).attention_kernel
        steps = ", ".join(f"{p.settings.partition('=')[2]} {shown_price(p.ratio)}" for p in others)
        return f"attention by {kernel}; a step by others: {steps}"

    def bars(self) -> list[dict[str, Any]]:
        """The records of the named layouts, each with the seconds of each part of its step, for a figure."""
        return [
            {**record, "parts": {text: _parts(seen)[name] for name, text in words()["step_parts"].items()}}
            for seen, record in zip(self.ranked, self.records(), strict=True)
        ]

    def point(self) -> dict[str, Any]:
        """A point of a map: the winner's strategy ("" if nothing fits), and whether another strategy ties."""
        winner = self.winner
        strategy = winner.cell.strategy if winner else ""
        others = [s for s in self.result.of_strategies if s.cell.strategy != strategy and self.is_tie(s)]
        return {
            **self.asked,
            "strategy": strategy,
            "mesh": winner.cell.mesh_text if winner else "",
            "tie": bool(others),
            "tokens_per_s": winner.measurement["tokens_per_s"] if winner else None,
        }

    def in_words(self) -> str:
        """The question in words: model, GPUs, cluster, batch and length."""
        cell = self.question.cell
        sequences = f"{cell.batch} sequence{'s' if cell.batch != 1 else ''} of {cell.seq_len}"
        sizes = [cell.model_options.get(name) for name in ("layers", "hidden")]
        # a job that gives all sizes has a preset only in name
        model = f"a model of {sizes[0]} layers of width {sizes[1]}" if all(sizes) else cell.model
        return f"{model}, {self.question.gpus} GPUs of {self.question.cluster}, {sequences}"

    def why(self) -> str:
        """A sentence with numbers on why the winner is before the best of the next strategy; "" if there is
        no other strategy."""
        winner = self.winner
        if winner is None:
            return ""
        others = [s for s in self.result.of_strategies if s.cell.strategy != winner.cell.strategy]
        if not others:
            if self.question.strategies == [winner.cell.strategy]:
                return "no other strategy was asked about"
            return f"no other strategy fits than {winner.cell.strategy}"
        other = others[0]
        causes = causes_in_words(other, winner)
        than = f"{other} {beside_in_words(other, winner)}"
        apart = other.step_s / winner.step_s
        if not (self.is_tie(other) and self.is_tie(winner)):
            head = f"the next strategy, {than}"
        elif max(apart, 1 / apart) < self.tie_limit:
            head = f"a tie: {than}, which is within the errors of such times"
        else:
            apart = other.uncharged_s / winner.uncharged_s
            head = f"a tie: {than}, but {apart - 1:+.1%} without a charge fitted where it is little"
        order = packaged_model().order(self.result.best[0].measurement["rates"], apart)
        return "; ".join(filter(None, [head, causes, order]))


def beside_in_words(seen: Seen, other: Seen, named: str = "") -> str:
    """In words, how much longer a step of ``seen`` takes than one of ``other``, which is called ``named``."""
    ratio = seen.step_s / other.step_s
    share = abs(ratio - 1)
    words, joint = f"{share:.{0 if share >= 0.1 else 1}%} {'more' if ratio >= 1 else 'less'} time", "than"
    if ratio >= 2:
        words, joint = f"{ratio:.1f} times as long", "as"
    return f"takes {words} {joint if named else ''} {named}".rstrip()


def causes_in_words(other: Seen, winner: Seen) -> str:
    """In words, the two parts of a step that explain most of the difference between the layouts' times."""
    mine, theirs = (_parts(seen) for seen in (winner, other))
    differences = {name: theirs[name] - mine[name] for name in mine}
    sign = 1 if other.step_s >= winner.step_s else -1
    reasons = sorted(differences, key=lambda name: -sign * differences[name])[:2]
    return ", ".join(
        f"{words()['step_parts'][name]} {theirs[name]:.3g} s against {mine[name]:.3g}"
        for name in reasons
        if sign * differences[name] > 0.001 * winner.step_s
    )


def _parts(seen: Seen) -> dict[str, float]:
    seconds = {name: float(seen.parts.get(name, 0.0)) for name in words()["step_parts"]}
    return {**seconds, "matmul_s": seconds["matmul_s"] - seconds[IN_BLOCKS]}


def settings_beside(asked: Cell, cell: Cell) -> dict[str, Any]:
    """The settings of a layout besides strategy, ranks, backend and micro-batches, by dotted name."""
    own = {k: v for k, v in cell.model_options.items() if asked.model_options.get(k) != v}
    settings = dotted("model_options", own) | dotted("strategy_options", cell.strategy_options)
    if cell.training.virtual_stages > 1:
        settings["training.virtual_stages"] = cell.training.virtual_stages
    if cell.mesh is not None:
        settings["mesh"] = cell.mesh
    return settings


def scenario_text(cells: Sequence[Cell], title: str) -> str:
    """The text of a scenario file with these cells, for `spbench run`, `verify`, `trace` and `fit`."""
    left_out = {"engine", "timing", "model_config_json"}
    groups = [cell.model_dump(mode="json", exclude_defaults=True, exclude=left_out) for cell in cells]
    for group in groups:
        group["sizes"] = {axis: n for axis, n in group.get("sizes", {}).items() if n > 1}
    return dump({"title": title, "groups": groups})


def compute_floor_s(measurement: Mapping[str, Any]) -> float | None:
    """Seconds of the model's FLOPs (without recomputation) at the peak rate of the card's datasheet; None:
    the datasheet has no rate for this precision."""
    utilization, step_s = measurement["mfu"], measurement["step_time_s"]
    return None if utilization is None else float(utilization * step_s)


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
