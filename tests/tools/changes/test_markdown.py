"""Markdown, as a parser reads it."""

from __future__ import annotations

import copy
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from spbench.bench.tools.changes.to_markdown import LIMIT, MARK
from tests.tools.changes.conftest import Judge
from tests.tools.changes.reading import cases, tables
from tests.tools.changes.rows import BASE, CLAIM, Rows, commit_all, folder, made_up, one_byte_more, planted
from tests.tools.commands.conftest import Run


def test_the_worst_is_first_and_what_is_better_is_folded(judged: Judge) -> None:
    def change(rows: Rows) -> None:
        rows[0]["measurement"] |= {"peak_memory_bytes": 16e9, "step_time_s": 0.2}
        rows[1]["measurement"] |= {"peak_memory_bytes": 31e9}

    _, markdown, junit = judged(planted(change), BASE)
    failing, better, claims = tables(markdown)
    assert [line[1] for line in failing] == ["b", "a"]
    assert [line[:3] for line in better] == [["✅ better", "a", "step_time_s"]]
    assert "<details><summary>1 better</summary>" in markdown
    assert claims == [["predicted", "1", "10.00%", "10.00%"]]
    assert "2 worse, 1 better, 1 cells unchanged, 1 claims unchanged." in markdown
    assert "step_time_s" not in cases(junit)["a"].result[0].message


def test_a_worse_error_against_a_published_number(tmp_path: Path, command_line: Run, judged: Judge) -> None:
    base = folder(tmp_path / "base" / "suite", BASE, CLAIM)
    new = folder(tmp_path / "suite", BASE, replace(CLAIM, reproduced=2.4, relative_error=0.2))
    markdown = command_line("export", "--to", "markdown", str(new), "--base", str(base.parent))[1]
    assert tables(markdown) == [
        [["❌ worse", "a ratio", "error", "0.1", "0.2", "+100.000%", "published 2, ours 2.2 -> 2.4"]],
        [["predicted", "1", "10.00%", "20.00%"]],
    ]
    junit = cases(command_line("export", "--to", "junit", str(new), "--base", str(base))[1])
    assert junit["a ratio"].result[0].type == "worse"


def test_the_mark_is_the_first_line_always(judged: Judge, results: Path, command_line: Run) -> None:
    alone = command_line("export", "--to", "markdown", str(results))[1]
    assert {text.splitlines()[0] for text in (alone, judged(BASE, BASE)[1])} == {MARK}
    assert [line[1] for line in tables(alone)[0]] == ["failed", "unsupported", "oom", "oom", "ok", "ok", "ok"]


def test_the_comment_stays_below_githubs_limit_and_counts_the_rest(judged: Judge) -> None:
    many = [made_up(f"{'a/long/key/' * 30}{number:04}") for number in range(220)]
    worse = copy.deepcopy(many)
    for number, row in enumerate(worse):
        row["measurement"]["peak_memory_bytes"] += number
    _, markdown, _ = judged(worse, many)
    assert LIMIT - 500 < len(markdown) <= LIMIT
    shown = tables(markdown)[0]
    assert shown[0][1].endswith("0219")
    assert f"{219 - len(shown)} more lines had no room." in markdown


def test_both_commits_and_a_change_that_was_meant(tmp_path: Path, command_line: Run) -> None:
    """As on a pull request with another baseline: the gate is quiet, the comment says what was meant."""
    repository = tmp_path / "repository"
    before = folder(repository / "baseline" / "suite", [canonical(row) for row in BASE])
    first = commit_all(repository)
    previous = folder(tmp_path / "previous" / "suite", [canonical(row) for row in BASE])
    now = planted(one_byte_more)
    folder(before, [canonical(row) for row in now])
    second = commit_all(repository)
    new = folder(tmp_path / "suite", now)
    arguments = ("export", "--to", "markdown", str(new), "--base", str(before.parent), "--commit", "f" * 40)
    code, markdown, err = command_line(*arguments, "--previous-base", str(previous.parent))
    assert code == 0, err
    assert "## spbench: not worse" in markdown
    assert f"Head: {'f' * 12}, torch 2.13.0, any machine" in markdown
    assert f"Base: {second[:12]}, any machine" in markdown
    assert "**Meant:** this change brings another baseline of suite" in markdown
    assert [line[1:] for line in tables(markdown)[0]] == [
        ["a", "sent_bytes", "6,383,206,414", "6,383,206,415", "+1", "messages in forward +1 byte"]
    ]
    assert first[:12] not in markdown
    assert "Meant" not in command_line(*arguments, "--previous-base", str(before.parent))[1]
    assert "Meant" not in command_line(*arguments)[1]


def canonical(row: dict[str, Any]) -> dict[str, Any]:
    """As baselines have it."""
    from spbench.bench.tools.changes.baseline_command import canonical as of_baseline

    return of_baseline(row)


def test_results_alone_have_times_with_intervals_and_rates_of_three_digits(
    tmp_path: Path, command_line: Run
) -> None:
    rests = {"step_time_s": 2.34567, "tokens_per_s": 12345.6, "rates": "sourced", "bound": "products"}
    made = folder(tmp_path / "alone", [made_up("a", **rests)])
    _, shown, _ = command_line("export", "--to", "markdown", str(made))
    assert re.search(r"\| 2\.35 s [-+±]\d+%", shown)
    assert "| 12300 |" in shown
    _, shown, _ = command_line("export", "--to", "junit", str(made))
    assert "step time: 2.35 s" in shown
    assert "(sourced rates, products: " in shown
    _, shown, _ = command_line("export", "--to", "hud", str(made))
    (metric,) = [r["metric"] for r in json.loads(shown) if r["metric"]["name"] == "step_time_s"]
    assert float(metric["extra_info"]["step_time_low_s"]) <= 2.34567
