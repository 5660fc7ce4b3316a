"""A cell as the arguments of a training program: what :mod:`tools.jobs` does, backwards.

A module of the package proposes what asks the program for the cell. What it proposes is read back as the job
that it is, so that whatever the program would do otherwise is found by comparison, and named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.command_line.output import Output, Verbatim
from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import write_whole
from spbench.bench.measure import Narrowing, load_scenario, refusal
from spbench.bench.setting_values import VARIABLES
from spbench.bench.tools.jobs import FLAGS
from spbench.bench.tools.jobs.argument_tables import shown
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from spbench.impls import (
    FOLDED_AXES,
    MESH_AXES,
    PLUS,
    DecoderModel,
    ExpertOptions,
    LatentOptions,
    Nesting,
    all_dispatchers,
    model_preset,
    nesting,
    options_of_backend,
    ranks_along,
    set_options,
)

#: how the same layers, messages and states are made, which is a program's own affair where it has no argument
#: for it: kernels, units that are gathered at once, workspaces
OWN_WAYS = {
    *(f"model_options.{name}" for name in ("attention", "cross_entropy", "library", "linear_attention")),
    *(f"model_options.autotune_{name}" for name in ("copies", "flush_kib", "states_kib")),
    *(f"model_options.{name}" for name in ("padded_values", "expert_weighting_at", "recompute_keeps")),
    # a router that learns decides itself
    "model_options.routing",
    *(f"model_options.{name}" for name in ("loader_mask", "rms_norm", "separate_projections", "unfused")),
    *(f"training.{name}" for name in (*VARIABLES, "initialize", "wrap", "reshard_rest")),
    # DeepSpeed's ZeRO-3 sums gradients in a buffer
    "training.gradient_buffer_kib",
    *(f"training.{name}" for name in ("reduce_dtype", "reduce_at", "forward_prefetch", "backward_prefetch")),
}
_PREDICTION = {"mtp_layers", "mtp_weight"}
#: options that count only where another one is not 0, by that one
_WITH = {
    "experts": ExpertOptions.__dataclass_fields__.keys() - {"recompute_modules"},
    "kv_lora_rank": LatentOptions.__dataclass_fields__.keys() - _PREDICTION,
    "mtp_layers": _PREDICTION,
}
#: which steps are measured, and where the harness holds a batch: no program is asked for these
_OF_MEASUREMENT = {"steps", "moments", "batch_on_device"}


@dataclass(frozen=True)
class Flag:
    """One argument of a program.

    Attributes:
        argument: as the program calls it; a variable of the environment as ``NAME``.
        value: as its file or command line has it; "" for a switch.
        setting: of the cell, that it comes from: ``sizes.tp``.
    """

    argument: str
    value: str
    setting: str


@dataclass(frozen=True)
class Flags:
    """The arguments with which a program does what a cell says.

    Attributes:
        program: with the version whose arguments these are; what is so by default is left out.
        file: a name for ``content``.
        content: the file, or the script with the command.
        missing: settings of the cell that the program lacks, each with what it has in place of them.
        beside: lacking settings that do not change what is computed, in the same form.
        remarks: what is approximate, as :attr:`Job.remarks`.
    """

    program: str
    file: str
    lines: tuple[Flag, ...]
    content: str
    missing: tuple[str, ...] = ()
    beside: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the file must know: settings that it lacks though they matter little; remarks."""
        return (*self.beside, *self.remarks)

    def text(self) -> str:
        """The file or script, with the notes as comments. UserError where something is missing."""
        if self.missing:
            raise UserError(f"{self.program.split()[0]} has no {'; no '.join(self.missing)}")
        return self.content + "".join(f"# {line}\n" for line in self.notes)


def program_flags(kind: str, cell: Cell) -> Flags:
    """The arguments that ask a program for what a cell says. As :func:`read_job` reads them, they are a cell
    with all of its settings again, but for those in ``missing`` and ``beside``.

    Args:
        kind: a name of :data:`FLAGS`.

    Raises:
        UserError: there is no such kind, or the cell searches for its batch or length.
    """
    if kind not in FLAGS:
        raise UserError(f"there are no flags of {kind!r}{suggestion(kind, FLAGS.names())}")
    if cell.search is not None:
        raise UserError(f"{cell.key} searches for its {cell.search.quantity}; give one")
    proposed: Flags = FLAGS.load(kind)(cell)
    if proposed.missing:
        return proposed
    file = JobFile(Path(proposed.file), proposed.content.encode())
    job = read_job(kind, [file], cluster=cell.cluster)
    if refusal := job.refusal():
        return dataclasses.replace(proposed, missing=(f"such job: {refusal}",))
    missing, beside = [], []
    for path, ours, theirs in differences(cell, job.cell()):
        if path in OWN_WAYS:
            beside.append(f"{path}: {shown(theirs)} there, {shown(ours)} here")
        else:
            missing.append(f"{path} {shown(ours)} (it has {shown(theirs)})")
    return dataclasses.replace(
        proposed, missing=tuple(missing), beside=tuple(beside), remarks=tuple(job.remarks)
    )


def differences(cell: Cell, other: Cell) -> Iterator[tuple[str, Any, Any]]:
    """The settings that two cells do not share, as (path, value, other value): all that a program is asked
    for, every default written out. If the strategy, model or backend differs, its options
    are left out."""
    ours, theirs = _settings(cell), _settings(other)
    unlike = {path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path)}
    for path in {**ours, **theirs}:
        section, _, name = path.partition(".")
        owner = section.removesuffix("_options")
        if section == "training" and name not in TrainingOptions.model_fields:
            owner = "training.backend"
        if path in unlike and (owner == path or owner not in unlike):
            yield path, ours.get(path), theirs.get(path)


