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
    from collections.abc import Iterator, Sequence

    from spbench.bench.cell import Cell
    from spbench.bench.measurement import Outcome
    from spbench.bench.tools.fit.answers import Answers, Say
    from spbench.bench.tools.fit.asked import Asked
    from spbench.bench.tools.fit.fit_verdict import Verdict


#: share of the time that tracing the cells takes, roughly, where changes are tried after it
_EXAMINED = 0.4


def _asking(command: Function) -> Function:
    """Add the options that say what the cells are; the command gets them as ``asked``."""

    @functools.wraps(command)
    def asking(
        cluster: str | None,
        gpus: int | None,
        strategy: str | None,
        seq_len: int | None,
        batch: int | None,
        micro_batch: int | None,
        changes: tuple[tuple[str, str], ...],
        where: tuple[tuple[str, str], ...],
        variant: str | None,
        **others: Any,
    ) -> Any:
        from spbench.bench.measure.scenarios.setting_changes import given
        from spbench.bench.tools.fit.asked import Asked

        settings: dict[str, Any] = {"seq_len": seq_len, "batch": batch}
        settings |= {f"sizes.{axis}": others.pop(axis) for axis in MESH_AXES}
        settings = {name: value for name, value in settings.items() if value is not None}
        asked = Asked(cluster, gpus, strategy, settings | given(changes), micro_batch, where, variant)
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

    if kind_of(subject) == "model":
        ask_for({"--cluster NAME": asked.cluster, "--seq-len N": asked.settings.get("seq_len")}, subject[0])

    from spbench.bench.errors import UserError
    from spbench.bench.tools.fit import runs
    from spbench.bench.tools.fit.answers import Answers, within
    from spbench.bench.tools.fit.fit_report import Help, report  # torch, which mistakes need not wait for
    from spbench.bench.tools.fit.fit_verdict import Verdict
    from spbench.bench.tools.fit.proofs import largest, prove
    from spbench.bench.tools.fit.subject import advise_command
    from spbench.bench.tools.fit.subject import subject as subject_of

    asked_about = subject_of(subject, asked)
    with Progress() as progress:
        with Answers(runs.examine, jobs) as answers:
            examined = _examined(asked_about.cells, answers, within(progress.at, 0, _EXAMINED))
            outcomes = {cell.key: (cell, outcome) for cell, outcome in examined}
        in_order = [outcomes[cell.key] for cell in asked_about.cells]
        verdicts = [Verdict(cell, outcome.measurement) for cell, outcome in in_order if outcome.measurement]
        others = [(cell, outcome.reason) for cell, outcome in in_order if not outcome.measurement]
        if not verdicts:
            cell, reason = others[0]
            raise UserError(f"{cell.key}: {reason}")
        fullest = min(verdicts, key=lambda each: each.memory.spare_bytes)
        proofs = sizes = None
        if suggest or longest or not fullest.fits:
            with Answers(runs.attempt, jobs) as answers:
                if suggest or not fullest.fits:
                    proofs = prove(
                        fullest.cell, fullest.memory.total_bytes, answers, within(progress.at, _EXAMINED, 1)
                    )
                if longest:
                    progress.now("looking for the longest length and the largest micro-batch")
                    sizes = largest(fullest.cell, answers)
    files = _drawn(fullest, figure, snapshot)
    code = int(must_fit and (bool(others) or not fullest.fits))
    helping = Help(proofs, sizes, asked_about.job, advise_command(subject, fullest.cell, asked))
    return report(verdicts, others, fullest, helping, asked_about.remarks, files, code)


def _examined(cells: Sequence[Cell], answers: Answers, say: Say) -> Iterator[tuple[Cell, Outcome]]:
    from spbench.bench.tools.fit.stages import OneStage, stages_beside

    beside = stages_beside(cells, answers.jobs)
    say("tracing a step", 0)
    done = 0
    for cell, outcome in answers([*beside[:1], *cells, *beside[1:]]):
        if isinstance(cell, OneStage):
            continue  # whoever examines the cell finds the trace, or what is wrong with it
        done += 1
        say(f"{cell.key}: {outcome.status}", done / len(cells))
        if outcome.status in ("failed", "timeout"):
            raise RuntimeError(f"{cell.key}: {outcome.reason}")
        yield cell, outcome


def _drawn(fullest: Verdict, figure: Path | None, snapshot: Path | None) -> list[Path]:
    files = []
    if figure is not None:
        from spbench.plots.fit_and_advise import draw_memory

        files.append(
            draw_memory(
                fullest.anatomy, fullest.measurement["usable_memory_bytes"], str(fullest.cell.key), figure
            )
        )
    if snapshot is not None:
        from spbench.bench.tools.fit.snapshot import write_snapshot

        files.append(write_snapshot(fullest.cell, fullest.anatomy["ranks"][0], snapshot))
    return files
