"""JUnit XML: a test case for each cell and each claim, for the test reports of Jenkins, GitLab and others.

Failures are differences for which the gate fails (worse, missing) and wrong results (numerics, mismatch);
errors are cells without a result (failed, timeout). Skipped are cells that cannot be run (unsupported), and,
with a base, cases that are not judged: new cells, cells measured on another machine, suites that were not
run. Metrics are properties of the suite, named CELL/METRIC, and lines in the output of their case, because
Jenkins' schema (junit-10.xsd of its xUnit plug-in) allows no properties within a case.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from xml.etree.ElementTree import Element, SubElement, indent, tostring

from spbench.bench.command_line.record_forms import shown_band
from spbench.bench.measure import with_band
from spbench.bench.row import Row
from spbench.bench.tools.changes.export_command import Exported, ExportRequest, integral
from spbench.bench.tools.changes.judgement import Suite
from spbench.bench.tools.changes.judgement_report import shown_difference
from spbench.bench.tools.changes.metrics import Difference, readings
from spbench.plots.series import grouped

#: the XML element that a status adds to a test case, with or without a base
ELEMENTS = {
    "failed": "error",
    "timeout": "error",
    "numerics": "failure",
    "mismatch": "failure",
    "unsupported": "skipped",
}

#: characters that XML cannot contain, even escaped
_NO_CHARACTERS = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def export(request: ExportRequest) -> Exported:
    """One document with two test suites for each suite of results: one of its cells, one of its claims."""
    root = Element("testsuites", name="spbench")
    for suite in request.suites:
        differences = grouped(suite.judgement.differences if suite.judgement else (), lambda d: d.where)
        _cells(root, suite, differences)
        _claims(root, suite, differences)
    for name in request.not_run:
        element = SubElement(root, "testsuite", name=name)
        _skip(SubElement(element, "testcase", name=name, classname=name, time="0"), "not run")
    for element in root.iter():
        element.text = element.text and _NO_CHARACTERS.sub("?", element.text)
        element.attrib.update({name: _NO_CHARACTERS.sub("?", value) for name, value in element.items()})
    for element in root:
        _count(element)
    for total in ("tests", "failures", "errors"):
        root.set(total, str(sum(int(suite.attrib[total]) for suite in root)))
    indent(root, " ")
    return Exported('<?xml version="1.0" encoding="UTF-8"?>\n' + tostring(root, encoding="unicode") + "\n")


def _cells(root: Element, suite: Suite, differences: Mapping[str, Sequence[Difference]]) -> None:
    element = SubElement(root, "testsuite", name=suite.name)
    properties = SubElement(element, "properties")
    origins = {"head": suite.shown_origin}
    origins |= {"base": suite.base.shown_origin} if suite.base else {}
    for name, value in origins.items():
        SubElement(properties, "property", name=name, value=value)
    rows = suite.cells
    gone = [key for key in (suite.base.cells if suite.base else ()) if key not in rows]
    for key in (*rows, *gone):
        row = rows.get(key)
        case = _case(element, key, suite.name, row)
        read = readings(row) if row is not None else {}
        lines = {name: f"{integral(number.value)} {number.unit}" for name, number in read.items()}
        for name, text in lines.items():
            SubElement(properties, "property", name=f"{key}/{name}", value=text)
        _verdict(case, row, differences.get(key, ()))
        if suite.base and len(case) == 0 and (why := _not_judged(suite, key)):
            _skip(case, why)
        if row is not None and (band := with_band(row)["measurement"]).get("band"):
            lines["step time"] = f"{shown_band(band)} ({band['band']})"
        said = {"status": _status(row), **lines}
        SubElement(case, "system-out").text = "\n".join(f"{name}: {text}" for name, text in said.items())


def _claims(root: Element, suite: Suite, differences: Mapping[str, Sequence[Difference]]) -> None:
    of_base = (suite.base.claims if suite.base else None) or {}
    names = dict.fromkeys(" ".join(filter(None, name[:2])) for name in [*(suite.claims or {}), *of_base])
    if not names:
        return
    element = SubElement(root, "testsuite", name=f"{suite.name} claims")
    for name in names:
        case = _case(element, name, f"{suite.name}.claims", None)
        _verdict(case, None, differences.get(name, ()))
        if suite.base is None or (suite.judgement and name in suite.judgement.unjudged):
            _skip(case, "not judged")


def _case(suite: Element, name: str, classname: str, row: Row | None) -> Element:
    elapsed = f"{(row.get('elapsed_s') if row else None) or 0.0:.3f}"
    return SubElement(suite, "testcase", name=name, classname=classname, time=elapsed)


def _verdict(case: Element, row: Row | None, differences: Iterable[Difference]) -> None:
    """Add at most one element to a test case: an error, a failure or "skipped" by the row's status, or one
    failure that lists all differences for which the gate fails."""
    status = _status(row)
    wrong = ELEMENTS.get(status)
    worse = [difference for difference in differences if difference.fails]
    if wrong == "error" or (wrong and not worse):
        reason = str((row and row.get("reason")) or status)
        SubElement(case, wrong, type=status, message=reason)
    elif worse:
        lines = list(map(_line, worse))
        SubElement(case, "failure", type=worse[0].verdict, message=lines[0]).text = "\n".join(lines)


def _not_judged(suite: Suite, key: str) -> str:
    """Why the gate did not judge a cell in full; "" if the gate did."""
    assert suite.base
    assert suite.judgement
    if key not in suite.base.cells:
        return "not judged: the cell is new"
    return (
        "; ".join(["not judged in full", *suite.judgement.notes]) if key in suite.judgement.unjudged else ""
    )


def _skip(case: Element, why: str) -> None:
    SubElement(case, "skipped", type="not judged", message=why)


def _status(row: Row | None) -> str:
    return str(row["status"]) if row is not None else "missing"


def _line(difference: Difference) -> str:
    shown = shown_difference(difference)
    change = f" ({shown.change})" if shown.change else ""
    why = f"; {difference.why}" if difference.why else ""
    return (
        f"{difference.verdict}: {difference.quantity} {shown.base or 'none'} -> {shown.new or 'none'}{change}"
        f"{why}"
    )


def _count(suite: Element) -> None:
    cases = suite.findall("testcase")
    suite.set("tests", str(len(cases)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        suite.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    suite.set("time", f"{sum(float(case.attrib['time']) for case in cases):.3f}")
