"""The layouts that a search considers: strategies, single and nested, and the ranks along each mesh axis."""

import itertools
import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from spbench import impls
from spbench.bench.cell import Sizes
from spbench.bench.errors import UserError, suggestion
from spbench.bench.tools.choose.question import Question

#: the order of the mesh: tensor parallel ranks next to each other, since they send most
ORDER = ("dp", "pp", "cp", "sp", "tp")
#: the most strategies that are nested in each other; a mesh has axes for no more
_DEEPEST = 3
#: positions of a micro-batch on a rank from which larger micro-batches make kernels no faster
_MANY_POSITIONS = 16384
#: how often the size of a micro-batch is doubled at the most
_DOUBLINGS = 4
#: how many runs of layers (virtual stages) a rank of a pipeline may hold
_VIRTUAL_STAGES = (1, 2)


@dataclass(frozen=True)
class Way:
    """A way to divide a sample: a strategy (single or nested) and 2 or more ranks along each of its axes."""

    strategy: str
    axes: Mapping[str, int]

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.strategy, *self.axes.items()))

    @cached_property
    def ranks(self) -> int:
        """Ranks that share a sample."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        return f"{self.strategy} {impls.spelled(self.axes)}"


class Fold(NamedTuple):
    """How experts lie on the ranks of a stage: ``ep`` ranks share them out, and ``etp`` ranks split each."""

    ep: int
    etp: int


@dataclass(frozen=True)
class Layout:
    """A way to divide a sample, with the replicas (``dp``) and stages (``pp``) around it.

    Attributes:
        micro_batch: samples of a micro-batch.
        fold: how experts lie on ranks; None: the model has no experts.
        stage_layers: layers of each stage; empty: all stages have equally many.
    """

    way: Way
    dp: int
    pp: int
    micro_batch: int
    virtual_stages: int = 1
    fold: Fold | None = None
    stage_layers: tuple[int, ...] = ()

    @cached_property
    def sizes(self) -> dict[str, int]:
        """Ranks along each axis."""
        folded = {} if self.fold is None else {k: n for k, n in self.fold._asdict().items() if n > 1}
        return {"dp": self.dp, "pp": self.pp, **self.way.axes, **folded}

    @property
    def stage_ranks(self) -> int:
        """The number of ranks of one pipeline stage."""
        return self.dp * self.way.ranks


def folds_anew(sizes: Mapping[str, int]) -> bool:
    """Whether experts are divided over other groups of ranks than the rest of the model: ``etp`` is not the
    number of ranks along tp, or ``ep`` does not divide the replicas."""
    ep, etp, tp, dp = (sizes.get(axis, 1) for axis in ("ep", "etp", "tp", "dp"))
    return etp != tp or dp % ep != 0


def switch_of(option: str) -> str:
    """The memory switch that an option of a model belongs to: "recompute" for recompute_layers and
    recompute_method too, else the option itself."""
    return "recompute" if option.startswith("recompute") else option


def things_to_set(strategy: str, model: Iterable[str], training: Mapping[str, Any]) -> int:
    """The number of strategies plus memory switches of a layout. ``model``: names of set options of the
    model; in ``training`` only states on the host count as a switch."""
    strategies = 0 if strategy == "single" else len(strategy.split(impls.PLUS))
    return strategies + len({*map(switch_of, model)}) + ("host" in training.values())


#: why layouts are impossible, by the layout in words; only reasons that need no trace
Refused = dict[str, str]


def divisors(n: int) -> list[int]:
    """The divisors of n, in ascending order."""
    return [d for d in range(1, n + 1) if n % d == 0]


def searched_strategies(question: Question) -> list[impls.Nesting]:
    """The strategies that a question allows, single and nested, without peers, which are the same strategies
    in other packages. If the question names a program: only those that the program has."""
    own = [
        name for name, cls in impls.all_strategies().items() if cls.searched and settings_of(question, name)
    ]
    searched = []
    for depth in range(1, _DEEPEST + 1):
        for parts in itertools.permutations(own, depth):
            if not question.allows(impls.PLUS.join(parts)):
                continue
            try:
                nested = impls.nesting(impls.PLUS.join(parts))
            except ValueError:
                continue
            if settings_of(question, nested.name):
                searched.append(nested)
    return searched


def ways(question: Question) -> Iterator[Way]:
    """The ways to divide a sample over a number of ranks that divides the question's GPUs."""
    for strategy in searched_strategies(question):
        for axes in _meshes(strategy.axes, question.gpus, question.fixed):
            yield Way(strategy.name, axes)


