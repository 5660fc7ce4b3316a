"""The answer to one question, for people and programs: ties, why the winner wins, and its scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.scenarios.scenario import written
from spbench.bench.measure.trust.bands import packaged_model, priced_by_in_words, with_band
from spbench.bench.tools.advise.floors import compute_floor_s, links_floor_s
from spbench.bench.tools.advise.layouts import folds_anew
from spbench.bench.tools.advise.possible import Absence
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.advise.ranking import (
    IN_BLOCKS,
    NAMED,
    SearchResult,
    Seen,
    complexity,
    has_experts,
    is_tie,
    ranked,
    stands_for,
    tie_limit,
)
from spbench.bench.tools.advise.switch_prices import SwitchPrice
from spbench.bench.tools.fit.fit_verdict import CardMemory, card_memory
from spbench.bench.tools.fit.suggestions import dotted
from spbench.bench.units import GIB, shown_price
from spbench.bench.yaml_text import dump
from spbench.impls.models.model import model_preset

#: the share of a card that a layout should leave free
SPARE = 0.05
#: parts of a step, as :attr:`Measurement.breakdown` and :attr:`Measurement.parts` have them, in words
_PARTS = {
    "matmul_s": "matmul",
    IN_BLOCKS: "matmul in blocks, by a fitted charge",
    "attention_s": "attention",
    "memory_bound_s": "memory-bound operators",
    "intra_node_s": "exposed intra-node communication",
    "inter_node_s": "exposed inter-node communication",
    "bubble_s": "bubble",
    "overhead_s": "launch overhead",
    "host_s": "waiting for the host",
}


@dataclass(frozen=True)
class Advice:
    """The answer to one question.

    Attributes:
        seconds, cpu_s: that the search took, and of cores: its own and those of its looks, when these were
            taken.
        prices: of the named layout's memory switches, and of those that it could have.
        by_kernel: of the named layout, the times by other attention kernels over its own.
        absence: of the layouts that were asked about; None: nothing was asked.
    """

    question: Question
    result: SearchResult
    seconds: float = 0.0
    cpu_s: float = 0.0
    prices: Sequence[SwitchPrice] = ()
    by_kernel: Mapping[str, float] = field(default_factory=dict)
    absence: Absence | None = None

    @property
    def ranked(self) -> list[Seen]:
        """The layouts that are named: those that tie with the fastest, the simplest first, and then the
        others; and the job's own, in place of one as fast that differs in settings alone, else last."""
        named, own = ranked(self.result.best)[:NAMED], self.result.own
        if own is None or not named:
            return named
        at = next((at for at, seen in enumerate(named) if stands_for(own, seen)), len(named))
        return [*named[:at], own, *named[at + 1 :]]

    @property
    def tie_limit(self) -> float:
        """The ratio to the shortest time up to which times are a tie; 1.0: nothing fits."""
        return tie_limit(self.result.best)

    @property
    def _rates(self) -> str:
        rates: str = self.result.best[0].measured["rates"]
        return rates

    def is_tie(self, seen: Seen) -> bool:
        """Whether it fits, and its time ties with the shortest; see :func:`.ranking.is_tie`."""
        return seen.fits and is_tie(seen, self.result.best)

    def hidden_ties(self) -> list[Seen]:
        """Those that tie with the fastest and are not named, the simplest first; none is simpler than a tie
        that is named."""
        return [seen for seen in ranked(self.result.best)[NAMED:] if self.is_tie(seen)]

    @property
    def winner(self) -> Seen | None:
        """The simplest of the fastest; None: nothing fits."""
        return next(iter(self.ranked), None)

    @property
    def asked(self) -> dict[str, Any]:
        """The question in plain data."""
        cell = self.question.cell
        return {
            "model": cell.model,
            "cluster": self.question.cluster,
            **self.question.place,
            "batch": cell.batch,
        }

    def table(self) -> list[dict[str, Any]]:
        """One mapping a layout, with the question."""
        return [{**self.asked, **record} for record in self.records()]

    def records(self) -> list[dict[str, Any]]:
        """One mapping a layout, the best first: plain data."""
        return [self._record(rank, seen) for rank, seen in enumerate(self.ranked, start=1)]

    def _record(self, rank: int, seen: Seen) -> dict[str, Any]:
        cell, measured = seen.cell, self.measured(seen)
        step, breakdown = seen.step_s, measured["breakdown"]
        card = self.memory(seen)
        memory = {name: getattr(card, name) for name in ("total_bytes", "card_bytes", "spare_bytes")}
        return {
            "rank": rank,
            "yours": seen is self.result.own,
            "tie": self.is_tie(seen) and sum(map(self.is_tie, self.result.best)) > 1,
            "strategy": cell.strategy,
            "mesh": cell.mesh_text,
            "backend": cell.training.backend,
            "micro_batch": cell.shape[0] // (cell.sizes.dp * cell.training.micro_batches),
            "settings": written(settings_beside(self.question.cell, cell)),
            "attention": model_preset(*cell.model_arguments).attention_kernel,
            "step_time_s": step,
            "behind": step / self.result.best[0].step_s - 1,
            "step_time_low_s": measured.get("step_time_low_s"),
            "step_time_high_s": measured.get("step_time_high_s"),
            "tokens_per_s": measured["tokens_per_s"],
            "mfu": measured["mfu"],
            "peak_memory_bytes": seen.peak,
            **memory,
            "sent_bytes": sum(row["sent_bytes"] for row in measured["formula"]),
            "exposed_communication": breakdown["exposed_communication_s"] / step,
            "bubble": breakdown["bubble_s"] / step,
            "bound": measured["bound"],
            "rates": measured["rates"],
            "priced_by": measured.get("priced_by") or [],
            "compute_floor_s": compute_floor_s(measured),
            "links_floor_s": links_floor_s(cell, measured),
            "traced": "whole" if seen.exact else "with few layers",
            "cell": cell.key,
        }

    @staticmethod
    def memory(seen: Seen) -> CardMemory:
        """What a card must have for a layout; of one that was traced with few layers, about."""
        return card_memory(seen.cell, seen.measured, seen.tensors_bytes)

    def is_full(self, seen: Seen) -> bool:
        """Whether a layout leaves too little of its card to be sure that it fits (docs/trust.md)."""
        memory = self.memory(seen)
        return memory.spare_bytes < SPARE * memory.card_bytes

    def fullness(self) -> str:
        """A warning of a winner that is too full, with the first that ties and is not; "" of others."""
        winner = self.winner
        if winner is None or not winner.fits or not self.is_full(winner):
            return ""
        left = self.memory(winner).spare_bytes / GIB
        text = f"{winner} leaves {left:.1f} GiB, less than {SPARE:.0%} of a card"
        ties = [s for s in ranked(self.result.best) if self.is_tie(s) and s is not winner]
        if (roomy := next((s for s in ties if not self.is_full(s)), None)) is None:
            return f"{text}, and so does every tie" if ties else text
        ratio = roomy.step_s / winner.step_s - 1
        return f"{text}; {roomy} takes {ratio:+.0%} and leaves {self.memory(roomy).spare_bytes / GIB:.1f}"

    def folding(self) -> str:
        """What the fastest layout gains by groups of ranks of its own for experts, in words; "": it has none,
        or there are no experts."""
        best = next(iter(self.result.best), None)
        if best is None or not has_experts(best.cell) or not folds_anew(best.cell.sizes.by_axis):
            return ""
        head = f"folding: the fastest layout, {best}, has its experts over ranks of several axes"
        others = (s for s in self.result.traced if s.fits and not folds_anew(s.cell.sizes.by_axis))
        other = min(others, key=lambda seen: seen.step_s, default=None)
        if other is None:
            return f"{head}; none without it that was traced fits"
        mine, theirs = _parts(best), _parts(other)
        name = max(_PARTS, key=lambda part: theirs[part] - mine[part])
        cause = f"{_PARTS[name]} {theirs[name]:.3g} s against {mine[name]:.3g}"
        return f"{head}; without it {other} takes {other.step_s / best.step_s - 1:+.0%}: {cause}"

    def simpler(self) -> list[Seen]:
        """The layouts that fit and are simpler than the one that is named first: of each number of strategies
        and axes the fastest. None of them ties with the fastest."""
        by_shape: dict[tuple[int, ...], Seen] = {}
        for seen in self.result.best:
            by_shape.setdefault(complexity(seen.cell)[:2], seen)
        own = complexity(self.winner.cell)[:2] if self.winner else ()
        return [seen for shape, seen in by_shape.items() if shape < own]

    def measured(self, seen: Seen) -> Mapping[str, Any]:
        """The measurement of a layout, with the interval of its time."""
        row = {"cell": seen.cell.model_dump(), "measurement": seen.measured}
        measured: Mapping[str, Any] = with_band(row)["measurement"]
        return measured

    def priced_by(self) -> str:
        """What the times of the best layouts are priced by instead of a rate of its own, in words; "": all
        have rates."""
        return priced_by_in_words(seen.measured for seen in self.result.best)

    def attention(self) -> str:
        """The named layout's attention kernel, and what its step would take by others, in words; "": nothing
        fits, or there is none."""
        if self.winner is None or not self.by_kernel:
            return ""
        kernel = model_preset(*self.winner.cell.model_arguments).attention_kernel
        others = ", ".join(f"{name} {shown_price(ratio)}" for name, ratio in self.by_kernel.items())
        return f"attention by {kernel}; a step by others: {others}"

    def bars(self) -> list[dict[str, Any]]:
        """The records, with the seconds of a step by what they are spent on, in words."""
        return [
            {**record, "parts": {words: _parts(seen)[name] for name, words in _PARTS.items()}}
            for seen, record in zip(self.ranked, self.records(), strict=True)
        ]

    def point(self) -> dict[str, Any]:
        """A point of a map: the winner's strategy, "" where nothing fits, and whether one ties with it."""
        winner = self.winner
        strategy = winner.cell.strategy if winner else ""
        others = [s for s in self.result.of_strategies if s.cell.strategy != strategy and self.is_tie(s)]
        return {
            **self.asked,
            "strategy": strategy,
            "mesh": winner.cell.mesh_text if winner else "",
            "tie": bool(others),
            "tokens_per_s": winner.measured["tokens_per_s"] if winner else None,
        }

    def other_settings(self) -> dict[str, float]:
        """The times of the fastest layout with other settings of its strategy or another order of the mesh,
        over its own, by these settings; as far as they were looked at and fit, the fastest first."""
        fastest = self.result.best[0]
        searched = ("strategy_options", "mesh")
        same = fastest.cell.model_dump(exclude={*searched})
        own = {name: getattr(fastest.cell, name) for name in searched}
        others = {}
        for seen in sorted((s for s in self.result.traced if s.fits), key=lambda s: s.step_s):
            if seen is not fastest and seen.cell.model_dump(exclude={*searched}) == same:
                differs = {name: each for name in searched if (each := getattr(seen.cell, name)) != own[name]}
                others[_differing(differs, own)] = seen.step_s / fastest.step_s
        return others

    def in_words(self) -> str:
        """The question."""
        cell = self.question.cell
        sequences = f"{cell.batch} sequence{'s' if cell.batch != 1 else ''} of {cell.seq_len}"
        sizes = [cell.model_options.get(name) for name in ("layers", "hidden")]
        # a job that gives all sizes has a preset in name alone
        model = f"a model of {sizes[0]} layers of width {sizes[1]}" if all(sizes) else cell.model
        return f"{model}, {self.question.gpus} GPUs of {self.question.cluster}, {sequences}"

    def why(self) -> str:
        """Why the winner is before the best of the next strategy, in a sentence with numbers; "" where there
        is none."""
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
        order = packaged_model().order(self._rates, apart)
        return "; ".join(filter(None, [head, causes, order]))


