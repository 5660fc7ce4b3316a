"""The cells that `spbench fit` examines, from a scenario, from a job's files, or from a model with sizes; and
the lines that list its defaults, each with the flag that sets another value."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from spbench.bench import measure
from spbench.bench.cell import Cell, requirements, strategy_axes
from spbench.bench.errors import UserError
from spbench.bench.tools.choose.asked import Asked, ask_for, kind_of
from spbench.bench.tools.choose.fit_verdict import TABLES
from spbench.bench.tools.choose.suggestions import micro_batch_of, usual_placement, usual_strategies
from spbench.bench.tools.jobs.job import beyond_positions
from spbench.bench.tools.jobs.job_files import read_job
from spbench.impls import MESH_AXES, model_preset, nesting, set_options, unused_axes

#: training options of a cell made from a model's name: two steps, because Adam makes its moments in the first
_TRAINING = {"moments": "later", "steps": 2}
_PRECISION = "bf16"
#: the most strategies that one error message names
_NAMED = 3


@dataclass(frozen=True)
class Subject:
    """The cells that `spbench fit` examines on virtual ranks.

    Attributes:
        remarks: lines of text on how the cells were made.
        job: the kind of job that the cells were read from, such as "megatron"; "": no job.
        said: dotted names of the settings that the user or the job gave; all others have defaults.
        name: the first file of a job, shown in place of the model's name; "": the model's name is shown.
    """

    cells: list[Cell]
    remarks: Sequence[str] = ()
    job: str = ""
    said: Collection[str] = ()
    name: str = ""

    def shown(self, cell: Cell) -> str:
        """The key of a cell, in which :attr:`name` replaces the model's name."""
        return cell.key.replace(cell.model, self.name or cell.model, 1)


def subject(words: Sequence[str], asked: Asked) -> Subject:
    """The cells that command-line words name: a scenario (name or file), files of a job, or a model.

    Raises:
        UserError: the words name nothing, an option is missing or invalid, or a card has no memory limit.
    """
    first, kind = words[0], kind_of(words)
    if asked.given and kind != "job":
        raise UserError(f"--given is for the files of a job, which the {kind} {first} is not; leave it out")
    for flag in ("--where", "--variant"):
        if kind != "scenario" and getattr(asked, flag.removeprefix("--")):
            raise UserError(f"{flag} chooses among cells of a scenario, which {first} is not; leave it out")
    settings, remarks, program = {**asked.settings}, list[str](), ""
    both = {"strategy": asked.strategy, "training.micro_batches": asked.micro_batch}
    said = {*settings, *(name for name, value in both.items() if value)}
    if kind == "scenario":
        narrowing = measure.Narrowing(
            strategies=() if asked.strategy is None else (asked.strategy,),
            clusters=() if asked.cluster is None else (asked.cluster,),
            engines=("virtual",),
            world_sizes=() if asked.gpus is None else (asked.gpus,),
            variant=asked.variant,
            where=asked.where,
        )
        cells = narrowing.cells(measure.load_scenario(first))
        said |= {*TABLES.forms["taken"]}  # a scenario's defaults count as given
    elif kind == "model":
        cells, remarks, settings = _of_model(first, asked)
    else:
        job = read_job(None, words, gpus=asked.gpus, cluster=asked.cluster, environment=asked.given)
        cells, remarks, program = [job.cell()], [*job.remarks], job.kind
        said |= {setting.path for setting in job.settings}
        # a job that gives a batch, but no accumulation, has one micro-batch
        if any(each.path == "batch" and each.given for each in job.settings):
            said.add("training.micro_batches")
        if asked.strategy is not None:
            settings["strategy"] = asked.strategy
    changed_cells = [measure.changed(cell, settings) if settings else cell for cell in cells]
    # cells that differed only in a setting that is changed are equal now: one of them is enough
    distinct = {cell.key: cell for cell in changed_cells}.values()
    checked_cells = [_checked(cell, asked.micro_batch) for cell in distinct]
    folder = Path(first).parent if kind == "scenario" else Path()
    remarks += filter(None, dict.fromkeys(beyond_positions(cell, folder) for cell in checked_cells))
    return Subject(checked_cells, remarks, program, said, Path(first).name if kind == "job" else "")


def _made(group: Mapping[str, Any]) -> Cell:
    """The one cell that a group of a scenario expands to; raises a UserError for an invalid group."""
    try:
        (cell,) = measure.expand({}, [dict(group)], {}, "", Path())
    except measure.Problem as problem:
        if isinstance(problem.__cause__, UserError):  # the error names its file itself
            raise problem.__cause__ from problem
        raise UserError(f"{group['model']}: {str(problem).removeprefix('groups[0].')}") from problem
    return cell


