"""JUnit XML, as a parser reads it, and as Jenkins wants it."""

from __future__ import annotations

from pathlib import Path

import junitparser
import pytest

from tests.tools.changes.conftest import Judge
from tests.tools.changes.reading import cases, tables
from tests.tools.changes.rows import BASE, made_up, one_byte_more, planted
from tests.tools.commands.conftest import Run


def test_junit_tells_errors_failures_and_skipped_apart(results: Path, command_line: Run) -> None:
    code, out, _ = command_line("export", "--to", "junit", str(results))
    found = cases(out)
    kinds = {name: type(case.result[0]).__name__ for name, case in found.items() if case.result}
    assert (code, kinds) == (0, {"f/unsupported": "Skipped", "g/failed": "Error"})
    assert found["g/failed"].result[0].message == "planted: failed"
    suite = next(iter(junitparser.JUnitXml.fromstring(out.encode())))
    assert (suite.tests, suite.failures, suite.errors, suite.skipped) == (7, 0, 1, 1)
    assert suite.time == pytest.approx(7 * 1.5)
    properties = {prop.name: prop.value for prop in suite.properties()}
    assert properties["a/exact/peak_memory_bytes"] == "15509396481 bytes"
    assert properties["head"] == "0123456789ab, torch 2.13.0, any machine and here"
    assert "peak_memory_bytes: 15509396481 bytes" in found["a/exact"].system_out


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
