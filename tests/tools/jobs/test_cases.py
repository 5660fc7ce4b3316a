"""Jobs whose files are changed in one place: the settings that they make, or why they are refused."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile
from spbench.bench.yaml_files import read_yaml
from tests.tools.jobs.job_inputs import GPUS, INPUTS, JOBS, job_of

CASES = read_yaml(INPUTS.with_name("cases") / "test_cases.yaml")
#: by what a row must have one: a row without any would hold nothing
EXPECTED = {"settings", "without", "refused"}


def job_of_row(row: Mapping[str, Any]) -> Job:
    kind, names = JOBS[row["job"]] if "job" in row else (row["kind"], [row["file"]])
    texts = {name: row["text"] if "text" in row else (INPUTS / name).read_text() for name in names}
    for old, new in row.get("changes", ()):
        name = next(name for name in names if old in texts[name])
        texts[name] = texts[name].replace(old, new, 1)
    gpus = row.get("gpus", GPUS.get(row.get("job", ""), 8))
    return job_of(kind, [JobFile(INPUTS / name, text.encode()) for name, text in texts.items()], gpus)


@pytest.mark.parametrize(
    ("strict", "row"), [(kind == "strict", row) for kind in ("strict", "lenient") for row in CASES[kind]]
)
def test_a_job_is_what_its_files_say(strict: bool, row: Mapping[str, Any]) -> None:
    assert EXPECTED & row.keys()
    job = replace(job_of_row(row), strict=strict)
    if "refused" in row:
        with pytest.raises(UserError, match=row["refused"]):
            job.cell()
        return
    cell, made = job.cell(), {setting.path: setting.value for setting in job.settings}
    assert made | row.get("settings", {}) == made
    assert not {*row.get("without", "").split()} & made.keys()
    assert row.get("program", "") in job.program
    assert row.get("trains", cell.program) == cell.program
    assert all(any(text in each for each in job.warnings) for text in row.get("warns", ()))
    assert any(row.get("approximated", "") in each.detail for each in job.arguments)
    outcomes = {each.name: [each.outcome, each.missing] for each in job.arguments}
    assert outcomes | row.get("arguments", {}) == outcomes