def beside_in_words(seen: Seen, other: Seen, named: str = "") -> str:
    """How long a step takes beside another, which is ``named``: by a share, or from twice on by a factor."""
    ratio = seen.step_s / other.step_s
    share = abs(ratio - 1)
    words, joint = f"{share:.{0 if share >= 0.1 else 1}%} {'more' if ratio >= 1 else 'less'} time", "than"
    if ratio >= 2:
        words, joint = f"{ratio:.1f} times as long", "as"
    return f"takes {words} {joint if named else ''} {named}".rstrip()


def causes_in_words(other: Seen, winner: Seen) -> str:
    """The two parts of a step that explain most of why one takes longer than another, or less."""
    mine, theirs = (_parts(seen) for seen in (winner, other))
    differences = {name: theirs[name] - mine[name] for name in _PARTS}
    sign = 1 if other.step_s >= winner.step_s else -1
    reasons = sorted(differences, key=lambda name: -sign * differences[name])[:2]
    return ", ".join(
        f"{_PARTS[name]} {theirs[name]:.3g} s against {mine[name]:.3g}"
        for name in reasons
        if sign * differences[name] > 0.001 * winner.step_s
    )


def _differing(settings: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """Settings that another layout has not, as people write them."""
    options = settings.get("strategy_options", {})
    differing = {k: v for k, v in options.items() if v != own["strategy_options"].get(k)}
    return written(differing | ({"mesh": settings["mesh"] or "as it is"} if "mesh" in settings else {}))


def _parts(seen: Seen) -> dict[str, float]:
    seconds = {name: float(seen.parts.get(name, 0.0)) for name in _PARTS}
    return {**seconds, "matmul_s": seconds["matmul_s"] - seconds[IN_BLOCKS]}


def settings_beside(asked: Cell, cell: Cell) -> dict[str, Any]:
    """What a layout sets beside strategy, ranks, backend and micro-batches, by dotted name."""
    own = {k: v for k, v in cell.model_options.items() if asked.model_options.get(k) != v}
    settings = dotted("model_options", own) | dotted("strategy_options", cell.strategy_options)
    if cell.training.virtual_stages > 1:
        settings["training.virtual_stages"] = cell.training.virtual_stages
    if cell.mesh is not None:
        settings["mesh"] = cell.mesh
    return settings


def scenario_text(cells: Sequence[Cell], title: str) -> str:
    """A scenario file with these cells, to run, verify, trace and ask fit about."""
    left_out = {"engine", "timing", "model_config_json"}
    groups = [cell.model_dump(mode="json", exclude_defaults=True, exclude=left_out) for cell in cells]
    for group in groups:
        group["sizes"] = {axis: n for axis, n in group.get("sizes", {}).items() if n > 1}
    return dump({"title": title, "groups": groups})
