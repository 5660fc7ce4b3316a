"""The cells that a search has looked at, and its end: the layouts that the answer names are traced
with all layers, memory switches that they can do without are dropped, and each setting of the layout named
first gets a price."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from typing import Any

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.errors import UserError
from spbench.bench.measure import ATTENTION, cannot_run, changed, load_cluster, written
from spbench.bench.tools.choose.asking import Asking, Behind, Say, unheard
from spbench.bench.tools.choose.candidates import ordered
from spbench.bench.tools.choose.fit_verdict import has_experts
from spbench.bench.tools.choose.layouts import folds_anew, other_folds, settings_of, switch_of
from spbench.bench.tools.choose.learned import Learned
from spbench.bench.tools.choose.look import Depth, looks
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.ranking import NAMED, TOSS, SearchResult, Seen, complexity, ranked, simpler
from spbench.bench.tools.choose.suggestions import Change, cells_of, dotted
from spbench.impls import FOLDED_AXES, backend_class, model_preset

#: for a model with experts, whose ranks along ep can be raised at little cost, a layout that takes a larger
#: share of a card by a trace of few layers does not count as fitting, unless no other layout fits
_FULL = 0.95
#: how many of the fastest layouts are traced with all layers, whether the answer names them or not
_WHOLE = 2
#: the most stages of a pipeline with which other settings are priced: with more stages, one price takes as
#: long as a tenth of a search
_FEW_STAGES = 4


class LookedAt:
    """The cells that a search for one question has looked at, the best of which are traced with all layers.

    Args:
        asking: the workers that trace cells.
        say: takes the current work in words, and the share of the search that is done.

    Attributes:
        seen: the closest look at each cell of the search, by the cell's key.
        learned: what traces taught, such as which strategies take the same steps as others.
    """

    def __init__(self, question: Question, asking: Asking, say: Say = unheard):
        self.question, self.asking, self.behind = question, asking, Behind(say)
        self.usable = load_cluster(question.cell.cluster).usable_memory_bytes or float("inf")
        self.most_bytes = self.usable * (_FULL if has_experts(question.cell) else 1.0)
        self.result, self.seen, self.learned = SearchResult(), dict[str, Seen](), Learned()
        #: by strategy, ratios of step times by traces of all layers to those by traces of few
        self._longer: dict[str, list[float]] = {}
        #: by key, looks at changed cells of the best layouts; None: the cell cannot run
        self._beside: dict[str, Seen | None] = {}

    def looked_at(self, cells: Sequence[Cell], depth: Depth) -> list[Seen]:
        """Look at cells, and keep each look in place of earlier looks at the same cell; returns the looks.
        Cells that cannot run are counted and left out."""
        seen = []
        for cell, outcome in looks(self.asking, cells, depth, self.behind.ended):
            if outcome.status == "unsupported":
                self.result.refused.setdefault(f"{cell.strategy} {cell.mesh_text}", outcome.reason)
                self.result.counts["cannot be run"] += 1
                self.seen.pop(cell.key, None)
            else:
                if depth == "all_layers" and (few := self.seen.get(cell.key)):
                    ratio = outcome.measurement["step_time_s"] / few.step_s
                    self._longer.setdefault(cell.strategy, []).append(ratio)
                self.seen[cell.key] = Seen(cell, outcome.measurement, depth=depth)
                seen.append(self.seen[cell.key])
        return seen

    def fitting(self) -> list[Seen]:
        """The cells that fit and for which the program has arguments, the fastest first. With experts, a cell
        that hardly fits by a trace of few layers counts only if there are no others; see :data:`_FULL`."""
        seen = [s for s in self.seen.values() if s.fits and self.question.runs(s.cell)]
        if has_experts(self.question.cell):
            seen = [s for s in seen if s.exact or s.peak <= _FULL * self.usable] or seen
        return sorted(self.learned.without_same(seen), key=self._least_whole_s)

    def _least_whole_s(self, seen: Seen) -> float:
        """The least seconds of a step that a trace of all layers will give: if two or more cells of the
        strategy took longer by all layers than by few (the host falls behind), this cell will too."""
        ratios = self._longer.get(seen.cell.strategy, ())
        return seen.step_s * (min(ratios) if not seen.exact and len(ratios) > 1 else 1.0)

    def best_layouts(self) -> list[Seen]:
        """The best layout for each strategy and mesh, the fastest first."""
        return self._best_of(lambda seen: seen.kind)

    def best_strategies(self) -> list[Seen]:
        """The best layout for each strategy, the fastest first."""
        return self._best_of(lambda seen: seen.cell.strategy)

    def _best_of(self, kind: Callable[[Seen], Hashable]) -> list[Seen]:
        """For each kind of cells, the simplest of those about as fast as the fastest; the fastest first."""
        of_kinds, seconds = defaultdict[Hashable, list[Seen]](list), self._least_whole_s
        for seen in self.fitting():
            of_kinds[kind(seen)].append(seen)
        best = []
        for alike in of_kinds.values():
            as_fast = [each for each in alike if seconds(each) <= TOSS * seconds(alike[0])]
            best.append(min(as_fast, key=lambda each: complexity(each.cell)))
        return sorted(best, key=seconds)

    def look_whole(self) -> None:
        """Trace with all layers the layouts that the answer names or compares with these, and drop memory
        switches that they can do without, until neither step has anything left to trace."""
        while True:
            if cells := [*{seen.cell.key: seen.cell for seen in self._compared() if not seen.exact}.values()]:
                text = f"tracing {len(cells)} of the best with all layers"
                self.behind.expect(text, len(cells) + 3 * NAMED)
                self.looked_at(cells, "all_layers")
            elif not self._lighten():
                return

    def _compared(self) -> list[Seen]:
        """The best two layouts, those that are named, those simpler than the first named, the best of the
        next strategy and the fastest whose experts do not fold; see :func:`folds_anew`."""
        if not (best := self.best_layouts()):
            return []
        first, *_ = named = ranked(best)[:NAMED]
        others = (s for s in self.best_strategies() if s.cell.strategy != first.cell.strategy)
        unfolded = (seen for seen in best if not folds_anew(seen.cell.sizes.by_axis))
        return [*best[:_WHOLE], *named, *simpler(best, first), *islice(others, 1), *islice(unfolded, 1)]

    def _lighten(self) -> bool:
        """Look at each named layout without one of its memory switches, and keep the lighter layout if it
        takes no longer and leaves enough of the card free; returns whether any switch was left to try."""
        lighter: dict[str, tuple[Seen, Cell]] = {}
        left = 0
        own = self.result.own  # keeps its switches
        for seen in (each for each in ranked(self.best_layouts())[:NAMED] if each is not own):
            cells = without_switches(self.question, seen.cell).values()
            if new := [each for each in cells if each.key not in self._beside]:
                lighter[new[0].key], left = (seen, new[0]), left + len(new)
        self.behind.expect("the best without memory switches", left + NAMED)
        for other in filter(None, self._looked_at([cell for _, cell in lighter.values()])):
            heavier, _ = lighter[other.cell.key]
            as_fast = other.fits and other.step_s <= TOSS * heavier.step_s and self.question.runs(other.cell)
            if as_fast and (not other.is_full or other.peak <= heavier.peak):
                self.seen[other.cell.key] = other
            elif other.cell.key in self.seen and not self.seen[other.cell.key].exact:
                del self.seen[other.cell.key]  # few layers misled
        return bool(lighter)

    def _looked_at(self, cells: Sequence[Cell]) -> list[Seen | None]:
        """Looks with all layers at cells, kept apart from the search's; None for a cell that cannot run."""
        known = {key: seen for key, seen in self.seen.items() if seen.exact}
        self._beside |= {cell.key: known[cell.key] for cell in cells if cell.key in known}
        new = [cell for cell in cells if cell.key not in self._beside]
        for cell, outcome in looks(self.asking, new, "all_layers", self.behind.ended):
            self._beside[cell.key] = Seen(cell, outcome.measurement) if outcome.measurement else None
        return [self._beside[cell.key] for cell in cells]

    def prices(self, layout: Seen) -> list[Price]:
        """The price of each memory switch of a layout, and of each other setting that it could have; other
        settings are left out for a layout of many stages, and so are settings that cannot be run."""
        cell = layout.cell
        switches = without_switches(self.question, cell)
        others = other_settings(self.question, cell) if cell.sizes.pp <= _FEW_STAGES else {}
        changes = {**switches, **others}
        self.behind.expect("what its settings cost", len(changes))
        seen = zip(changes, self._looked_at([*changes.values()]), strict=True)
        return [price(what, what in switches, layout, other) for what, other in seen if other is not None]


