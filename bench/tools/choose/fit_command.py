"""`spbench fit`: whether a job fits its cards, what holds the memory, and what would make it fit."""

import click

from spbench.bench.command_line import options
from spbench.impls import MESH_AXES

_POSITIVE = options.WholeNumber(min=1)


@click.command("fit")
@click.argument("subject", nargs=-1, required=True, metavar="SUBJECT...")
@click.option("--cluster", metavar="NAME", help="Cluster of the job: a name (spbench list) or file.")
@click.option("--gpus", type=_POSITIVE, help="Number of GPUs, if the scenario or job does not say it.")
@click.option("--strategy", help="Strategy of the model; of a scenario, only its cells.")
@click.option("--seq-len", type=options.LENGTH, help="Positions of a sequence, for example 131072 or 128K.")
@click.option("--batch", type=options.LENGTH, help="Samples of the whole batch, of all replicas.")
@click.option("--micro-batch", type=options.LENGTH, help="Samples of a micro-batch of a replica.")
@options.with_options(
    *(click.option(f"--{axis}", type=_POSITIVE, help=f"Ranks along {axis}.") for axis in MESH_AXES)
)
@options.changes
@options.many("--where", options.SETTINGS, "Only cells of the scenario with this setting.")
@options.variant
@options.given
@click.option("--suggest", is_flag=True, help="Try more changes, also if the job fits.")
@click.option("--longest", is_flag=True, help="Find the longest length and the largest micro-batch that fit.")
@click.option(
    "--budget", type=options.BYTES, help="Find the memory switches within SIZE that cost least time."
)
@options.measured
@options.figure_option("Draw memory over the steps, by kind, into this file (.png, .pdf or .svg).")
@options.path_option("--snapshot", "Write a file for PyTorch's memory viewer (pytorch.org/memory_viz).")
@click.option(
    "--must-fit", is_flag=True, help="Exit with 1 if the job does not fit or is tight, for launchers."
)
@options.jobs
@options.printed
@options.body("choose.fitting:fit", starts_processes=True)
def command() -> None:
    """Say whether a job fits its cards, and what would make it fit.

    SUBJECT... is a scenario (name or file), the files of a job that spbench import reads, or a model (name,
    config.json or .py file) with --cluster, --gpus and --seq-len. The answer is yes, tight (with the reason)
    or no. It names the fullest ranks, the step and the module at the peak, and what holds the memory then.
    If the job does not fit, the command also prints changes that make it fit, each proved by a trace. If no
    single change is enough, it tries pairs.
    """
