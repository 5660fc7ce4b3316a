"""Facts that follow from a cell's options: the number of its micro-batches, the order in which a rank runs
them, the model options that make a refused cell run (all options at once, since mending one fault would only
show the next), and the model that the ranks run."""

from collections.abc import Callable
from typing import Any, TypeVar

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.measure.clusters.card_kernels import played_kernel
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.impls import Composition, Model, Stage, Turns, Unsupported, model_preset


def turns_of(cell: Cell, stage: Stage, micro_batches: int | None = None) -> Turns:
    """The turns (forwards and backwards in order) of the rank that holds the pipeline stage ``stage``, in a
    step of a cell with ``micro_batches`` in place of its own; None: its own."""
    training = cell.training
    sizes = training.virtual_stages, micro_batches or training.micro_batches, training.microbatch_group_size
    return Turns.of(training.schedule, stage, *sizes, training.overlap_p2p_communication)


def puts_off(cell: Cell) -> bool:
    """Whether a cell's step puts off gradients of some micro-batches, which so differ from the others."""
    return bool(cell.training.backend_options.get("defer_embedding_wgrad_compute"))


def passes_of(cell: Cell, around: Composition) -> list[list[bool]]:
    """For each chunk of layers of a rank, whether each pass is a forward, as :class:`PlannedStep` has it."""
    turns = turns_of(cell, around.stage)
    return [[*turns.passes(chunk)] for chunk in range(turns.chunks)]


def batch_parts(cell: Cell) -> int:
    """The number of micro-batches that the batch is divided into, over all replicas.

    Raises:
        Unsupported: they do not divide the batch.
    """
    batch, _ = cell.shape
    parts = cell.sizes.dp * cell.training.micro_batches
    if batch % parts:
        below = batch - batch % parts
        raise Unsupported(
            f"batch {batch} cannot be divided into {parts} micro-batches of all replicas",
            f"use {' or '.join(str(n) for n in (below, below + parts) if n)}",
        )
    return parts


def check_inference(cell: Cell) -> None:
    """Raise :class:`Unsupported` if an inference cell has settings that only training steps use."""
    training = cell.training
    for given, what in (
        (cell.learning is not None, "learning"),
        (cell.sizes.pp > 1, "pipeline stages"),
        (training.micro_batches > 1, "micro-batches"),
        (training.steps > 1, "steps before it"),
        (training.backend != TrainingOptions().backend, f"backend {training.backend}"),
    ):
        if given:
            raise Unsupported(f"an inference step has no {what}", "leave it out")


def check_schedule(cell: Cell) -> None:
    """Raise :class:`Unsupported` if the interleaved schedule cannot run a cell's stages and micro-batches."""
    training, ranks = cell.training, cell.sizes.pp
    if training.schedule != "interleaved":
        return
    if ranks == 1:
        raise Unsupported("the interleaved schedule is for several pipeline stages", "use pp 2 or more")
    group, micro_batches = training.microbatch_group_size or ranks, training.micro_batches
    if not ranks <= group <= max(micro_batches, ranks):
        raise Unsupported(
            f"microbatch_group_size {group} is not between pp {ranks} and {micro_batches} micro-batches",
            "set it within them, or leave it out",
        )
    left = micro_batches % group
    if 0 < left < ranks:
        below = micro_batches - left
        raise Unsupported(
            f"the interleaved schedule cannot run {micro_batches} micro-batches on pp {ranks}"
            + (f" in groups of {group}" if group > ranks else ""),
            f"use {' or '.join(str(n) for n in (below, below + ranks) if n)}",
        )


Checked = TypeVar("Checked")


def with_mends(check: Callable[[Cell], Checked], cell: Cell) -> Checked:
    """The value that ``check(cell)`` returns.

    Raises:
        Unsupported: the check refuses the cell. The error names the options of :meth:`Model.mending` that
            would make the cell pass, the fault that each option mends, and how to set the option.
    """
    try:
        return check(cell)
    except Unsupported as refusal:
        changes = model_preset(*cell.model_arguments).mending(cell.shape[1])

        def refused(*left_out: str) -> str:
            options = cell.model_options | {k: v for k, v in changes.items() if k not in left_out}
            try:
                check(cell.model_copy(update={"model_options": options}))
            except Unsupported as error:
                return error.reason
            return ""

        if not changes or refused():
            raise
        needed = {name: reason for name in changes if (reason := refused(name))}
        setting = ",".join(f"model_options.{name}={changes[name]}" for name in needed)
        reasons = "; ".join(dict.fromkeys(needed.values()))
        lone = len(needed) == 1 and not any(name in refusal.mend for name in needed)
        other = f", or {refusal.mend}" if lone else ""
        raise Unsupported(reasons, f"--set {setting} mends that{other}") from None


def played_arguments(cell: Cell) -> tuple[str, dict[str, Any], dict[str, Any] | None]:
    """The arguments (name, options, config) of the model that a cell's ranks run. FlashAttention-2 has one
    head size, so where ranks run that kernel, values are padded with zeros to the head size of keys
    (``_pad_qkv_head_dim`` of TransformerEngine's dot_product_attention.py since 8a5af978)."""
    name, options, config = cell.model_arguments
    if cell.precision in ("fp16", "bf16") and attention_kernel(cell) == "flash_attention_2":
        options = {**options, **model_preset(name, options, config).of_one_head_size}
    return name, options, config


def played_model(cell: Cell) -> Model:
    """The model that a cell's ranks run, built from :func:`played_arguments`."""
    return model_preset(*played_arguments(cell))


def attention_kernel(cell: Cell) -> str:
    """The name of the softmax attention kernel that ranks run: the model's choice, or the card's default."""
    return played_kernel(
        load_cluster(cell.cluster).device, model_preset(*cell.model_arguments).attention_kernel
    )
