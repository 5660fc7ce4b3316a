"""The packaged scenarios, each loaded once in a process of tests: all of them take seconds."""

from functools import cache

import pytest

from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.tools.papers import sources
from spbench.bench.tools.papers.answer import load_scenario

packaged_scenario = cache(load_scenario)


@cache
def scenarios_of_papers() -> list[tuple[sources.Paper, list[Scenario]]]:
    """Every paper with its scenarios."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sources, "load_scenario", packaged_scenario)
        return sources.scenarios_of(sources.ALL)
