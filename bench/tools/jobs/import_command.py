"""`spbench import`: the job of a training program as a scenario, every argument accounted for."""

from __future__ import annotations

import click

from spbench.bench.command_line.options import WholeNumber, body, given, path_option, printed


@click.command("import")
@click.argument("words", nargs=-1, required=True, metavar="[KIND] FILE...")
@click.option("--gpus", type=WholeNumber(min=1), help="That the job runs on; what it says if left out.")
@click.option("--cluster", metavar="NAME", help="That it runs on: its name (see spbench list) or file.")
@click.option("--explain", is_flag=True, help="Show what became of every argument, in place of the scenario.")
@click.option("--strict", is_flag=True, help="Refuse what is unknown, or approximated in memory or time.")
@given
@path_option("--output", "The scenario's file; default standard output.")
@printed
@body("jobs.job_files:imported")
def command() -> None:
    """Write a scenario from the files of a training job.

    [KIND] FILE...: its launch script or its configuration, FILE.py:NAME one of several in a file; the KIND is
    the program's (spbench list jobs), and without it the files tell.

    Every argument is mapped to a setting, known to change nothing that is counted, approximated by what
    stands for it, or refused. Nothing in the files is run. The comment beside each line is the argument that
    it came from.
    """
