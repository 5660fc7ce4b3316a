"""`spbench export`: results as the files that dashboards and CI systems read."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from spbench.bench.command_line.options import path_option, printed
from spbench.bench.command_line.output import Output, Verbatim
from spbench.bench.command_line.progress import message
from spbench.bench.errors import UserError, suggestion
from spbench.bench.files import write_together
from spbench.bench.tools.changes import EXPORTS
from spbench.bench.tools.changes.exported import ExportRequest, not_run, read_suites
from spbench.bench.tools.changes.history import read_targets


def _known(ctx: click.Context, param: click.Parameter, name: str) -> str:
    if name not in EXPORTS:
        raise click.BadParameter(f"no export {name!r}{suggestion(name, EXPORTS.names())}", ctx, param)
    return name


@click.command("export")
@click.option(
    "--to",
    "system",
    required=True,
    metavar=f"[{'|'.join(EXPORTS.names())}]",
    callback=_known,
    help="The system that is to read them.",
)
@click.argument("results", nargs=-1, required=True, type=click.Path(path_type=Path))
@path_option(
    "--base",
    "What markdown, junit and github-annotations compare with: results, or a folder with some under the "
    "name of each of RESULTS, such as results/baseline.",
)
@path_option(
    "--previous-base",
    "The base as it was before the change, such as the baseline of the target branch. What differs "
    "between it and the base was meant, and markdown says so.",
)
@path_option(
    "--targets", "A history, in whose targets.yaml are values to be met; hud has them.", metavar="HISTORY"
)
@click.option("--commit", default="", help="The commit of the results, in place of what their rows say.")
@path_option("--output", "File that is written, or folder where there are several; default standard output.")
@printed
def command(
    system: str,
    results: tuple[Path, ...],
    base: Path | None,
    previous_base: Path | None,
    targets: Path | None,
    commit: str,
    output: Path | None,
) -> Output:
    """Write RESULTS for another system.

    RESULTS are what spbench compare takes. Cells without a value are left out and counted, never written as
    0. The exit code is 0 once everything is written, also where results are worse than their base: spbench
    compare is the gate.
    """

    suites = read_suites(results, base, previous_base, commit)
    goals = read_targets(targets) if targets else ()
    request = ExportRequest(suites, output, goals, not_run(results, base))
    exported = EXPORTS.load(system)(request)
    if targets is not None and "targets" not in request.heeded:
        raise UserError(f"--targets: {system} has no values to be met; leave it out")
    if output is not None:
        files = _written(exported.content, output)
        names = [str(path) for path in files]
        content = {"files": names, "notes": list(exported.notes)}
        return Output((), content, [{"file": name} for name in names], notes=exported.notes, files=files)
    if isinstance(exported.content, Mapping):
        raise UserError(
            f"{system} is several files ({', '.join(exported.content)}); name a folder by --output"
        )
    for note in exported.notes:
        message(f"spbench: {note}")
    text = exported.content
    content = {"text": text, "notes": list(exported.notes)}
    return Output([Verbatim(text.removesuffix("\n"))], content, [{"text": text}])


def _written(content: str | Mapping[str, str], output: Path) -> list[Path]:
    if isinstance(content, str):
        return write_together({output: content})
    return write_together({output / name: text for name, text in content.items()})
