"""`spbench advise`: which layout of a model is the fastest on so many GPUs of a cluster."""

from __future__ import annotations

import itertools
from pathlib import Path

import click

from spbench.bench.command_line.options import (
    SETTINGS,
    WORDS,
    Counts,
    Length,
    changes,
    executor,
    files_of,
    jobs,
    many,
    path_option,
    printed,
)
from spbench.bench.command_line.output import Output
from spbench.bench.command_line.progress import Progress
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.changed_figures import is_figure, sweep


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
@click.option("--gpus", type=Counts(), metavar="N[,N...]", help="How many, as 64, or 8,64 or 8..512.")
@click.option("--seq-len", type=Counts(), metavar="L[,L...]", help="Positions of a sequence, as 128K.")
@click.option("--batch-tokens", type=Length(), help="Of the whole batch, as 4M; 4M if left out.")
@click.option("--batch", type=Length(), help="Samples of the whole batch instead.")
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
@many(
    "--why", SETTINGS, "Say why layouts with so many ranks along an axis, as tp=16, are not among the best."
)
@click.option(
    "--for",
    "program",
    metavar="PROGRAM",
    help="Only layouts that a program has arguments for, and these arguments: megatron or torchtitan.",
)
@path_option("--figure", "Draw the best layouts, or of several questions which strategy wins where, here.")
@path_option("--output", "Write the best layouts as a scenario, to run, verify, trace and ask fit about.")
@jobs
@executor
@printed
def command(
    subject: tuple[str, ...],
    cluster: str | None,
    gpus: tuple[int, ...] | None,
    seq_len: tuple[int, ...] | None,
    batch_tokens: int | None,
    batch: int | None,
    only: tuple[str, ...],
    without: tuple[str, ...],
    fixed: tuple[tuple[str, str], ...],
    changes: tuple[tuple[str, str], ...],
    why: tuple[tuple[str, str], ...],
    program: str | None,
    figure: Path | None,
    output: Path | None,
    jobs: int | None,
    executor: str | None,
) -> Output:
    """Find the fastest layouts of a model that fit its cards.

    A layout is strategies, ranks along each axis, a backend, micro-batches and recomputation. Layouts are
    estimated, the promising ones traced with few layers and the best with all. Times that differ by less than
    the errors of such predictions are a tie, and the simplest of them is named first. --set also takes a
    figure of the cluster, as network.bandwidth_bytes_per_s=x2 (or x0.5..x4, a question each). What was traced
    is kept, so that the same command goes on where it was stopped.
    """
    from spbench.bench.measure.scenarios.scenario import given
    from spbench.bench.tools.advise.advise_report import check_figure, report, varying
    from spbench.bench.tools.advise.ask import answered
    from spbench.bench.tools.advise.question import question, whole_numbers
    from spbench.bench.tools.fit.asked import Asked, ask_for, kind_of

    if kind_of(subject) == "model":
        lengths = seq_len or dict(changes).get("seq_len")
        ask_for({"--cluster NAME": cluster, "--gpus N": gpus, "--seq-len N": lengths}, subject[0])

    if batch is not None and batch_tokens is not None:
        raise UserError("--batch and --batch-tokens say the same: give one")
    asked_about = whole_numbers("--why", why)
    of_cluster = [(name, text) for name, text in changes if is_figure(name)]
    settings = given([pair for pair in changes if pair not in of_cluster])
    if batch is not None:
        settings["batch"] = batch
    questions = []
    for length, n in itertools.product(seq_len or [None], gpus or [None]):
        own = settings if length is None else {**settings, "seq_len": length}
        asked = Asked(cluster, n, None, own)
        one = question(subject, asked, batch_tokens, only, without, fixed, program or "")
        questions += [one.with_figures(figures) for figures in sweep(of_cluster)]
    varying([each.place for each in questions])
    check_figure(figure)
    answers = []
    with Progress() as progress:
        for answer in answered(questions, jobs, progress.at, executor, asked_about):
            answers.append(answer)
            progress.at(f"answered in {answer.seconds:.0f} s", len(answers) / len(questions))
    return report(answers, asked_about, figure, output, program or "")
