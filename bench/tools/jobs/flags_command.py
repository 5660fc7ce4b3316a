"""`spbench flags`: a cell as the arguments of a training program."""

import click

from spbench.bench.command_line.options import body, choosing_cells, path_option, printed, shape
from spbench.bench.errors import refuse_unknown
from spbench.bench.tools.jobs import FLAGS


def _known(ctx: click.Context, param: click.Parameter, kind: str) -> str:
    """The kind of flags; UserError for an unknown kind, before click asks for a missing scenario."""
    refuse_unknown("there are no flags of", kind, FLAGS.names())
    return kind


@click.command("flags")
@click.argument("kind", metavar="KIND", callback=_known)
@choosing_cells
@shape
@path_option("--output", "The file; default standard output.")
@printed
@body("jobs.flags:written_flags")
def command() -> None:
    """Write a cell as the flags of a training program.

    KIND is the program: megatron, torchtitan or accelerate. The options choose one cell of SCENARIO.

    `spbench import KIND` reads the written command or configuration as the same cell again. A setting for
    which the program has no argument is refused. Comments say what the program computes in another way, for
    example by other kernels.
    """
