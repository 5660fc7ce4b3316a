"""Narrowing: which of a scenario's cells a user wants, and on which clusters, engines and ranks they run.

``strategies``, ``models``, ``world_sizes`` and ``where`` choose among the declared cells. ``clusters`` and
``engines`` replace the scenario's; so does a strategy or a model in a user's Python file. If no chosen cell
has a world size, each cell gets that size along the last axis of its strategy.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from os.path import lexists
from pathlib import Path
from typing import Any

from spbench.bench.cell import OWN_STEP, Cell, strategy_axes
from spbench.bench.errors import UserError, suggestion
from spbench.bench.measure.clusters.card_kernels import played_kernel, usual_kernel
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.scenarios.choices import cell_names, check_known, names, strategy_problem
from spbench.bench.measure.scenarios.expand import Asked, ignored, on_device, playing_rank
from spbench.bench.measure.scenarios.scenario import Scenario, changed, given
from spbench.bench.setting_values import names_a_file, read_model_file, size
from spbench.bench.yaml_files import dotted
from spbench.impls import model_preset, published_model

#: the text for the value of a setting that a cell leaves out
UNSET = "unset"

#: the setting of the attention kernel, and its default value
ATTENTION, NO_KERNEL = "model_options.attention", "flash"

#: how many cells a message names where more than one is left
_NAMED = 3


@dataclass(frozen=True)
class Narrowing:
    """The choices of the command line; an empty field leaves what the scenario declares.

    Attributes:
        variant: a variant's name, "all", or None for the first.
        device: the device of this machine on which engines with real tensors put them.
        rank: the rank to run, for engines that run only one.
        where: pairs of a setting's name and a value, as in :func:`settings_of`; for each name, a cell must
            have one of the values paired with that name.
        changes: pairs of the same form, which replace settings of the chosen cells; see :func:`changed`.
    """

    strategies: Sequence[str] = ()
    models: Sequence[str] = ()
    clusters: Sequence[str] = ()
    engines: Sequence[str] = ()
    world_sizes: Sequence[int] = ()
    variant: str | None = None
    device: Asked | None = None
    rank: int | None = None
    where: Sequence[tuple[str, str]] = ()
    changes: Sequence[tuple[str, str]] = ()

    def declared(self, scenario: Scenario) -> list[Cell]:
        """The scenario's own cells of the chosen variants, on the chosen clusters, engines and device.

        Raises:
            UserError: there is no such variant, cluster or engine, or a device cannot be used.
        """
        variants = list(scenario.cells)
        if self.variant == "all":
            chosen = variants
        elif self.variant is None:
            chosen = variants[:1]
        elif self.variant in variants and self.variant:
            chosen = [self.variant]
        elif variants == [""]:
            raise UserError(f"scenario {scenario.name} has no variants; leave out --variant")
        else:
            hint = suggestion(self.variant, [*variants, "all"])
            raise UserError(f"scenario {scenario.name} has no variant {self.variant!r}{hint}")
        for cluster in self.clusters:
            load_cluster(cluster)
        check_known("engine", self.engines)
        cells = [cell for name in chosen for cell in scenario.cells[name]]
        for field, values in (("cluster", self.clusters), ("engine", self.engines)):
            if values:
                cells = [cell.model_copy(update={field: value}) for cell in cells for value in values]
        if self.device is not None:
            cells = on_device(cells, self.device)
        return _distinct(cells if self.changes else _named_kernels(scenario, cells))

    def cells(self, scenario: Scenario, declared: Sequence[Cell] | None = None) -> list[Cell]:
        """The cells to run; ``declared`` is the result of :meth:`declared`, if it was computed before.

        Raises:
            UserError: an unknown name, an impossible rank or device, or no cell left; names the choices.
        """
        cells = [*(self.declared(scenario) if declared is None else declared)]
        strategies = [name for text in self.strategies for name in cell_names("strategy", text)]
        models = [name for text in self.models for name in cell_names("model", text)]
        packaged = [*names("model"), *{c.model for c in cells if c.model_config_json}]
        # files, and models on Hugging Face whose sizes are known
        configs = {
            n
            for n in {*models} - {*packaged}
            if published_model(n) is not None or (names_a_file(n) and lexists(Path(n).expanduser()))
        }
        check_known("model", [name for name in models if name not in configs], packaged)
        for name in strategies:
            if problem := strategy_problem(name):
                raise UserError(problem)
        of_files = {*strategies} - {*self.strategies} | {*models} - {*self.models} | configs
        for field, values in (("strategy", strategies), ("model", models)):
            has = list(dict.fromkeys(getattr(cell, field) for cell in cells))
            if values:
                others = [name for name in values if name in of_files - {*has}]
                replaced = [cell for name in others for cell in _with_other(cells, field, name)]
                cells = [cell for cell in cells if getattr(cell, field) in values] + replaced
            if not cells:
                wanted = f"{field} {' or '.join(values)}; it has: {', '.join(has)}"
                raise UserError(f"scenario {scenario.name} has no cell with {wanted}")
        if self.world_sizes:
            cells = [cell for size in self.world_sizes for cell in _of_size(cells, size)]
            if not cells:
                sizes = " or ".join(map(str, self.world_sizes))
                raise UserError(f"the strategies chosen run on one rank, not {sizes}; use --world-size 1")
        cells = _with_settings(cells, self.where)
        if self.changes:
            changes = given(self.changes)
            cells = [changed(cell, changes) for cell in cells]
            for path, message in ignored(cells):
                if (name := dotted(path)) in changes:
                    raise UserError(f"--set {name}: {message}")
        return _distinct(playing_rank([*_named_kernels(scenario, cells)], self.rank))

    def only_cell(self, what: str, scenario: Scenario, shape: Mapping[str, int | None]) -> Cell:
        """The one cell to run, with ``shape`` (batch, seq_len) where the scenario searches.

        Args:
            what: the result that the cell is needed for, for messages.

        Raises:
            UserError: no cell or more than one is left, or it searches for a quantity not in ``shape``.
        """
        cells = self.cells(scenario)
        for field, value in shape.items():
            if value is None:
                continue
            has = list(dict.fromkeys(str(getattr(cell, field)) for cell in cells))
            cells = [cell if getattr(cell, field) else cell.at(value) for cell in cells]
            cells = [cell for cell in cells if getattr(cell, field) == value]
            if not cells:
                raise UserError(f"no cell that is left has {field} {value}; they have: {', '.join(has)}")
        if len(cells) > 1:
            named = ", ".join(cell.key for cell in cells[:_NAMED])
            more = ", ..." if len(cells) > _NAMED else ""
            differ = ", ".join(
                f"{name} ({', '.join(has)})" for name, has in differing_settings(cells).items()
            )
            raise UserError(
                f"{len(cells)} cells are left, {what} takes one: {named}{more}; "
                f"they differ in {differ}: choose with --where SETTING=VALUE"
            )
        (cell,) = cells
        if cell.search is not None:
            quantity = cell.search.quantity
            raise UserError(
                f"{cell.key} searches for its {quantity}: give one, --{quantity.replace('_', '-')} N"
            )
        return cell


def _named_kernels(scenario: Scenario, cells: Iterable[Cell]) -> Iterator[Cell]:
    """The cells; those that name no kernel of attention get their card's usual kernel if a simulation would
    take another one, unless the scenario chooses the default of the cluster's file."""
    for cell in cells:
        device = load_cluster(cell.cluster).device
        same = usual_kernel(device) == played_kernel(device, NO_KERNEL)
        as_is = same or cell.strategy == OWN_STEP or scenario.document.unsaid_attention == "file"
        yield cell if as_is else with_usual_attention(cell)[0]


