"""Asking: one search for each question."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator

from spbench.bench.advise.advice import Advice
from spbench.bench.advise.looks import look
from spbench.bench.advise.question import Question
from spbench.bench.advise.search import Search
from spbench.bench.fit.answers import Answers


def answered(
    questions: Iterable[Question], jobs: int | None = None, say: Callable[[str], None] = lambda text: None
) -> Iterator[Advice]:
    """The answers, each as soon as it is there.

    Args:
        jobs: workers; None: one a usable core.
        say: told what is done.

    Raises:
        UserError: no layout of a question is possible.
    """
    with Answers(look, jobs) as answers:
        for question in questions:
            begun = time.monotonic()
            found = Search(question, answers, say).run()
            yield Advice(question, found, time.monotonic() - begun)
