"""`spbench report`: a static site of the results."""

import time
from importlib.util import find_spec
from pathlib import Path

import click

from spbench.bench.command_line.options import path_option, printed
from spbench.bench.command_line.output import Output, Table
from spbench.bench.errors import UserError

#: the modules that the extra `report` installs
NEEDED = ("itables", "markdown_it")
_LISTED = 5


@click.command("report")
@path_option(
    "--output", "Folder for the site; an earlier site in it is replaced.", folder=True, required=True
)
@path_option("--results", "Folder with reproduction/, baseline/ and runs/; by default results/.")
@path_option("--history", "Folder of `spbench record`; by default RESULTS/history, if it exists.")
@printed
def command(output: Path, results: Path | None, history: Path | None) -> Output:
    """Write a static site of the results.

    OUTPUT/index.html opens without a server or a network. The site compares each paper with our numbers, and
    shows the strategies, the gate and its history, and every cell. It contains results/runs, if that folder
    exists, and the results that are committed with the code.
    """
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise UserError(f"spbench report needs {missing[0]}: pip install itables markdown-it-py")
    from spbench.bench.tools.report.build import build, check_place
    from spbench.bench.tools.report.gathered import default_results, gather

    begin = time.perf_counter()
    check_place(output)
    gathered = gather(results or default_results(), history)
    site = build(gathered, output)
    seconds = time.perf_counter() - begin
    index = site.folder / "index.html"
    largest = sorted(site.files.items(), key=lambda entry: -entry[1])[:_LISTED]
    lines = [{"file": path, "MB": f"{size / 1e6:.2f}"} for path, size in largest]
    return Output(
        [Table(f"{index}: the largest of {len(site.files)} files", lines)],
        {
            "index": str(index),
            "files": dict(site.files),
            "bytes": site.bytes,
            "build_seconds": round(seconds, 2),
        },
        [{"file": path, "bytes": size} for path, size in site.files.items()],
        notes=[f"{site.bytes / 1e6:.1f} MB, built in {seconds:.0f} s; open {index}"],
        files=[index],
    )
