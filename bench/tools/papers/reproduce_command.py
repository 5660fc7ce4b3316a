"""`spbench reproduce`: every scenario of a paper, each published number beside ours.

Writes, into the output folder, PAPER.csv (RECORDS: one line a number), PAPER_runs.csv (RUNS: one line a
scenario) and figures/. Where git follows results/reproduction, they go below results/runs, unless --write
asks for them anew. Cells are kept in results/runs, where `spbench run` keeps them too, so that a
command that was interrupted goes on where it was.
"""

import click

from spbench.bench.command_line.options import body, executor, fresh, jobs, path_option, printed


@click.command("reproduce")
@click.argument("paper")
@click.option("--all-variants", is_flag=True, help="Run every variant of the settings, not only the first.")
@jobs
@executor
@path_option(
    "--output",
    "Folder for results; by default results/runs/reproduction, or results/reproduction with --write or if "
    "git does not follow that folder.",
)
@fresh
@click.option("--write", is_flag=True, help="Write the generated parts of REPRODUCE.md and its details.")
@printed
@body("papers.reproductions:reproduce")
def command() -> None:
    """Compare each published number of a PAPER with ours.

    The command runs every scenario of PAPER (rsa, lasp, dsp, measured, field, experts or all). PAPER/SCENARIO
    runs only that scenario. `strategies` writes the rows and traces of the strategies' pages. `datasheets`
    simulates times from datasheets only, and `substitutes` times without a rate of their kind. `bands`
    computes the intervals of simulated times from these results. `megatron_cases` and `megatron_moe_cases`
    predict the memory of Megatron-LM's functional tests.

    Cells are kept in results/runs, so an interrupted command continues where it was.
    """
