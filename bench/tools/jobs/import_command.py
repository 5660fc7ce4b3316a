"""`spbench import`: the job of a training program as a scenario, every argument accounted for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click

from spbench.bench.command_line.options import path_option, printed
from spbench.bench.command_line.output import Output, Table, Verbatim
from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import resolved, write_whole
from spbench.bench.tools.jobs import JOBS


@click.command("import")
@click.argument("words", nargs=-1, required=True, metavar="[KIND] FILE...")
@click.option("--gpus", type=click.IntRange(min=1), help="That the job runs on; what it says if left out.")
@click.option("--cluster", metavar="NAME", help="That it runs on: its name (see spbench list) or file.")
@click.option("--explain", is_flag=True, help="Show what became of every argument, in place of the scenario.")
@click.option("--allow-unknown", is_flag=True, help="Leave out arguments that the program does not have.")
@path_option("--output", "The scenario's file; default standard output.")
@printed
def command(
    words: tuple[str, ...],
    gpus: int | None,
    cluster: str | None,
    explain: bool,
    allow_unknown: bool,
    output: Path | None,
) -> Output:
    """Write a scenario from the files of a training job.

    [KIND] FILE...: its launch script or its configuration, FILE.py:NAME one of several in a file; the KIND is
    the program's (spbench list jobs), and without it the files tell.

    Every argument is mapped to a setting, known to change nothing that is counted, not modelled, or refused.
    Nothing in the files is run. The comment beside each line is the argument that it came from.
    """
    from spbench.bench.tools.jobs.job_files import path_and_part, read_job

    kind, files = _kind_and_files(words)
    job = read_job(kind, files, gpus=gpus, cluster=cluster, allow_unknown=allow_unknown)
    if explain:
        lines = [
            {"argument": str(each), "is": each.outcome, "that is": each.detail} for each in job.arguments
        ]
        title = f"{job.title}: arguments of {job.program}"
        refusal = job.refusal()
        content = {"program": job.program, "arguments": lines, "refusal": refusal}
        notes = [*job.remarks, *([f"no scenario: {refusal}"] if refusal else [])]
        table = Table(title, lines, ("argument", "is", "that is"), ("that is",))
        return Output([table], content, lines, notes=notes)
    text = job.scenario_text()
    if output is None:
        return Output([Verbatim(text.removesuffix("\n"))], {"scenario": text}, [{"scenario": text}])
    if resolved(output) in [resolved(path_and_part(file)[0]) for file in files]:
        raise UserError(f"--output {output} is one of the files")
    if output.suffix not in (".yaml", ".yml"):
        output = output.with_name(f"{output.name}.yaml")
    write_whole(output, text)
    notes = [*job.remarks, f"to run it: spbench run --scenario {output}"]
    return Output((), {"file": str(output)}, [{"file": str(output)}], notes=notes, files=[output])


def _kind_and_files(words: Sequence[str]) -> tuple[str | None, Sequence[str]]:
    """The kind of job, None where the first word is a file, and the files. UserError where there is none."""
    from spbench.bench.tools.jobs.job_files import path_and_part

    first, *others = words
    if first in JOBS:
        if not others:
            raise UserError(f"no file of the job of {first} is given; spbench import {first} FILE...")
        return first, others
    if others and not path_and_part(first)[0].exists():
        raise UserError(f"{first!r} is neither a kind of job nor a file{suggestion(first, JOBS.names())}")
    return None, words
