"""`spbench import`: the job of a training program as a scenario, every argument accounted for."""

from __future__ import annotations

from pathlib import Path

import click

from spbench.bench.commands.options import path_option, printed
from spbench.bench.commands.output import Output, Table


@click.command("import")
@click.argument("kind", metavar="KIND")
@click.argument("files", nargs=-1, required=True, metavar="FILE...", type=click.Path(path_type=Path))
@click.option("--gpus", type=click.IntRange(min=1), help="That the job runs on; what it says if left out.")
@click.option("--cluster", metavar="NAME", help="That it runs on: its name (see spbench list) or file.")
@click.option("--explain", is_flag=True, help="Show what became of every argument, in place of the scenario.")
@click.option("--allow-unknown", is_flag=True, help="Leave out arguments that the program does not have.")
@path_option("--output", "The scenario's file; default standard output.")
@printed
def command(
    kind: str,
    files: tuple[Path, ...],
    gpus: int | None,
    cluster: str | None,
    explain: bool,
    allow_unknown: bool,
    output: Path | None,
) -> Output:
    """Write a scenario from the files of a training job.

    FILE... is its launch script or its configuration. The KIND is the program's (spbench list jobs).

    Every argument is mapped to a setting, known to change nothing that is counted, or refused by name.
    Nothing in the files is run. The comment beside each line is the argument that it came from.
    """
    from spbench.bench.atomic_write import write_whole
    from spbench.bench.errors import UserError
    from spbench.bench.jobs.job_files import read_job

    job = read_job(kind, files, gpus=gpus, cluster=cluster, allow_unknown=allow_unknown)
    if explain:
        lines = [
            {"argument": str(each), "is": each.outcome, "that is": each.detail} for each in job.arguments
        ]
        title = f"{job.title}: arguments of {job.program}"
        refusal = job.refusal()
        content = {"program": job.program, "arguments": lines, "refusal": refusal}
        notes = [*job.remarks, *([f"no scenario: {refusal}"] if refusal else [])]
        return Output([Table(title, lines)], content, lines, notes=notes)
    text = job.scenario_text()
    if output is None:
        return Output([text.removesuffix("\n")], {"scenario": text}, [{"scenario": text}])
    if output.resolve() in [file.resolve() for file in files]:
        raise UserError(f"--output {output} is one of the files")
    if output.suffix not in (".yaml", ".yml"):
        output = output.with_name(f"{output.name}.yaml")
    write_whole(output, text)
    notes = [*job.remarks, f"to run it: spbench run --scenario {output}"]
    return Output((), {"file": str(output)}, [{"file": str(output)}], notes=notes, files=[output])
