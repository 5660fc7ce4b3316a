"""`spbench verify`: strategies against the single-device model."""

from __future__ import annotations

import click

from spbench.bench.command_line.options import (
    WORDS,
    body,
    changes,
    device,
    many,
    numbers,
    path_option,
    printed,
)


@click.command("verify")
@many("--strategy", WORDS, "Verify these strategies; all if left out.")
@many("--model", WORDS, "On these models (large ones: shrunk); the tiny ones if left out.")
@click.option("--pairs", is_flag=True, help="Every two strategies of which one can be around the other.")
@click.option("--peers", is_flag=True, help="Every peer that is installed, and no other if none is named.")
@many("--world-size", numbers(), "On these numbers of ranks; 1, 2, 3 and 4 if left out, 4 for pairs.")
@many("--dtype", WORDS, "In these precisions (fp64, fp32, bf16, fp16); fp64 if left out.")
@many("--part", WORDS, "These parts of the models; all if left out.")
@click.option(
    "--backend", default="legacy_ddp", show_default=True, help="Gradients held and summed by this one."
)
@changes
@device
@path_option("--output", "Keep the verdicts in this folder, beside other cases; nowhere if left out.")
@printed
@body("run.verify_output:verified")
def command() -> None:
    """Check outputs and every gradient against a single device.

    Strategies run on real ranks. A strategy is a name, or names with plus signs, one around the next:
    tensor_parallel+ring_attention.
    """
