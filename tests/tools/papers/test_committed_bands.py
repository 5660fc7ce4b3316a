"""The committed intervals, errors of memory and evidence, and the parts of pages that come from them."""

import json
from pathlib import Path

import pytest

from spbench.bench import measure
from spbench.bench.measure.trust.bands import MEMORY_ERRORS_FILE, packaged_errors, packaged_model
from spbench.bench.measure.trust.fit_certainty import Evidence, _border_of, packaged_evidence
from spbench.bench.tools.papers import document, past_errors, reproductions
from spbench.bench.tools.papers.paper_findings import markdown
from spbench.bench.tools.papers.reproduction import Reproduction
from tests.tools.packaged import committed_times, packaged_scenario

ROOT = Path(__file__).parents[3]


def test_they_are_what_the_committed_files_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """`spbench reproduce bands --write` makes them; new results without new bands are found out."""
    monkeypatch.chdir(ROOT)
    written: dict[str, str] = {}
    for module in (measure, reproductions):
        monkeypatch.setattr(module, "load_scenario", packaged_scenario)
    monkeypatch.setattr(
        reproductions, "write_whole", lambda path, content: written.update({path.name: content})
    )
    output = reproductions.fit_bands(Reproduction("bands", Path("results", "reproduction")))
    assert json.loads(written[MEMORY_ERRORS_FILE]) == packaged_errors()
    assert Evidence(**json.loads(written[Evidence.FILE])) == packaged_evidence()
    assert output.content["model"] == packaged_model().as_dict()
    assert markdown(output.records) in document.TIMES_PAGE.read_text()
    lines = past_errors.class_lines(committed_times())
    assert markdown(lines) in document.TRUST_PAGE.read_text()
    assert markdown(output.content["verdicts"]) in document.SUMMARY_PAGE.read_text()
    (datasheet,) = (line for line in lines if line["rates"] == "datasheet")
    questions = (ROOT / "docs/questions.md").read_text()
    assert f"Times from datasheets only are {float(datasheet['median error'][:-1]):.0f}% off" in questions
    trained, oom = output.content["verdicts"]
    said = f"says *no* for {oom['no']} of these runs, *tight* for {oom['tight']} and *fits* for one."
    assert said in document.TRUST_PAGE.read_text()
    assert (oom["fits"], trained["fits"] >= 0.85 * trained["runs"]) == (1, True)
    assert [_border_of(name) for name in ("zero1", "unwrapped")] == pytest.approx([0.9, 0.76], abs=5e-3)