def with_usual_attention(cell: Cell) -> tuple[Cell, str]:
    """The cell with its card's usual attention kernel, and a remark on that kernel, if neither model nor
    options choose one. Otherwise, or if the model or the card has no such kernel, the same cell, and ""."""
    model, device = model_preset(*cell.model_arguments), load_cluster(cell.cluster).device
    has_kernel = is_dataclass(model) and "attention" in {each.name for each in fields(model)}
    kernel, half = usual_kernel(device), cell.precision in ("fp16", "bf16")
    # said, "flash" is FlashAttention, as in programs' arguments
    unsaid = "attention" not in cell.model_options and model.attention_kernel == NO_KERNEL
    if not (has_kernel and half and unsaid) or kernel == NO_KERNEL:
        return cell, ""
    told = f"attention: not said, so taken: {kernel}, usual on {device.name}; --set {ATTENTION}=..."
    told += " changes it"
    return cell.model_copy(update={"model_options": {**cell.model_options, "attention": kernel}}), told


def _with_other(cells: Sequence[Cell], field: str, name: str) -> Iterator[Cell]:
    """The cells with the model ``name``; or with the strategy ``name``, where it uses the same axes."""
    for cell in cells:
        if field == "model":
            config = read_model_file(name) if names_a_file(name) else None
            yield cell.model_copy(update={"model": name, "model_options": {}, "model_config_json": config})
        elif {*strategy_axes(cell.strategy)} == {*strategy_axes(name)}:
            yield cell.model_copy(update={"strategy": name, "strategy_options": {}})


