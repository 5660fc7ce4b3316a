"""`spbench advise`: which layout of a model is the fastest on so many GPUs of a cluster."""

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
@click.option("--cluster", metavar="NAME", help="Cluster of the GPUs: a name (spbench list) or a file.")
@click.option("--gpus", type=COUNTS, metavar="N[,N...]", help="Number of GPUs, such as 64, 8,64 or 8..512.")
@click.option("--seq-len", type=COUNTS, metavar="L[,L...]", help="Positions of a sequence, such as 128K.")
@click.option("--batch-tokens", type=LENGTH, help="Tokens of the whole batch; by default 4M.")
@click.option("--batch", type=LENGTH, help="Samples of the whole batch instead.")
@many("--only", WORDS, "Only these strategies, such as ulysses+ring_attention, and these backends.")
@many("--without", WORDS, "None of these strategies, by themselves or around others, nor these backends.")
@files_of("strategy", "A file of yours whose strategies are searched too.")
@many(
    "--fixed",
    SETTINGS,
    "Fix the ranks along an axis (tp=8), the micro-batch (micro_batch=1), or an option of the backend or the "
    "model, for example training.optimizer=device or model_options.checkpoints=device.",
)
@changes
@given
@many("--why", SETTINGS, "Say why layouts with these ranks along an axis (tp=16) are not among the best.")
@click.option(
    "--for",
    "program",
    metavar="PROGRAM",
    help="Only layouts that this program (megatron or torchtitan) can run, with its arguments for them.",
)
@figure_option("Draw the best layouts; of several lengths or numbers of GPUs, a map of the best strategy.")
@path_option("--output", "Write the best layouts as a scenario, which run, verify, trace and fit take.")
@jobs
@executor
@printed
@body("choose.advise_report:advise", starts_processes=True)
def command() -> None:
    """Find the fastest layouts of a model that fit its cards.

    If MODEL is a job, its own layout is compared with them. A layout is strategies, ranks along each axis, a
    backend, micro-batches and recomputation. The command estimates all layouts, traces the promising ones
    with few layers and the best with all layers. Times that differ by less than the errors of such
    predictions are a tie, and the simplest layout of a tie comes first. --set also changes a rate of the
    cluster: network.bandwidth_bytes_per_s=x2 doubles it, and x0.5..x4 asks once for each factor. Traces are
    kept, so the same command continues after it was stopped.
    """
