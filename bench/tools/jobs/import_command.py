"""`spbench import`: the job of a training program as a scenario, every argument accounted for."""

import click

from spbench.bench.command_line.options import WholeNumber, body, given, measured, path_option, printed


@click.command("import")
@click.argument("words", nargs=-1, required=True, metavar="[KIND] FILE...")
@click.option("--gpus", type=WholeNumber(min=1), help="Number of GPUs, if the files do not say it.")
@click.option("--cluster", metavar="NAME", help="Cluster of the job: a name (spbench list) or a file.")
@click.option("--explain", is_flag=True, help="Show what became of every argument, in place of the scenario.")
@click.option("--strict", is_flag=True, help="Refuse what is unknown, or approximated in memory or time.")
@given
@measured
@path_option("--output", "The scenario's file; default standard output.")
@printed
@body("jobs.job_files:imported")
def command() -> None:
    """Write a scenario from the files of a training job.

    In [KIND] FILE..., FILE is the job's launch script or configuration; FILE.py:NAME is one of several jobs
    in a file. KIND is the program (spbench list jobs), and is needed only if the files do not show it.

    Every argument becomes a setting, is approximated, has no effect on what is counted, or is refused.
    Nothing in the files is run. A comment behind each line of the scenario names the argument that the line
    came from.
    """