def _meshes(axes: tuple[str, ...], ranks: int, fixed: Mapping[str, int]) -> Iterator[dict[str, int]]:
    """Each choice of 2 or more ranks along every axis whose product divides ``ranks``; it keeps ``fixed``."""
    around = ("dp", "pp", "micro_batch", *impls.FOLDED_AXES)
    if any(n > 1 and name not in (*axes, *around) for name, n in fixed.items()):
        return
    if not axes:
        yield {}
        return
    axis, *others = axes
    for n in divisors(ranks)[1:]:
        if axis not in fixed or n == fixed[axis]:
            own = {k: v for k, v in fixed.items() if k != axis}
            for rest in _meshes(tuple(others), ranks // n, own):
                yield {axis: n, **rest}


def layouts(question: Question, way: Way, layers: int, refused: Refused) -> Iterator[Layout]:
    """The possible layouts of a way: each choice of replicas, stages, virtual stages and micro-batch size.

    Args:
        layers: how many the model has.
        refused: takes the reasons why other layouts are impossible.
    """
    batch, length = question.cell.shape
    around, fixed = question.gpus // way.ranks, question.fixed
    given = impls.spelled({axis: fixed.get(axis, 1) for axis in impls.FOLDED_AXES}).strip("1·")
    for pp in [1] if question.forward_only else divisors(around):
        dp = around // pp
        if fixed.get("pp", pp) != pp or fixed.get("dp", dp) != dp:
            continue
        what = f"{way} dp{dp} pp{pp}"
        sizes = unequal_stages(question, layers, pp)
        if batch % dp:
            refused.setdefault(what, f"{batch} sequences are no whole number for {dp} replicas")
        elif sizes is None:
            refused.setdefault(what, f"{layers} layers are no whole number for {pp} stages")
        elif given and not folded(question, Layout(way, dp, pp, 1)):
            refused.setdefault(
                what, f"{given} fits neither the experts nor the {dp * way.ranks} ranks of a stage"
            )
        else:
            samples_of = _micro_batches(question, way, batch // dp, length)
            for samples in [batch // dp] if question.forward_only else samples_of:
                for virtual in _VIRTUAL_STAGES:
                    parts = batch // (dp * samples)
                    if virtual == 1 or (pp > 1 and layers % (pp * virtual) == 0 and parts % pp == 0):
                        yield Layout(way, dp, pp, samples, virtual, None, sizes)


def unequal_stages(question: Question, layers: int, stages: int) -> tuple[int, ...] | None:
    """The layers of each stage if the stages do not divide the layers, as in Megatron-LM's pipeline layouts:
    the embedding, the loss and each head that predicts a further token count as a layer, and the first inner
    stages get the remainder. Empty: the stages divide the layers. None: no such division exists, or kinds of
    layers repeat."""
    if layers % stages == 0:
        return ()
    last = 1 + getattr(question.model, "mtp_layers", 0)
    each, more = divmod(layers + 1 + last, stages)
    if each <= last or question.model.period > 1:
        return None
    between = [each + (n < more) for n in range(stages - 2)]
    first = each - 1 + (more > stages - 2)
    return (first, *between, layers - first - sum(between))


def folded(question: Question, layout: Layout) -> list[Layout]:
    """A layout with each possible fold of its experts: ``ep`` divides the experts and the ranks of a stage,
    and ``etp`` is 1 or the ranks along tp. A model without experts has only the layout itself."""
    experts: int = getattr(question.model, "experts", 0)
    if not experts:
        return [layout]
    fixed, width = question.fixed, question.model.expert_width  # type: ignore[attr-defined]
    own = layout.way, layout.dp, layout.pp, layout.micro_batch, layout.virtual_stages
    return [
        Layout(*own, Fold(ep, etp), layout.stage_layers)
        for etp in dict.fromkeys((1, layout.way.axes.get("tp", 1)))
        if layout.stage_ranks % etp == 0 and width % etp == 0 and fixed.get("etp", etp) == etp
        for ep in divisors(math.gcd(experts, layout.stage_ranks // etp))
        if fixed.get("ep", ep) == ep
    ]


def other_folds(sizes: Mapping[str, int]) -> Iterator[dict[str, Any]]:
    """Settings of other folds: half and twice the ranks along ep, and the other choice of etp (1 or tp)."""
    ep, etp, tp = (sizes.get(axis, 1) for axis in ("ep", "etp", "tp"))
    for other in (ep // 2, 2 * ep):
        if other:
            yield {"sizes.ep": other}
    if tp > 1:
        yield {"sizes.etp": tp if etp == 1 else 1, "sizes.ep": max(1, ep * etp // (tp if etp == 1 else 1))}


def _micro_batches(question: Question, way: Way, samples: int, length: int) -> Iterator[int]:
    """The samples of a replica's micro-batch that are tried: doubled until kernels become no faster."""
    if "micro_batch" in question.fixed:
        if samples % question.fixed["micro_batch"] == 0:
            yield question.fixed["micro_batch"]
        return
    for n in (2**k for k in range(_DOUBLINGS + 1)):
        if n == 1 or (samples % n == 0 and n * length // way.ranks <= _MANY_POSITIONS):
            yield n


def strategy_settings(strategy: str, heeded: Collection[str] = ()) -> list[dict[str, Any]]:
    """The options of a strategy that a search tries: first the most promising of each nested class, then with
    one class's other options. ``heeded``: the argument of :meth:`Options.searched`."""
    kinds = dict.fromkeys(cls.options_type for cls in impls.nesting(strategy).classes)
    searched = [[*kind.searched(heeded)] for kind in kinds]
    if not all(searched):
        return []
    first = {name: value for kind in searched for name, value in kind[0].items()}
    others = [{**first, **settings} for kind in searched for settings in kind[1:]]
    return [first, *others]


def settings_of(question: Question, strategy: str) -> list[dict[str, Any]]:
    """The options of :func:`strategy_settings`, or only those that the question's program can run."""
    settings = strategy_settings(strategy, question.heeded)
    if not question.program:
        return settings
    sizes = Sizes(dp=2, **dict.fromkeys(impls.nesting(strategy).axes, 2))
    cells = [question.on_replicas(strategy=strategy, sizes=sizes, strategy_options=each) for each in settings]
    return [each for each, cell in zip(settings, cells, strict=True) if question.runs(cell, "strategy")]


def backend_settings(question: Question) -> list[dict[str, Any]]:
    """The settings of ``training`` for each searched backend and each of its own choices; for an inference no
    settings, once. Options that the question fixes keep only settings with that value; a backend without the
    option has others' default.

    Raises:
        UserError: no searched backend has a fixed option, or none has it with the fixed value.
    """
    if question.forward_only:
        return [{}]
    searched = {name: cls for name, cls in sorted(impls.all_backends().items()) if cls.searched}
    defaults = {name: asdict(cls.options_type()) for name, cls in searched.items()}
    of_any = {name: value for each in defaults.values() for name, value in each.items()}
    settings = [
        each
        for name, cls in searched.items()
        if question.allows_backend(name)
        for own in cls.options_type.searched()
        if (each := question.own.training(name, own) if question.own else {"backend": name, **own})
        and question.runs(question.on_replicas(training=each), "training")
    ]
    for name, value in question.options.items():
        section, _, option = name.partition(".")
        if section != "training":
            continue
        if option not in of_any:
            raise UserError(f"--fixed {name}: no backend that is searched has it{suggestion(option, of_any)}")
        has = [{**of_any, **defaults[each["backend"]], **each}[option] for each in settings]
        settings = [each for each, own in zip(settings, has, strict=True) if own == value]
        if not settings:
            there = ", ".join(dict.fromkeys(map(str, has)))
            raise UserError(f"--fixed {name}={value}: no backend is searched with it; they have {there}")
    return settings


def of_one_axis(mesh: Mapping[str, int]) -> dict[str, int]:
    """A mesh with tp in place of all axes that divide a sample; groups along folded axes stay the same."""
    ranks = mesh["cp"] * mesh["sp"] * mesh["tp"]
    return {"dp": mesh["dp"], "pp": mesh["pp"], "cp": 1, "sp": 1, "tp": ranks}


def groups_of(axes: tuple[str, ...], mesh: Mapping[str, int]) -> np.ndarray:
    """The ranks of every group along these axes, [groups, ranks]; those of folded axes are in one stage."""
    ranks: np.ndarray = np.arange(impls.ranks_along(ORDER, mesh))
    order = [*ORDER]
    if impls.folds(axes):
        ranks = ranks.reshape(mesh["dp"], mesh["pp"], -1).swapaxes(0, 1)  # by stage
        order = ["pp", *impls.EXPERT_AXES]
    ranks = ranks.reshape([mesh[axis] for axis in order])
    last = [order.index(axis) for axis in axes]
    return np.moveaxis(ranks, last, range(-len(last), 0)).reshape(-1, np.prod([mesh[a] for a in axes]))
