"""`spbench fit`: whether a job fits its cards, what holds the memory, and what would make it fit."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from spbench.bench.command_line.options import (
    SETTINGS,
    Function,
    Length,
    changes,
    jobs,
    many,
    path_option,
    printed,
    variant,
)
from spbench.bench.command_line.output import Output
from spbench.bench.command_line.progress import Progress
from spbench.impls.axes import MESH_AXES

if TYPE_CHECKING:
    from spbench.bench.tools.fit.asked import Asked


def _asking(command: Function) -> Function:
    """Add the options that say what the cells are; the command gets them as ``asked``."""

    @functools.wraps(command)
    def asking(
        cluster: str | None,
        gpus: int | None,
        strategy: str | None,
        micro_batch: int | None,
        changes: tuple[tuple[str, str], ...],
        where: tuple[tuple[str, str], ...],
        variant: str | None,
        **others: Any,
    ) -> Any:
        from spbench.bench.measure.scenarios.scenario import given
        from spbench.bench.tools.fit.asked import Asked

        sizes = {name: others.pop(name) for name in ("seq_len", "batch")}
        sizes |= {f"sizes.{axis}": others.pop(axis) for axis in MESH_AXES}
        settings = {name: value for name, value in sizes.items() if value is not None} | given(changes)
        asked = Asked(cluster, gpus, strategy, settings, micro_batch, where, variant)
        return command(asked=asked, **others)

    positive = click.IntRange(min=1)
    options = [
        click.option("--cluster", metavar="NAME", help="That it runs on: its name (spbench list) or file."),
        click.option("--gpus", type=positive, help="How many; what scenario, job or sizes say if left out."),
        click.option("--strategy", help="How a sample is divided; of a scenario, its cells of this one."),
        click.option("--seq-len", type=Length(), help="Positions of a sequence, as 131072 or 128K."),
        click.option("--batch", type=Length(), help="Samples of the whole batch."),
        click.option("--micro-batch", type=Length(), help="Samples of a micro-batch of a replica."),
        *(click.option(f"--{axis}", type=positive, help=f"Ranks along {axis}.") for axis in MESH_AXES),
        changes,
        many("--where", SETTINGS, "Of a scenario: only cells with this setting."),
        variant,
    ]
    return functools.reduce(lambda inner, option: option(inner), reversed(options), asking)


@click.command("fit")
@click.argument("subject", nargs=-1, required=True, metavar="SUBJECT...")
@_asking
@click.option("--suggest", is_flag=True, help="Show changes that take less memory, where it fits too.")
@click.option("--longest", is_flag=True, help="Find the longest length and the largest micro-batch that fit.")
@path_option("--figure", "Draw memory over the steps, by kind, into this file (.png, .pdf or .svg).")
@path_option("--snapshot", "Write what PyTorch's memory viewer (pytorch.org/memory_viz) opens.")
@click.option("--must-fit", is_flag=True, help="Exit code 1 where it does not fit, for launchers.")
@jobs
@printed
def command(
    subject: tuple[str, ...],
    asked: Asked,
    suggest: bool,
    longest: bool,
    figure: Path | None,
    snapshot: Path | None,
    must_fit: bool,
    jobs: int | None,
) -> Output:
    """Say whether a job fits its cards, and what would make it fit.

    SUBJECT... is a scenario (name or file), the files of a job that spbench import reads, or a model (name,
    config.json or .py file) with --cluster, --gpus and --seq-len. The answer has the fullest ranks, the step
    and the module at the peak, and what holds the memory then. Where it does not fit, changes that make it
    fit follow, each proved by a trace: single ones, and pairs where none is enough.
    """
    from spbench.bench.tools.fit.asked import ask_for, kind_of
    from spbench.bench.tools.fit.fit_report import report
    from spbench.bench.tools.fit.fitting import fitting

    if kind_of(subject) == "model":
        ask_for({"--cluster NAME": asked.cluster, "--seq-len N": asked.settings.get("seq_len")}, subject[0])
    with Progress() as progress:
        answer = fitting(subject, asked, progress.at, jobs, suggest, longest)
    return report(answer, answer.written(figure, snapshot), must_fit)
