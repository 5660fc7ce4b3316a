"""The Markdown of a pull request and the JUnit file, as their parsers read them, and compare's exit code."""

import copy
import json
import re
from pathlib import Path
from typing import Any

import junitparser
import pytest
from markdown_it import MarkdownIt

from spbench.bench.measure.engines.run_cell import measure, run_cell
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.row import finite
from spbench.bench.tools.changes.to_reviews import LIMIT, MARK
from tests.cells import make_cell
from tests.tools.changes.conftest import Judge
from tests.tools.changes.rows import BASE, commit_all, folder, made_up, one_byte_more, planted
from tests.tools.commands.conftest import Run


def tables(markdown: str) -> list[list[list[str]]]:
    """The cells of the lines of each table, without the header, as a Markdown parser finds them."""
    found: list[list[list[str]]] = []
    in_body = False
    for token in MarkdownIt("commonmark", {"html": True}).enable("table").parse(markdown):
        if token.type in ("tbody_open", "tbody_close"):
            in_body = token.type == "tbody_open"
            found += [[]] if in_body else []
        elif token.type == "tr_open" and in_body:
            found[-1].append([])
        elif token.type == "inline" and in_body:
            found[-1][-1].append("".join(child.content for child in token.children or ()))
    return found


def cases(document: str) -> dict[str, junitparser.TestCase]:
    """The test cases by name."""
    return {case.name: case for suite in junitparser.JUnitXml.fromstring(document.encode()) for case in suite}


# -- what is worse is in all three -----------------------------------------------------------------------


def test_a_kernel_that_is_5_percent_slower(judged: Judge, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through the simulator: the kernel of a step that takes longest."""
    kernels = Costs.kernels

    def slower(self: Costs, program: Any) -> Any:
        seconds = kernels(self, program)
        seconds[seconds.argmax()] *= 1.05
        return seconds

    cell = make_cell("bert-tiny", "tensor_parallel", {"tp": 2}, 2, 8, "fp32", cluster="piz-daint-p100")
    before = finite(as_row(cell, measure(run_cell, cell)))
    monkeypatch.setattr(Costs, "kernels", slower)
    after = finite(as_row(cell, measure(run_cell, cell)))
    code, markdown, junit = judged([after], [before])
    assert code == 1
    ((verdict, where, quantity, *_, change, moved),) = tables(markdown)[0]
    assert (verdict, where, quantity) == ("❌ worse", cell.key, "step_time_s")
    assert 0 < float(change.rstrip("%")) <= 5
    assert re.fullmatch(r"(memory-bound operators|matmuls) \+[0-9.]+ us", moved)
    (failure,) = cases(junit)[cell.key].result
    assert "step_time_s" in failure.message


# -- Markdown --------------------------------------------------------------------------------------------


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
    rests = {"step_time_s": 2.34567, "tokens_per_s": 12345.6, "rates": "sourced", "bound": "matmul"}
    made = folder(tmp_path / "alone", [made_up("a", **rests)])
    _, shown, _ = command_line("export", "--to", "markdown", str(made))
    assert re.search(r"\| 2\.35 s [-+±]\d+%", shown)
    assert "| 12300 |" in shown
    _, shown, _ = command_line("export", "--to", "junit", str(made))
    assert "step time: 2.35 s" in shown
    assert "(sourced rates, matmul: " in shown
    _, shown, _ = command_line("export", "--to", "hud", str(made))
    (metric,) = [r["metric"] for r in json.loads(shown) if r["metric"]["name"] == "step_time_s"]
    assert float(metric["extra_info"]["step_time_low_s"]) <= 2.34567


# -- JUnit XML -------------------------------------------------------------------------------------------


#: junit-10.xsd of Jenkins' xUnit plug-in, of 2025: what may stand in what, and what must be said
WITHIN = {
    "testsuites": {"testsuite"},
    "testsuite": {"testsuite", "properties", "testcase", "system-out", "system-err"},
    "properties": {"property"},
    "testcase": {"skipped", "error", "failure", "system-out", "system-err"},
}
REQUIRED = {
    "testsuite": {"name", "tests", "failures", "errors"},
    "testcase": {"name"},
    "property": {"name", "value"},
}
ALLOWED = {
    "testsuites": {"name", "time", "tests", "failures", "errors"},
    "testsuite": {"name", "tests", "failures", "errors", "time", "skipped", "timestamp", "hostname"},
    "testcase": {"name", "time", "classname"},
    "property": {"name", "value"},
    **{tag: {"type", "message"} for tag in ("failure", "error", "skipped")},
}


def test_junit_is_what_jenkins_schema_allows(judged: Judge, results: Path, command_line: Run) -> None:
    from xml.etree import ElementTree

    for document in (
        judged(planted(one_byte_more), BASE)[2],
        command_line("export", "--to", "junit", str(results))[1],
    ):
        for element in ElementTree.fromstring(document.encode()).iter():
            assert {child.tag for child in element} <= WITHIN.get(element.tag, set())
            assert REQUIRED.get(element.tag, set()) <= set(element.attrib) <= ALLOWED.get(element.tag, set())


def test_words_that_xml_and_tables_cannot_have(judged: Judge) -> None:
    odd = made_up("a|b") | {"status": "failed", "reason": "x < y & \x1b[0m\x00 | z"}
    _, markdown, junit = judged([odd], [made_up("a|b")])
    assert tables(markdown)[0][0][:3] == ["❌ worse", "a|b", "status"]
    assert cases(junit)["a|b"].result[0].message == "x < y & ?[0m? | z"
