"""The single changes of a cell that may save memory: of options, whose classes declare their savings
(:meth:`Options.savings`, :meth:`Model.savings`), of the backend, and of the ranks along axes. A cell's memory
switches are the changes that compute the same on the same ranks."""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from spbench import impls
from spbench.bench.cell import Cell, TrainingOptions, strategy_axes
from spbench.bench.command_line.record_forms import RecordForms
from spbench.bench.errors import UserError
from spbench.bench.measure import changed, is_uneven_text, load_cluster, plan

#: the changes that no option declares
_LISTED = RecordForms(Path(__file__).with_name("changes.yaml"))


@dataclass(frozen=True)
class Change:
    """A change of a cell.

    Attributes:
        settings: the new values by dotted name, for :func:`changed`.
        words: the effect of the change, for people.
        other_job: whether the changed cell trains another length or batch.
    """

    settings: Mapping[str, Any]
    words: str
    other_job: bool = False

    @property
    def divides(self) -> bool:
        """Whether the change takes another strategy, which divides samples."""
        return "strategy" in self.settings

    @property
    def of_ranks(self) -> bool:
        """Whether the change divides ranks or samples in another way."""
        divides = ("sizes.", "strategy", "training.micro_batches")
        return any(name.startswith(divides) for name in self.settings)

    @property
    def of_model(self) -> bool:
        """Whether the change is only in how the model computes."""
        return all(name.startswith("model_options.") for name in self.settings)


def cells_of(cell: Cell, changes: Iterable[Change]) -> dict[str, tuple[Cell, Change]]:
    """(changed cell, the first change that makes it) by the cell's key; changes that are impossible for
    ``cell`` are left out."""
    by_key: dict[str, tuple[Cell, Change]] = {}
    for change in changes:
        with suppress(UserError):
            other = changed(cell, change.settings) if change.settings else cell
            by_key.setdefault(other.key, (other, change))
    return by_key


def single_changes(cell: Cell) -> list[Change]:
    """The changes of a cell to try; those that probably cost least, judged without a trace, come first."""
    cheap = [*_listed("step", cell), *_listed("experts", cell), *savings_of(cell), *_of_strategies(cell)]
    return [*cheap, *_listed("on_host", cell), *_of_sizes(cell), *_listed("job", cell)]


def micro_batch_of(cell: Cell) -> int:
    """The samples that one replica has in one micro-batch."""
    return (cell.batch or 1) // (cell.sizes.dp * cell.training.micro_batches)


def _listed(group: str, cell: Cell) -> Iterator[Change]:
    """The changes of a group of changes.yaml that the cell can have."""
    model: Any = impls.model_preset(*cell.model_arguments)
    sizes, experts = cell.sizes.by_axis, getattr(model, "experts", 0)
    entries = _LISTED.record(
        group,
        cell,
        model=model,
        experts=experts,
        samples=micro_batch_of(cell),
        ep=sizes.get("ep", 1),
        etp=sizes.get("etp", 1),
        stage_ranks=impls.stage_ranks(sizes),
        drops=experts and impls.all_dispatchers()[model.dispatcher].heeds_capacity,
    )
    for each in entries.values():
        if each["when"]:
            yield Change(each["set"], each["words"], other_job=group == "job")