def _check_axes(group: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raises a UserError if ranks lie along an axis that the strategy does not divide; the error names
    strategies that divide this axis and can run the model."""
    strategy = group["strategy"]
    if strategy not in measure.names("strategy"):
        return  # unknown or nested strategies: making the cell raises the error
    for axis in unused_axes(strategy_axes(strategy), sizes):
        usual = [name for name, each in usual_strategies().items() if each.axes[0] == axis]
        every = [
            each
            for each in measure.names("strategy")
            if strategy_axes(each) == [axis] and not requirements(each)
        ]
        able = (
            each
            for each in dict.fromkeys([*usual, *every])
            if not measure.refusal(
                _made({**group, "strategy": each, "sizes": {axis: sizes[axis], "dp": sizes["dp"]}})
            )
        )
        give = f"--strategy {' or '.join(islice(able, _NAMED))}"
        if not every:
            around = "--strategy ulysses+ring_attention --sp N"
            give = f"two strategies around each other, as {around}, or --sp for --{axis}"
        who = "nothing divides" if strategy == "single" else f"the strategy {strategy} does not divide"
        raise UserError(f"--{axis} {sizes[axis]}: {who} a sample along {axis}; give {give}")


def _of_model(model: str, asked: Asked) -> tuple[list[Cell], list[str], dict[str, Any]]:
    """The cell of a model in a list, remarks on its kernel, and the settings still to be applied."""
    settings = {**asked.settings}
    ask_for({"--cluster NAME": asked.cluster, "--seq-len N": settings.get("seq_len")}, model)
    sizes = {axis: settings.pop(f"sizes.{axis}") for axis in MESH_AXES if f"sizes.{axis}" in settings}
    for axis, ranks in sizes.items():
        if not isinstance(ranks, int) or ranks < 1:
            raise UserError(f"--set sizes.{axis}: must be a whole number of ranks, not {ranks!r}")
    around = math.prod(sizes.values())
    gpus = around if asked.gpus is None else asked.gpus
    if gpus % around or ("dp" in sizes and gpus != around):
        given = " x ".join(f"{axis} {ranks}" for axis, ranks in sizes.items())
        multiple = "" if "dp" in sizes else f", and {gpus} no multiple of that"
        raise UserError(f"--gpus {gpus}: {given} is {around} ranks{multiple}; leave one of them out")
    sizes.setdefault("dp", gpus // around)
    # what programs take by default: over several ranks fully sharded states (torchtitan, TRL, FSDP 2 of
    # accelerate), but with stages of a pipeline the buffers of Megatron-LM, which has stages
    backend = "megatron" if sizes.get("pp", 1) > 1 else "zero3" if gpus > 1 else "ddp"
    group: dict[str, Any] = {
        "model": model,
        "strategy": asked.strategy or settings.pop("strategy", "single"),
        "cluster": asked.cluster,
        "precision": _PRECISION,
        "sizes": sizes,
        "batch": settings.pop("batch", (asked.micro_batch or 1) * sizes["dp"]),
        "seq_len": settings.pop("seq_len"),
        "training": {"backend": backend, **_TRAINING},
    }
    _check_axes(group, sizes)
    cell = _made(group)
    cell = measure.changed(cell, usual_placement(cell, settings))
    remarks = []
    if measure.ATTENTION not in asked.settings:
        cell, kernel = measure.with_usual_attention(cell)
        remarks += [kernel] if kernel else []
    return [cell], remarks, settings


def _checked(cell: Cell, micro_batch: int | None) -> Cell:
    """The cell on the virtual engine, with ``micro_batch`` samples in a micro-batch (None: unchanged)."""
    if micro_batch is not None and cell.batch is not None:
        parts, rest = divmod(cell.batch, cell.sizes.dp * micro_batch)
        if rest:
            raise UserError(
                f"--micro-batch {micro_batch}: batch {cell.batch} over {cell.sizes.dp} replicas is no whole "
                f"number of them; use --batch {cell.sizes.dp * micro_batch * max(1, parts)}"
            )
        cell = measure.changed(cell, {"training.micro_batches": parts})
    if cell.search is not None:
        flag = f"--{cell.search.quantity.replace('_', '-')}"
        raise UserError(f"{cell.key} searches for its {cell.search.quantity}: give one, {flag} N")
    if measure.load_cluster(cell.cluster).usable_memory_bytes is None:
        raise UserError(f"cluster {cell.cluster} has no memory limit: name one that has by --cluster")
    return cell.model_copy(update={"engine": "virtual", "device": "cpu", "learning": None, "rank": None})


def tokens_of_rank(cell: Cell) -> int:
    """Tokens of a micro-batch that a rank holds between the layers: its replica's tokens over the ranks that
    divide the sequence."""
    ranks = nesting(cell.strategy).sequence_ranks(cell.sizes.by_axis)
    return micro_batch_of(cell) * (cell.seq_len or 0) // ranks


def taken(cell: Cell, said: Collection[str]) -> list[dict[str, Any]]:
    """The settings of a cell that have their defaults, because neither the user nor the job gave a value:
    ``what`` is the setting in words, ``value``, and ``flag`` the option that gives another value.

    Args:
        said: dotted names of the settings that were given.
    """
    nested, model = nesting(cell.strategy), model_preset(*cell.model_arguments)
    options = set_options(nested.options_type(), cell.strategy_options, cell.strategy)
    entries = TABLES.record("taken", cell, micro_batch=micro_batch_of, options=options, model=model)
    return [each for name, each in entries.items() if name not in said and each["value"] != ""]


def text_on(form: str, cell: Cell, name: str = "", said: Collection[str] = ()) -> str:
    """A text on a cell and its model; "": the form has nothing to say of the cell.

    Args:
        form: "model" (its parameters, how many of these are active for a token, and its layers), "experts"
            (the share of parameters in routed experts, and how many a rank has), "slow" (a warning that many
            experts with parameters of their own make a trace take minutes) or "taken" (the defaults).
        name: the model's name to show; "": the name in the cell.
        said: dotted names of the settings that were given, which are not listed as "taken".
    """
    model = model_preset(*cell.model_arguments)
    return TABLES.text(
        form,
        cell,
        name=name or cell.model,
        preset=model,
        elements=measure.model_parameters(cell),
        experts=getattr(model, "experts", 0),
        ep=cell.sizes.by_axis.get("ep", 1),
        taken=taken(cell, said),
        tokens=tokens_of_rank(cell),
    )
