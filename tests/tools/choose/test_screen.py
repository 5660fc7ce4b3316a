"""What a terminal shows of `spbench fit`: the verdict and the first change on a screen of 40 lines."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from spbench.bench.cell import Cell
from spbench.bench.command_line import options
from spbench.bench.command_line.output import Output, View
from spbench.bench.command_line.progress import Progress
from spbench.bench.tools.choose import proofs
from spbench.bench.tools.choose.suggestions import Change, single_changes
from tests.slow import slow
from tests.terminal import faults_of, screen_of
from tests.tools.choose.test_fit import TINY
from tests.tools.commands.conftest import Run

MOST_LINES = 40


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[Output]:
    """The outputs of the commands that are run, which are not printed."""
    found: list[Output] = []
    forms = SimpleNamespace(load=lambda form: lambda output, out, err: found.append(output))
    monkeypatch.setattr(options, "FORMS", forms)
    return found


def test_the_verdict_comes_before_changes_are_tried(
    fit: Run,
    card: Callable[[int], str],
    shown: list[Output],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def recomputed(cell: Cell) -> list[Change]:
        return [each for each in single_changes(cell) if {*each.settings} == {"model_options.recompute"}]

    monkeypatch.setattr(proofs, "single_changes", recomputed)
    said: list[str] = []
    monkeypatch.setattr(Progress, "keep", lambda self, text: said.append(text))
    monkeypatch.setattr(Progress, "at", lambda self, text, share: said.append(text))
    two_layers = (*TINY[:-1], "model_options.layers=2", "--cluster", card(10), "--seq-len", "1K")
    assert fit(*two_layers)[0] == 0
    verdict = "\n".join(str(shown[0].sections[0]).splitlines()[:2])
    assert verdict.startswith("fits: no")
    assert any("recompute" in text for text in said[said.index(verdict) :])
    assert not any("recompute" in text for text in said[: said.index(verdict)])


@pytest.mark.parametrize(
    ("mib", "more"),
    [
        slow(100, ("--seq-len", "4K")),
        (400, ("--seq-len", "1K", "--pp", "2", "--micro-batch", "1")),
    ],
)
def test_an_answer_fits_a_screen(
    fit: Run,
    card: Callable[[int], str],
    few_changes: None,
    shown: list[Output],
    mib: int,
    more: tuple[str, ...],
) -> None:
    assert fit(*TINY, "--cluster", card(mib), *more)[0] == 0
    (output,) = shown
    assert faults_of(output, MOST_LINES) == []
    assert faults_of(output, view=View(wide=True, details=True)) == []
    screen = screen_of(output, 80)
    assert screen.startswith("fits: ")
    assert "--details shows: " in screen
    assert "Memory of each rank class at each step, of" in screen
    assert "Memory of each rank class" in screen_of(output, 80, View(details=True))
