"""`spbench verify`: strategies against the single-device model."""

from __future__ import annotations

import click

from spbench.bench.command_line import options


@click.command("verify")
@options.many("--strategy", options.WORDS, "Verify these strategies; all if left out.")
@options.many("--model", options.WORDS, "On these models (large ones: shrunk); the tiny ones if left out.")
@click.option("--pairs", is_flag=True, help="Every two strategies of which one can be around the other.")
@click.option("--peers", is_flag=True, help="Every peer that is installed, and no other if none is named.")
@options.many(
    "--world-size", options.numbers(), "On these numbers of ranks; 1, 2, 3 and 4 if left out, 4 for pairs."
)
@options.many("--dtype", options.WORDS, "In these precisions (fp64, fp32, bf16, fp16); fp64 if left out.")
@options.many("--part", options.WORDS, "These parts of the models; all if left out.")
@click.option(
    "--backend", default="legacy_ddp", show_default=True, help="Gradients held and summed by this one."
)
@options.changes
@options.device
@options.path_option("--output", "Keep the verdicts in this folder, beside other cases; nowhere if left out.")
@options.printed
@options.body("run.verify_output:verified")
def command() -> None:
    """Check outputs and every gradient against a single device.

    Strategies run on real ranks. A strategy is a name, or names with plus signs, one around the next:
    tensor_parallel+ring_attention.
    """
