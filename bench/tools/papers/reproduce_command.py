"""`spbench reproduce`: every scenario of a paper, each published number beside ours.

Writes, into the output folder, PAPER.csv (RECORDS: one line a number), PAPER_runs.csv (RUNS: one line a
scenario) and figures/. Where git follows results/reproduction, they go below results/runs, unless --write
asks for them anew. Cells are kept in results/runs, where `spbench run` keeps them too, so that a
command that was interrupted goes on where it was.
"""

from __future__ import annotations

import click

from spbench.bench.command_line.options import body, executor, fresh, jobs, path_option, printed


@click.command("reproduce")
@click.argument("paper")
@click.option("--all-variants", is_flag=True, help="Every variant of the scenarios' settings, not the first.")
@jobs
@executor
@path_option(
    "--output",
    "Folder for results; default results/reproduction, or results/runs/reproduction where git follows that "
    "and --write is not given.",
)
@fresh
@click.option("--write", is_flag=True, help="Write the generated parts of REPRODUCE.md and its details anew.")
@printed
@body("papers.reproductions:reproduce")
def command() -> None:
    """Set each published number of a PAPER beside ours.

    Run every scenario of PAPER (rsa, lasp, dsp, measured, field, experts or all); PAPER/SCENARIO runs that
    one alone, and keeps what the files have of the others. `strategies` makes the rows and traces of the
    strategies' pages, `datasheets` times of datasheets alone, `substitutes` times without a rate of the kind,
    `bands` fits the intervals of simulated times to these results, `megatron_cases` and `megatron_moe_cases`
    predict what each of Megatron-LM's functional tests needs, as it is imported.

    Cells are kept in results/runs: what was interrupted goes on where it was.
    """
