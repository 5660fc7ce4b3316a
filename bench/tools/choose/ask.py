"""Asking: one search for each question, and what its winner's memory switches cost."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from spbench.bench.command_line.output import Output
from spbench.bench.command_line.progress import Progress
from spbench.bench.errors import UserError
from spbench.bench.measure import executor_at
from spbench.bench.measure import given as settings_given
from spbench.bench.tools.choose.advice import Advice
from spbench.bench.tools.choose.advise_report import report
from spbench.bench.tools.choose.asked import Asked, ask_for, kind_of
from spbench.bench.tools.choose.asking import Asking, Say, unheard, within
from spbench.bench.tools.choose.behind import varying
from spbench.bench.tools.choose.changed_figures import is_figure, swept_figures
from spbench.bench.tools.choose.layout_search import Search
from spbench.bench.tools.choose.possible import absence
from spbench.bench.tools.choose.question import Question, question, whole_numbers
from spbench.bench.tools.choose.ranking import SearchResult
from spbench.bench.tools.jobs.job_files import given_values


def answered(
    questions: Sequence[Question],
    jobs: int | None = None,
    say: Say = unheard,
    executor: str | None = None,
    asked_about: Mapping[str, int] = {},
) -> Iterator[Advice]:
    """The answers to questions, each as soon as it is there. If there are several, a question without any
    layout has an answer that says so.

    Args:
        jobs: how many workers; None: one for each usable core.
        say: takes what is being done, and the share that is done.
        executor: the address where layouts are traced, as of :func:`executor_at`; None: here.
        asked_about: ranks along axes; each answer says what became of layouts with them.

    Raises:
        UserError: no layout of the only question is possible.
    """
    elsewhere = executor_at(executor)
    with elsewhere as there, Asking(jobs, there) as asking:
        for number, each in enumerate(questions):
            say_here = within(say, number / len(questions), (number + 1) / len(questions))
            begun, cpu_s = time.monotonic(), time.process_time() + asking.cpu_s
            search = Search(each, asking, say_here)
            try:
                answer = Advice(each, search.run())
            except UserError as error:
                if len(questions) == 1:
                    raise
                answer = Advice(each, SearchResult(impossible=str(error)))
            if winner := answer.winner:
                answer = replace(answer, prices=search.whole.prices(winner))
            if asked_about:
                why = absence(each, answer.result, asked_about, search.every, search.too_large, search.bar)
                answer = replace(answer, absence=why)
            cpu_s = time.process_time() + asking.cpu_s - cpu_s
            yield replace(answer, seconds=time.monotonic() - begun, cpu_s=cpu_s)


def advise(
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
    given: tuple[str, ...],
    why: tuple[tuple[str, str], ...],
    program: str | None,
    figure: Path | None,
    output: Path | None,
    jobs: int | None,
    executor: str | None,
) -> Output:
    """The outcome of `spbench advise`, whose options the arguments are."""
    if kind_of(subject) == "model":
        lengths = seq_len or dict(changes).get("seq_len")
        ask_for({"--cluster NAME": cluster, "--gpus N": gpus, "--seq-len N": lengths}, subject[0])

    if batch is not None and batch_tokens is not None:
        raise UserError("--batch and --batch-tokens say the same: give one")
    asked_about = whole_numbers("--why", why)
    of_cluster = [(name, text) for name, text in changes if is_figure(name)]
    settings = settings_given([pair for pair in changes if pair not in of_cluster])
    if batch is not None:
        settings["batch"] = batch
    values = given_values(given)
    questions = []
    for length, n in itertools.product(seq_len or [None], gpus or [None]):
        own = settings if length is None else {**settings, "seq_len": length}
        asked = Asked(cluster, n, None, own, given=values)
        one = question(subject, asked, batch_tokens, only, without, fixed, program or "")
        one.check_axes("--why", asked_about)
        questions += [one.with_figures(figures) for figures in swept_figures(of_cluster)]
    varying([each.place for each in questions])
    answers = []
    with Progress() as progress:
        for answer in answered(questions, jobs, progress.at, executor, asked_about):
            answers.append(answer)
            progress.at(f"answered in {answer.seconds:.0f} s", len(answers) / len(questions))
    return report(answers, asked_about, figure, output, program or "")