@dataclass(frozen=True)
class Price:
    """The price of a setting of a layout, by traces with all layers.

    Attributes:
        settings: the setting in the words of ``--set``.
        used: whether the layout has the setting.
        ratio: the step time with the setting divided by the step time without the setting.
        saved_bytes: how many bytes the setting takes off the peak.
        changed: the layout without the setting if ``used``, else with the setting.
    """

    settings: str
    used: bool
    ratio: float
    saved_bytes: int
    changed: Seen


def price(settings: str, used: bool, layout: Seen, changed_layout: Seen) -> Price:
    """The price of a setting, from looks at a layout and at the layout with that setting changed."""
    with_it, without = (layout, changed_layout) if used else (changed_layout, layout)
    ratio, saved_bytes = with_it.step_s / without.step_s, without.peak - with_it.peak
    return Price(settings, used, ratio, saved_bytes, changed_layout)


def other_kernels(cell: Cell) -> list[str]:
    """The attention kernels for which the card has rates, the cell's own included; none if the model does not
    let a kernel be chosen, or the card has rates for only one."""
    model, device = model_preset(*cell.model_arguments), load_cluster(cell.cluster).device
    rates_of = device.attention
    if rates_of is None or model.attention_kernel not in rates_of.kernels or not hasattr(model, "attention"):
        return []
    kernels = [
        str(name) for name, rates in rates_of.kernels.items() if rates and not cannot_run(device, name)
    ]
    return kernels if len(kernels) > 1 else []