def several_ranks(cell: Cell) -> tuple[Nesting, dict[str, int]]:
    """The parts of a cell's strategy that have several ranks (else "single"), and the ranks along axes of
    more than one rank, in the order of the mesh, under the names that these parts give to the axes."""
    nested, sizes = nesting(cell.strategy), cell.sizes.by_axis
    parts = [
        (each.name, axes)
        for each, axes in zip(nested.classes, nested.axes_of, strict=True)
        if ranks_along(axes, sizes) > 1
    ]
    strategy = nesting(PLUS.join(name for name, _ in parts) or "single")
    named = {
        before: after
        for (_, axes), now in zip(parts, strategy.axes_of, strict=False)
        for before, after in zip(axes, now, strict=True)
    }
    return strategy, {named.get(axis, axis): n for axis, n in cell.mesh_sizes.items() if n > 1}


def _settings(cell: Cell) -> dict[str, Any]:
    strategy, mesh = several_ranks(cell)
    model = model_preset(*cell.model_arguments)
    settings: dict[str, Any] = {"model": type(model).__name__, "strategy": strategy.name}
    settings |= {f"sizes.{axis}": mesh.get(axis, 1) for axis in MESH_AXES}
    settings |= {f"sizes.{axis}": cell.sizes.by_axis.get(axis, 1) for axis in FOLDED_AXES}
    settings["mesh"] = [axis for axis in mesh if axis not in FOLDED_AXES]
    settings |= {name: getattr(cell, name) for name in ("batch", "seq_len", "precision", "learning")}
    options = strategy.options_type()
    of_parts = {field.name for field in fields(options)}
    given = {name: value for name, value in cell.strategy_options.items() if name in of_parts}
    settings |= _of("strategy_options", asdict(set_options(options, given, strategy.name)))
    of_model = asdict(cast(Any, model))
    if of_model.pop("checkpointing", False):
        of_model["recompute"] = "full"
    if isinstance(model, DecoderModel):
        of_model["max_positions"] = model.learned_positions
        of_model |= _as_they_count(model)
        of_model = {name: value for name, value in of_model.items() if name not in without_effect(model)}
    settings |= _of("model_options", of_model)
    training = cell.training
    settings |= _of(
        "training", training.model_dump(include={*TrainingOptions.model_fields} - _OF_MEASUREMENT)
    )
    if len({*(training.stage_layers or ())}) == 1:
        settings["training.stage_layers"] = None  # as many as the others
    backend = options_of_backend(training.backend, training.backend_options)
    return settings | _of("training", asdict(backend))


def facts_of(cell: Cell, model: Any) -> dict[str, Any]:
    """The facts that rules of a program's ``flags`` ask for: the cell's settings, by their paths, and as
    ``strategy`` the ``parts`` of its strategy that have several ranks."""
    strategy, mesh = several_ranks(cell)
    training, options = cell.training, {"learned_positions": None, **vars(model)}
    if isinstance(model, DecoderModel):
        options["learned_positions"] = model.learned_positions
    own = asdict(options_of_backend(training.backend, training.backend_options))
    micro = cell.shape[0] // (training.micro_batches * cell.sizes.dp)
    return {
        "strategy": strategy.name,
        "precision": cell.precision,
        "model": cell.model,
        "batch": cell.shape[0],
        "seq_len": cell.shape[1],
        "micro_batch": micro,
        "again": "full" if options.get("checkpointing") else options.get("recompute"),
        **_of("sizes", {axis: mesh.get(axis, 1) for axis in MESH_AXES}),
        **_of("strategy_options", dict(cell.strategy_options)),
        **_of("model_options", options),
        **_of("training", {**training.model_dump(include={*TrainingOptions.model_fields}), **own}),
    }


def without_effect(model: DecoderModel) -> set[str]:
    """Options of experts, latent attention, multi-token prediction and recomputation that a model without
    these has all the same."""
    unused = {name for switch, names in _WITH.items() if not getattr(model, switch) for name in names}
    if model.recompute != "selective":
        unused.add("recompute_modules")
    if all_dispatchers()[model.dispatcher].heeds_capacity:
        unused.add("node_ranks")
    return unused


def _as_they_count(model: DecoderModel) -> dict[str, Any]:
    """Options of experts of which several values say the same, as one."""
    layers = {"expert_pattern": [*map(model.has_experts, range(model.layers))], "dense_layers": 0}
    options = layers | {"expert_inner": model.expert_width}
    if model.router == "softmax" and (model.router_normalized or model.router_scores == "chosen"):
        # the softmax of the chosen logits is that of all, divided by the sum of the chosen
        options |= {"router_scores": "chosen", "router_normalized": False}
    return options


def _of(section: str, options: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in options.items()}


def written_flags(
    kind: str, scenario: str, narrowing: Narrowing, shape: Mapping[str, int | None], output: Path | None
) -> Output:
    """The outcome of `spbench flags`, whose options the arguments are.

    Raises:
        UserError: the scenario has no such cell or several, or the cell cannot be run or has no such flags.
    """
    cell = narrowing.only_cell("a command", load_scenario(scenario), shape)
    if reason := refusal(cell):
        raise UserError(f"{cell.key} cannot be run: {reason}")
    proposed = program_flags(kind, cell)
    text = proposed.text()
    content = {"text": text, **dataclasses.asdict(proposed)}
    records = [dataclasses.asdict(line) for line in proposed.lines]
    if output is None:
        return Output([Verbatim(text.removesuffix("\n"))], content, records)
    write_whole(output, text)
    return Output((), content, records, notes=proposed.notes, files=[output])
