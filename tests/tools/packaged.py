"""The packaged scenarios, each loaded once in a process of tests: all of them take seconds."""

from functools import cache
from pathlib import Path

import pytest
from pandas import DataFrame

from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.tools.papers import document, past_errors, sources
from spbench.bench.tools.papers.answer import load_scenario

packaged_scenario = cache(load_scenario)


@cache
def scenarios_of_papers() -> list[tuple[sources.Paper, list[Scenario]]]:
    """Every paper with its scenarios."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "load_scenario", packaged_scenario)
        return sources.scenarios_of(sources.ALL)


def committed_times() -> DataFrame:
    """The published times beside ours that count, of the checkout's files of `spbench reproduce`."""
    names = (*sources.papers(), *past_errors.WITHOUT_RATES)
    files = (document.DETAILS_FOLDER / f"{name}.csv" for name in names)
    return past_errors.counted_times(filter(Path.exists, files))
