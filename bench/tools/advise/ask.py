"""Asking: one search for each question."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence

from spbench.bench.errors import UserError
from spbench.bench.measure.sweep.executor import Executor
from spbench.bench.tools.advise.advice import Advice
from spbench.bench.tools.advise.kernels import by_kernel
from spbench.bench.tools.advise.layout_search import BEHIND, Search
from spbench.bench.tools.advise.looks import Looks
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.advise.search_findings import Found
from spbench.bench.tools.advise.switch_prices import prices
from spbench.bench.tools.fit.answers import Say, unheard, within


def answered(
    questions: Sequence[Question],
    jobs: int | None = None,
    say: Say = unheard,
    executor: Executor | None = None,
    asked_about: Mapping[str, int] = {},
) -> Iterator[Advice]:
    """The answers, each as soon as it is there. Of several questions one without any layout has an answer
    that says so.

    Args:
        jobs: workers; None: one a usable core.
        say: told what is done, and the share that is behind.
        executor: where layouts are traced; None: here.
        asked_about: ranks along axes, of which each answer says what became of them.

    Raises:
        UserError: no layout of the only question is possible.
    """
    with Looks(jobs, executor) as answers:
        for number, question in enumerate(questions):
            told = within(say, number / len(questions), (number + 1) / len(questions))
            begun, cpu_s = time.monotonic(), time.process_time() + answers.cpu_s
            try:
                found = Search(question, answers, told, asked_about).run()
            except UserError as error:
                if len(questions) == 1:
                    raise
                found = Found(impossible=str(error))
            if winner := Advice(question, found, 0.0).winner:
                told("what its memory switches and other attention kernels cost", BEHIND["all"])
                found.prices = prices(question, winner.cell, answers)
                found.by_kernel = by_kernel(winner.cell, answers)
            cpu_s = time.process_time() + answers.cpu_s - cpu_s
            yield Advice(question, found, time.monotonic() - begun, cpu_s)
