"""`spbench verify`: strategies against the single-device model."""

import click

from spbench.bench.command_line import options


@click.command("verify")
@click.argument("subject", metavar="[STEP]", default="")
@options.many("--strategy", options.WORDS, "Verify these strategies; by default all.")
@options.many("--model", options.WORDS, "On these models, in small sizes; by default the tiny models.")
@click.option("--pairs", is_flag=True, help="Verify each pair of strategies, one around the other.")
@click.option("--peers", is_flag=True, help="Verify every installed peer (other packages' code).")
@options.many(
    "--world-size", options.numbers(), "On these numbers of ranks; by default 1, 2, 3 and 4, for pairs 4."
)
@options.many("--dtype", options.WORDS, "In these precisions (fp64, fp32, bf16, fp16); by default fp64.")
@options.many("--part", options.WORDS, "These parts of the models; by default all.")
@click.option(
    "--backend", default="legacy_ddp", show_default=True, help="Backend that holds and sums gradients."
)
@options.changes
@options.device
@options.path_option("--output", "Add the verdicts to this folder; by default they are not kept.")
@options.printed
@options.body("run.verify_output:verified", starts_processes=True)
def command() -> None:
    """Check outputs and every gradient against a single device.

    Strategies run on real ranks. A strategy is a name, or several names with plus signs, the outer one first:
    tensor_parallel+ring_attention.

    STEP is a training step of your own, as step.py:train, a function that builds it with torch only.
    Its loss and gradients on 1, 2 and 4 ranks are compared with those of one rank, so the global batch must
    be the same.
    """