def settings_of(cell: Cell) -> dict[str, str]:
    """The settings that define a cell, as text by dotted name (``batch``, ``sizes.tp``,
    ``model_options.layers``, ``mesh`` as "sp dp"), without settings that are None or an empty list."""
    return dict(_flattened(cell.model_dump(), ""))


def _flattened(content: Mapping[str, Any], above: str) -> Iterator[tuple[str, str]]:
    for name, value in content.items():
        if isinstance(value, Mapping):
            yield from _flattened(value, f"{above}{name}.")
        elif value is not None and value != []:
            yield f"{above}{name}", " ".join(map(str, value)) if isinstance(value, list) else str(value)


def differing_settings(cells: Sequence[Cell]) -> dict[str, list[str]]:
    """The settings that differ between cells, each with all of its values, which may include UNSET."""
    settings = [settings_of(cell) for cell in cells]
    names = dict.fromkeys(name for has in settings for name in has)
    values = {name: list(dict.fromkeys(has.get(name, UNSET) for has in settings)) for name in names}
    return {name: several for name, several in values.items() if len(several) > 1}


def _with_settings(cells: list[Cell], where: Sequence[tuple[str, str]]) -> list[Cell]:
    wanted: dict[str, list[str]] = {}
    for name, value in where:
        count = name in ("batch", "seq_len")
        wanted.setdefault(name, []).append(str(size(value) or value) if count else value)
    for name, values in wanted.items():
        settings = [settings_of(cell) for cell in cells]
        names = list(dict.fromkeys(names for has in settings for names in has))
        check_known("setting", [name], names)
        has = [of_cell.get(name, UNSET) for of_cell in settings]
        cells = [cell for cell, value in zip(cells, has, strict=True) if value in values]
        if not cells:
            there = ", ".join(dict.fromkeys(has))
            raise UserError(f"no cell that is left has {name} {' or '.join(values)}; they have: {there}")
    return cells


def _of_size(cells: Sequence[Cell], size: int) -> list[Cell]:
    """The cells of that world size; if there are none, all cells with their ranks changed to that size."""
    if size < 1:
        raise UserError(f"--world-size {size}: must be at least 1")
    declared = [cell for cell in cells if cell.sizes.world == size]
    if declared:
        return declared
    resized = []
    for cell in cells:
        if axes := strategy_axes(cell.strategy):
            around = cell.sizes.world // cell.sizes.by_axis[axes[-1]]
            if size % around:
                others = cell.sizes.model_copy(update={axes[-1]: 1})
                raise UserError(
                    f"--world-size {size}: not divisible by the {around} ranks {others} of {cell.key}; "
                    f"use {max(1, size // around) * around}"
                )
            sizes = cell.sizes.model_copy(update={axes[-1]: size // around})
            # an axis that the order leaves out varies fastest, as in the default order
            mesh = cell.mesh if cell.mesh is None or axes[-1] in cell.mesh else [*cell.mesh, axes[-1]]
            resized.append(cell.model_copy(update={"sizes": sizes, "mesh": mesh}))
    return resized


def _distinct(cells: Iterable[Cell]) -> list[Cell]:
    return list({cell.key: cell for cell in cells}.values())
