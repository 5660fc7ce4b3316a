"""Asking: one search for each question, and what its winner's memory switches cost."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace

from spbench.bench.errors import UserError
from spbench.bench.measure.sweep.executor import opened
from spbench.bench.tools.advise.advice import Advice
from spbench.bench.tools.advise.layout_search import BEHIND, Search
from spbench.bench.tools.advise.possible import absence
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.advise.ranking import SearchResult
from spbench.bench.tools.advise.switch_prices import by_kernel, prices
from spbench.bench.tools.fit.asking import Asking, Say, unheard, within


def answered(
    questions: Sequence[Question],
    jobs: int | None = None,
    say: Say = unheard,
    executor: str | None = None,
    asked_about: Mapping[str, int] = {},
) -> Iterator[Advice]:
    """The answers, each as soon as it is there. Where there are several questions, one without any layout has
    an answer that says so.

    Args:
        jobs: workers; None: one a usable core.
        say: told what is done, and the share that is behind.
        executor: the address where layouts are traced, as of :func:`opened`; None: here.
        asked_about: ranks along axes, of which each answer says what became of them.

    Raises:
        UserError: no layout of the only question is possible.
    """
    elsewhere = nullcontext() if executor is None else opened(executor)
    with elsewhere as there, Asking(jobs, there) as asking:
        for number, question in enumerate(questions):
            say_here = within(say, number / len(questions), (number + 1) / len(questions))
            begun, cpu_s = time.monotonic(), time.process_time() + asking.cpu_s
            search = Search(question, asking, say_here)
            try:
                answer = Advice(question, search.run())
            except UserError as error:
                if len(questions) == 1:
                    raise
                answer = Advice(question, SearchResult(impossible=str(error)))
            if winner := answer.winner:
                say_here("what its memory switches and other attention kernels cost", BEHIND["all"])
                switches = prices(question, winner.cell, asking)
                answer = replace(answer, prices=switches, by_kernel=by_kernel(winner.cell, asking))
            if asked_about:
                why = absence(question, answer.result, asked_about, search.every, search.too_large)
                answer = replace(answer, absence=why)
            cpu_s = time.process_time() + asking.cpu_s - cpu_s
            yield replace(answer, seconds=time.monotonic() - begun, cpu_s=cpu_s)