def dotted(section: str, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of a section of a cell, such as ``training``, by dotted name."""
    return {f"{section}.{name}": value for name, value in options.items()}


def savings_of(cell: Cell) -> list[Change]:
    """The changes that the options of a cell's model, strategy and backend declare, and other backends."""
    training = cell.training

    def changes(section: str, savings: Iterable[impls.Saving]) -> list[Change]:
        return [Change(dotted(section, each.options), each.words) for each in savings]

    model = impls.model_preset(*cell.model_arguments)
    declared = changes("model_options", model.savings(cell.sizes.pp * training.virtual_stages))
    nested = impls.nesting(cell.strategy)
    chosen = impls.set_options(nested.options_type(), cell.strategy_options, cell.strategy)
    for kind in dict.fromkeys(cls.options_type for cls in nested.classes):
        own: impls.Options = kind(**{each.name: getattr(chosen, each.name) for each in fields(kind)})
        declared += changes("strategy_options", own.savings())
    here = impls.backend_class(training.backend)
    options = impls.set_options(here.options_type(), training.backend_options, training.backend)
    return [*declared, *changes("training", options.savings()), *_of_backends(here, training)]


def _of_backends(here: type[impls.Backend], training: TrainingOptions) -> Iterator[Change]:
    """Changes to backends that share out more states than ``here``, the least first; none if the training
    sets options of its backend."""
    if here.shares_out is None or training.backend_options:
        return
    for name, other in sorted(impls.all_backends().items(), key=lambda item: len(item[1].shares_out or ())):
        if other.shares_out is not None and here.shares_out < other.shares_out:
            shared = ", ".join(sorted(other.shares_out)).replace("_", " ")
            yield Change({"training.backend": name}, f"shares out among replicas: {shared}")


def _of_strategies(cell: Cell) -> Iterator[Change]:
    """Changes of a cell whose strategy divides no samples: each usual strategy over two ranks, and over a
    node, in place of replicas."""
    if strategy_axes(cell.strategy):
        return
    dp = cell.sizes.dp
    node = min(dp, load_cluster(cell.cluster).devices_per_node)
    for n in sorted({ranks for ranks in (2, node) if ranks > 1 and dp % ranks == 0}, reverse=True):
        for name, strategy in usual_strategies().items():
            new = {strategy.axes[0]: n, "dp": dp // n}
            words = f"{strategy.summary}, over {n} ranks"
            settings = {"strategy": name, **_divided(cell, new)}
            with suppress(UserError):  # trying the change raises the same error
                settings |= usual_placement(changed(cell, settings), settings)
            yield Change(settings, words)


def usual_placement(cell: Cell, settings: Mapping[str, Any]) -> dict[str, str]:
    """The setting that places text zigzag, as programs do, if ``settings`` give no placement and contiguous
    chunks would give ranks unequal work under a causal mask; else no setting."""
    name = "strategy_options.placement"
    if cell.strategy != "single" and name not in settings:
        # the trace says why a cell cannot run
        with suppress(impls.Unsupported, ValueError):
            if is_uneven_text(cell):
                plan(changed(cell, {name: "zigzag"}))
                return {name: "zigzag"}
    return {}


def usual_strategies() -> dict[str, type[impls.Strategy]]:
    """The strategies marked as usual that divide one axis, by name."""
    return {
        name: cls for name, cls in sorted(impls.all_strategies().items()) if cls.usual and len(cls.axes) == 1
    }


def _of_sizes(cell: Cell) -> Iterator[Change]:
    """Changes that double the ranks along one axis and halve them along another."""
    sizes = cell.sizes.by_axis
    axes = [*strategy_axes(cell.strategy), "pp", "dp"]
    for taking in axes:
        for giving in reversed(axes):
            if giving == taking or sizes[giving] % 2:
                continue
            new = {taking: sizes[taking] * 2, giving: sizes[giving] // 2}
            yield Change(_divided(cell, new), f"twice the ranks along {taking}, half along {giving}")


def _divided(cell: Cell, sizes: Mapping[str, int]) -> dict[str, Any]:
    """The settings that give axes these numbers of ranks and keep the size of micro-batches."""
    settings: dict[str, Any] = {f"sizes.{axis}": n for axis, n in sizes.items()}
    micro_batches = (cell.batch or 1) // (sizes.get("dp", cell.sizes.dp) * max(1, micro_batch_of(cell)))
    if "dp" in sizes and micro_batches >= 1 and micro_batches != cell.training.micro_batches:
        settings["training.micro_batches"] = micro_batches
    return settings


#: the option whose values are united if several switches set it
MODULES = "model_options.recompute_modules"
RECOMPUTE, _BACKEND = "model_options.recompute", "training.backend"
#: options of recomputation in whole layers: the number of layers, and the choice of layers
_LAYERS, _METHOD = "model_options.recompute_layers", "model_options.recompute_method"
#: options that change computed numbers: the dtypes of sums and of states
_OF_NUMBERS = ("training.reduce_dtype", "training.state_dtype")


def switches(cell: Cell) -> list[Change]:
    """The memory switches of a cell: recomputation by module and by layers, checkpoints on the host, tiles,
    the optimizer's share on the host, and other declared savings that leave computed numbers unchanged."""
    apart = {_BACKEND, *_OF_NUMBERS}
    declared = [each for each in savings_of(cell) if not apart & {*each.settings}]
    # _by_module has recomputation for each module
    declared = [each for each in declared if each.settings != {RECOMPUTE: "selective"}]
    model = impls.model_preset(*cell.model_arguments)
    return [*declared, *_by_module(model), *_listed("on_host", cell)]


def share_of_layers(cell: Cell, change: Change) -> float | None:
    """The share of a stage's layers that a switch recomputes; None: the switch treats all layers alike."""
    if change.settings.get(_METHOD) != "block":
        return None
    stages = cell.sizes.pp * cell.training.virtual_stages
    layers = getattr(impls.model_preset(*cell.model_arguments), "layers", 0) // stages
    return change.settings[_LAYERS] / layers if layers else None


def _by_module(model: impls.Model) -> Iterator[Change]:
    """Changes that recompute one more module of the layers; none if whole layers are recomputed."""
    if getattr(model, "recompute", "full") not in ("none", "selective"):
        return
    has = _LISTED.record("modules", model=model, experts=getattr(model, "experts", 0))
    already = {*getattr(model, "recompute_modules", ())} if model.recompute == "selective" else set()  # type: ignore[attr-defined]
    for module in (name for name, there in has.items() if there and name not in already):
        settings = {RECOMPUTE: "selective", MODULES: sorted({module, *already})}
        yield Change(settings, f"backward runs {module} again")


def together(changes: Sequence[Change]) -> Change | None:
    """Changes as one change, which recomputes the modules of all; None: one is of another job or contains
    another change, or two divide the ranks or set one option to different values."""
    settings: dict[str, Any] = {}
    for change in changes:
        for name, value in change.settings.items():
            if name == MODULES and name in settings:
                value = sorted({*settings[name], *value})
            elif settings.setdefault(name, value) != value:
                return None
            settings[name] = value
    both = itertools.permutations(changes, 2)
    if any(a.other_job or _within(a, b) or (a.of_ranks and b.of_ranks) for a, b in both):
        return None
    return Change(settings, "; ".join(change.words for change in changes))


def as_one(several: Iterable[Sequence[Change]]) -> Iterator[Change]:
    """One change for each set of switches that go together; other sets are left out."""
    return filter(None, map(together, several))


def _within(a: Change, b: Change) -> bool:
    """Whether switch ``b`` contains all settings of switch ``a``."""
    rest: Mapping[str, Any] = {name: value for name, value in a.settings.items() if name != MODULES}
    modules = {*a.settings.get(MODULES, ())} <= {*b.settings.get(MODULES, ())}
    return modules and rest.items() <= b.settings.items()
