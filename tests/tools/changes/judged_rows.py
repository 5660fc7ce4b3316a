"""Rows of three cells with their claims, in folders, and changes of them."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.result_files import read_results
from spbench.bench.tools.papers.comparison import Comparison
from tests.tools.changes.rows import CLAIM
from tests.tools.changes.rows import folder as results_folder
from tests.tools.commands.conftest import command_line, spbench

__all__ = ["command_line", "spbench"]

Change = Callable[[list[dict[str, Any]]], Any]


def row(name: str, **measured: Any) -> dict[str, Any]:
    sent = [{"phase": "forward", "sent_bytes": 0.1}, {"phase": "backward", "sent_bytes": 0.2}]
    sent += [{"phase": "gradient_sync", "sent_bytes": 0.3}]
    measurement = {
        "peak_memory_bytes": 1000,
        "reserved_memory_bytes": 2000,
        "step_time_s": 2.0,
        "answer": 64,
        "communication": sent,
        "formula_difference": [],
    }
    return {
        "key": name,
        "cell": {"engine": "distributed" if "gloo" in name else "virtual"},
        "status": "ok",
        "reason": "",
        "measurement": measurement | measured,
        "elapsed_s": 1.5,
        "time": "2026-01-01T00:00:00+00:00",
        "provenance": {"host": "here", "commit": "a"},
    }


ROWS = [row("a"), row("b"), row("c/gloo")]


ENTRY = replace(CLAIM, claim="ratio", variant="v")

TABLE = replace(
    ENTRY,
    claim="table",
    denominator="",
    published=None,
    reproduced=None,
    relative_error=None,
    status_published="oom",
    status_reproduced="oom",
)


def folder(path: Path, rows: list[dict[str, Any]], *entries: Comparison) -> Path:
    """A folder of results, whose claims are the two above unless said otherwise."""
    return results_folder(path, rows, *(entries or (ENTRY, TABLE)))


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return folder(tmp_path / "base", ROWS)


@pytest.fixture
def changed(tmp_path: Path, base: Path) -> Callable[[Change], list[tuple[str, str, str]]]:
    """What the gate says, worst first, when a change is made to the rows."""

    def judged(change: Change) -> list[tuple[str, str, str]]:
        rows = copy.deepcopy(ROWS)
        change(rows)
        found = judge(read_results(base), read_results(folder(tmp_path / "new", rows)))
        assert found.fails == any(d.verdict in ("worse", "missing") for d in found.differences)
        return [(d.verdict, d.where, d.quantity) for d in found.differences]

    return judged
