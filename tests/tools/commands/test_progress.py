"""Progress: one line on a terminal, a line a tenth elsewhere, nothing with --quiet, and faults always."""

from __future__ import annotations

import click
import pytest

from spbench.bench.command_line.progress import Progress, message, remark, silence
from tests.terminal import Terminal, plain

STEPS = 100


def work(steps: int = STEPS, fault: int | None = None) -> None:
    with Progress() as progress:
        progress.expect(steps)
        for number in range(1, steps + 1):
            progress.now(f"case {number}")
            progress.step(f"case {number}: green", is_fault=number == fault)


def test_elsewhere_it_is_a_line_a_tenth_and_one_for_a_fault(capsys: pytest.CaptureFixture[str]) -> None:
    work(fault=3)
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        "[3/100] case 3: green",
        *(f"[{number}/100] case {number}: green" for number in range(10, 101, 10)),
    ]
    work(steps=3)
    assert len(capsys.readouterr().err.splitlines()) == 3


def test_a_share_is_told_where_steps_are_not_counted(capsys: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        for share in (0.05, 0.3, 0.35, 0.3, 1.0):
            progress.at("looking", share)
    assert capsys.readouterr().err.splitlines() == ["[30%] looking", "[100%] looking"]


def test_on_a_terminal_it_is_one_line_but_for_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    shown = {}
    for fault in (None, 3):
        terminal = Terminal()
        monkeypatch.setattr("sys.stderr", terminal)
        work(fault=fault)
        shown[fault] = plain(terminal.getvalue())
    assert "100%, 0 s left" in shown[None]
    assert "green" not in shown[None]
    assert shown[3].count("\n") == shown[None].count("\n") + 1
    assert shown[None].count("\n") <= 1
    assert "[3/100] case 3: green" in shown[3]


def test_quiet_shows_faults_and_messages_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with click.Context(click.Command("any")) as context:
        silence(context, click.Option(["--quiet"]), True)
        work(fault=3)
        remark("what is about to be done")
        message("a warning")
    assert capsys.readouterr().err.splitlines() == ["[3/100] case 3: green", "a warning"]
