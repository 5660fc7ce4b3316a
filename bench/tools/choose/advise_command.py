"""`spbench advise`: which layout of a model is the fastest on so many GPUs of a cluster."""

from __future__ import annotations

import click

from spbench.bench.command_line.options import (
    COUNTS,
    LENGTH,
    SETTINGS,
    WORDS,
    body,
    changes,
    executor,
    figure_option,
    files_of,
    given,
    jobs,
    many,
    path_option,
    printed,
)


@click.command("advise")
@click.option(
    "--model",
    "subject",
    required=True,
    multiple=True,
    metavar="MODEL",
    help="A model (name, config.json or .py file), a scenario, or the files of a job, one option each.",
)
@click.option("--cluster", metavar="NAME", help="That it runs on: its name (spbench list) or file.")
@click.option("--gpus", type=COUNTS, metavar="N[,N...]", help="How many, as 64, or 8,64 or 8..512.")
@click.option("--seq-len", type=COUNTS, metavar="L[,L...]", help="Positions of a sequence, as 128K.")
@click.option("--batch-tokens", type=LENGTH, help="Tokens of the whole batch, as 4M; 4M if left out.")
@click.option("--batch", type=LENGTH, help="Samples of the whole batch instead.")
@many("--only", WORDS, "Only these strategies, such as ulysses+ring_attention, and these backends.")
@many("--without", WORDS, "None of these strategies, alone or around others, and none of these backends.")
@files_of("strategy", "A file of yours whose strategies are searched too; give it once for each.")
@many(
    "--fixed",
    SETTINGS,
    "Ranks along an axis that are given, as tp=8; also micro_batch=1, and options of backends and the model, "
    "as training.optimizer=device or model_options.checkpoints=device.",
)
@changes
@given
@many(
    "--why", SETTINGS, "Say why layouts with so many ranks along an axis, as tp=16, are not among the best."
)
@click.option(
    "--for",
    "program",
    metavar="PROGRAM",
    help="Only layouts that a program has arguments for, and these arguments: megatron or torchtitan.",
)
@figure_option("Draw the best layouts, or of several questions which strategy wins where, here.")
@path_option("--output", "Write the best layouts as a scenario, to run, verify, trace and ask fit about.")
@jobs
@executor
@printed
@body("choose.advise_report:advise")
def command() -> None:
    """Find the fastest layouts of a model that fit its cards.

    A job's own layout stands beside them. A layout is strategies, ranks along each axis, a backend,
    micro-batches and recomputation. Layouts are estimated, the promising ones traced with few layers and the
    best with all. Times that differ by less than the errors of such predictions are a tie, and the simplest
    of them is named first. --set also takes a figure of the cluster, as network.bandwidth_bytes_per_s=x2 (or
    x0.5..x4, a question each). What was traced is kept, so that the same command goes on where it was
    stopped.
    """
