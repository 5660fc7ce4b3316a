"""The arguments by which a training program runs a cell: the way back from scenarios to jobs.

A module to_NAME of this package proposes the arguments. :func:`program_flags` reads the proposal as a job and
compares the job's cell with the cell that was asked for, so that each difference is named.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, cast

from spbench import impls
from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.command_line.output import Output, Verbatim
from spbench.bench.errors import UserError, refuse_unknown
from spbench.bench.files import write_whole
from spbench.bench.measure import Narrowing, load_scenario, refusal
from spbench.bench.tools.jobs import FLAGS
from spbench.bench.tools.jobs.argument_tables import shown, table_content
from spbench.bench.tools.jobs.job_files import JobFile, read_job

#: settings on how a program computes the same layers, messages and states (kernels, units that are gathered
#: at once, workspaces): a program without an argument for such a setting still runs the cell in its own way
OWN_WAYS = frozenset[str](table_content("own_ways")["settings"].split())
_PREDICTION = {"mtp_layers", "mtp_weight"}
#: options that count only if another option is not 0, by that other option
_WITH = {
    "experts": impls.ExpertOptions.__dataclass_fields__.keys() - {"recompute_modules"},
    "kv_lora_rank": impls.LatentOptions.__dataclass_fields__.keys() - _PREDICTION,
    "mtp_layers": _PREDICTION,
}
#: settings of the measurement (its steps, and where the batch is), for which no program has an argument
_OF_MEASUREMENT = {"steps", "moments", "batch_on_device"}


@dataclass(frozen=True)
class Flag:
    """One argument of a program.

    Attributes:
        argument: the program's name of the argument, or the NAME of a variable of the environment.
        value: the value in the program's file or command line; "" for a switch.
        setting: the cell's setting from which the argument comes, such as ``sizes.tp``.
    """

    argument: str
    value: str
    setting: str


@dataclass(frozen=True)
class Flags:
    """The arguments with which a program runs a cell.

    Attributes:
        program: the program's name, with the version whose arguments these are.
        file: the name of the file that has the ``content``.
        lines: the arguments; arguments at their default are left out.
        content: the text of the program's file, or of the script with the command.
        missing: settings of the cell that the program lacks, each with the program's own value.
        beside: settings in :data:`OWN_WAYS` that the program lacks, in the same form.
        remarks: approximations of the job, as :attr:`Job.remarks`.
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
        """The lines for a reader of the file: settings that the program computes in its own way; remarks."""
        return (*self.beside, *self.remarks)

    def text(self) -> str:
        """The file's content, and then the notes as comments. UserError if the program lacks a setting."""
        if self.missing:
            raise UserError(f"{self.program.split()[0]} has no {'; no '.join(self.missing)}")
        return self.content + "".join(f"# {line}\n" for line in self.notes)


def program_flags(kind: str, cell: Cell) -> Flags:
    """The arguments with which a program runs a cell. :func:`read_job` makes the same cell of the arguments,
    apart from the settings in ``missing`` and ``beside``.

    Args:
        kind: a name of :data:`FLAGS`.

    Raises:
        UserError: there is no such kind, or the cell searches for its batch or length.
    """
    refuse_unknown("there are no flags of", kind, FLAGS.names())
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
        if path in OWN_WAYS or theirs == f"deepspeed_{ours}":
            beside.append(f"{path}: {shown(theirs)} there, {shown(ours)} here")
        else:
            missing.append(f"{path} {shown(ours)} (it has {shown(theirs)})")
    return dataclasses.replace(
        proposed, missing=tuple(missing), beside=tuple(beside), remarks=tuple(job.remarks)
    )


def differences(cell: Cell, other: Cell) -> Iterator[tuple[str, Any, Any]]:
    """The settings in which two cells differ, as (path, value, other value), with every default written out.
    If the strategy, model or backend differs, its options are left out."""
    ours, theirs = _settings(cell), _settings(other)
    unlike = {path for path in {**ours, **theirs} if ours.get(path) != theirs.get(path)}
    for path in {**ours, **theirs}:
        section, _, name = path.partition(".")
        owner = section.removesuffix("_options")
        if section == "training" and name not in TrainingOptions.model_fields:
            owner = "training.backend"
        if path in unlike and (owner == path or owner not in unlike):
            yield path, ours.get(path), theirs.get(path)