#: orders of the mesh that are tried for the best
_OTHER_ORDERS = (
    ("pp", "dp", "cp", "sp", "tp"),
    ("dp", "pp", "sp", "cp", "tp"),
    ("dp", "pp", "tp", "cp", "sp"),
)


def changes_beside(question: Question, cell: Cell) -> list[Cell]:
    """The cell with each other setting of its strategy, fold of its experts and order of its mesh."""
    sizes = cell.sizes.by_axis
    changes = [dotted("strategy_options", each) for each in settings_of(question, cell.strategy)[1:]]
    if getattr(question.model, "experts", 0) and not {*FOLDED_AXES} & {*question.fixed}:
        changes += other_folds(sizes)
    meshes = (ordered(sizes, order) for order in _OTHER_ORDERS)
    return _changed(question, cell, [*changes, *({"mesh": each} for each in meshes if each != cell.mesh)])


def cheaper_savings(question: Question, cell: Cell) -> list[Cell]:
    """The cell with each choice of model options that saves less memory in less time, the cheapest first."""
    savings = [each.options for each in question.model.savings(cell.sizes.pp * cell.training.virtual_stages)]
    own = [at for at, each in enumerate(savings) if each.items() <= cell.model_options.items()]
    cheaper = savings[: max(own, default=0)]
    return _changed(question, cell, [dotted("model_options", each) for each in cheaper])


def without_switches(question: Question, cell: Cell) -> dict[str, Cell]:
    """The cell without one memory switch (and the settings that need that switch), for each of its switches,
    by the dropped settings in words: switches of the backend first, checkpoints before recomputation."""
    cells: dict[str, Cell] = {}
    for settings, other in (*_less_on_host(cell), *_less_of_model(question.cell.model_options, cell)):
        if not {*settings} & {*question.options}:
            with suppress(UserError):
                cells[written(settings)] = changed(other, {})
    return cells


def _less_on_host(cell: Cell) -> Iterator[tuple[dict[str, Any], Cell]]:
    given = dict(cell.training.backend_options)
    kept = cell.training.model_dump(exclude_defaults=True, exclude={*given})
    searched = sorted(backend_class(cell.training.backend).options_type.searched(), key=len, reverse=True)
    own, *fewer = [each for each in searched if each.items() <= given.items()] or [{}]
    for each in fewer[:1]:
        gone = {name: value for name, value in own.items() if name not in each}
        rest = {name: value for name, value in given.items() if name not in gone}
        training = TrainingOptions.model_validate({**kept, **rest})
        yield dotted("training", gone), cell.model_copy(update={"training": training})


def _less_of_model(asked: Mapping[str, Any], cell: Cell) -> Iterator[tuple[dict[str, Any], Cell]]:
    own = {name: value for name, value in cell.model_options.items() if asked.get(name) != value}
    of_switches: dict[str, dict[str, Any]] = {}
    for name in sorted(own, key=lambda name: not name.startswith("checkpoint")):
        of_switches.setdefault(switch_of(name), {})[name] = own[name]
    if "recompute" in of_switches:  # checkpoints need recomputation
        of_switches["recompute"] |= {name: own[name] for name in own if name.startswith("checkpoint")}
    for switch in of_switches.values():
        before = {name: asked[name] for name in switch if name in asked}
        rest = {name: value for name, value in cell.model_options.items() if name not in switch}
        yield dotted("model_options", switch), cell.model_copy(update={"model_options": {**rest, **before}})


def other_settings(question: Question, cell: Cell) -> dict[str, Cell]:
    """The cell with each other setting of its strategy, order of its mesh, and attention kernel that the card
    has rates for, by the changed settings in words."""
    own_kernel = model_preset(*cell.model_arguments).attention_kernel
    kernels = [{ATTENTION: name} for name in other_kernels(cell) if name != own_kernel]
    others = {written(each): changed(cell, each) for each in kernels}
    for each in changes_beside(question, cell):
        if each.sizes == cell.sizes:
            own, options = cell.strategy_options, each.strategy_options
            differing = {name: value for name, value in options.items() if own.get(name) != value}
            mesh = {} if each.mesh == cell.mesh else {"mesh": each.mesh or "as it is"}
            others[written({**differing, **mesh})] = each
    return others


def _changed(question: Question, cell: Cell, changes: Iterable[Mapping[str, Any]]) -> list[Cell]:
    """The cells that these changes make of the cell; changes that cannot be are left out."""
    kept = (Change(settings, "") for settings in filter(question.keeps, changes))
    return [other for other, _ in cells_of(cell, kept).values() if other.key != cell.key]