def several_ranks(cell: Cell) -> tuple[impls.Nesting, dict[str, int]]:
    """The parts of a cell's strategy that have several ranks (if none has: "single"), and the number of ranks
    of each mesh axis with several, in the mesh's order, by the names that these parts give to the axes."""
    nested, sizes = impls.nesting(cell.strategy), cell.sizes.by_axis
    parts = [
        (each.name, axes)
        for each, axes in zip(nested.classes, nested.axes_of, strict=True)
        if impls.ranks_along(axes, sizes) > 1
    ]
    strategy = impls.nesting(impls.PLUS.join(name for name, _ in parts) or "single")
    named = {
        before: after
        for (_, axes), now in zip(parts, strategy.axes_of, strict=False)
        for before, after in zip(axes, now, strict=True)
    }
    return strategy, {named.get(axis, axis): n for axis, n in cell.mesh_sizes.items() if n > 1}


def _settings(cell: Cell) -> dict[str, Any]:
    strategy, mesh = several_ranks(cell)
    model = impls.model_preset(*cell.model_arguments)
    settings: dict[str, Any] = {"model": type(model).__name__, "strategy": strategy.name}
    settings |= {f"sizes.{axis}": mesh.get(axis, 1) for axis in impls.MESH_AXES}
    settings |= {f"sizes.{axis}": cell.sizes.by_axis.get(axis, 1) for axis in impls.FOLDED_AXES}
    settings["mesh"] = [axis for axis in mesh if axis not in impls.FOLDED_AXES]
    settings |= {name: getattr(cell, name) for name in ("batch", "seq_len", "precision", "learning")}
    options = strategy.options_type()
    of_parts = {field.name for field in fields(options)}
    given = {name: value for name, value in cell.strategy_options.items() if name in of_parts}
    settings |= _of("strategy_options", asdict(impls.set_options(options, given, strategy.name)))
    of_model = asdict(cast(Any, model))
    if of_model.pop("checkpointing", False):
        of_model["recompute"] = "full"
    if isinstance(model, impls.DecoderModel):
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
    backend = impls.options_of_backend(training.backend, training.backend_options)
    return settings | _of("training", asdict(backend))


def facts_of(cell: Cell, model: Any) -> dict[str, Any]:
    """The facts for the rules in the section ``flags`` of a program's table: the cell's settings by path; the
    fact ``strategy`` has only the parts of the strategy that have several ranks."""
    strategy, mesh = several_ranks(cell)
    training, options = cell.training, {"learned_positions": None, **vars(model)}
    if isinstance(model, impls.DecoderModel):
        options["learned_positions"] = model.learned_positions
    own = asdict(impls.options_of_backend(training.backend, training.backend_options))
    micro = cell.shape[0] // (training.micro_batches * cell.sizes.dp)
    return {
        "strategy": strategy.name,
        "precision": cell.precision,
        "model": cell.model,
        "batch": cell.shape[0],
        "seq_len": cell.shape[1],
        "micro_batch": micro,
        "again": "full" if options.get("checkpointing") else options.get("recompute"),
        **_of("sizes", {axis: mesh.get(axis, 1) for axis in impls.MESH_AXES}),
        **_of("strategy_options", dict(cell.strategy_options)),
        **_of("model_options", options),
        **_of("training", {**training.model_dump(include={*TrainingOptions.model_fields}), **own}),
    }


def without_effect(model: impls.DecoderModel) -> set[str]:
    """The names of a model's options that have no effect, because the model has no experts, latent attention,
    multi-token prediction or selective recomputation."""
    unused = {name for switch, names in _WITH.items() if not getattr(model, switch) for name in names}
    if model.recompute != "selective":
        unused.add("recompute_modules")
    if impls.all_dispatchers()[model.dispatcher].heeds_capacity:
        unused.add("node_ranks")
    return unused


def _as_they_count(model: impls.DecoderModel) -> dict[str, Any]:
    """The options of experts whose values may mean the same, by name, with one value for each meaning."""
    layers = {"expert_pattern": [*map(model.has_experts, range(model.layers))], "dense_layers": 0}
    options = layers | {"expert_inner": model.expert_width}
    if model.router == "softmax" and (model.router_normalized or model.router_scores == "chosen"):
        # the softmax of the chosen logits equals the softmax of all logits over its sum at the chosen ones
        options |= {"router_scores": "chosen", "router_normalized": False}
    return options


def _of(section: str, options: dict[str, Any]) -> dict[str, Any]:
    return {f"{section}.{name}": value for name, value in options.items()}


def written_flags(
    kind: str, scenario: str, narrowing: Narrowing, shape: Mapping[str, int | None], output: Path | None
) -> Output:
    """The output of `spbench flags`; the arguments are the options of the command.

    Raises:
        UserError: the options choose no cell or several, or the cell cannot be run, or has no such flags.
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
