"""Jobs of all programs, and reading them with a text changed."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs import JOBS as JOBS_BY_KIND
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.yaml_files import read_yaml

INPUTS = Path(__file__).parent / "inputs"


def data(file: str) -> dict[str, Any]:
    """The tables and texts in cases/ of the module ``file``, by name."""
    content: dict[str, Any] = read_yaml(INPUTS.with_name("cases") / f"{Path(file).stem}.yaml")
    return content


def tabled(file: str, test: str) -> pytest.MarkDecorator:
    """The parameters of a test: the rows of its table in cases/, for the module that a file is."""
    table = data(file)[test]
    return pytest.mark.parametrize(table["names"], table["rows"])


#: called without the search for kinds of jobs, which takes longer than they
READERS = {name: JOBS_BY_KIND.load(name) for name in JOBS_BY_KIND.names()}
JOBS = data(__file__)["JOBS"]
GPUS = {"70B": 64, "sizes": 16, "experts": 16}
#: what files leave to run time, by the kind
GIVEN = {"verl": {"1": "8", "2": "out"}}


def read(
    kind: str,
    names: Sequence[str],
    changed: dict[str, tuple[str, str]] | None = None,
    gpus: int | None = None,
) -> Job:
    """The job of input files, in some of which a text is another one."""
    files = []
    for name in names:
        text = (INPUTS / name).read_text()
        old, new = (changed or {}).get(name, ("", ""))
        assert old in text
        files.append(JobFile(INPUTS / name, (text.replace(old, new, 1) if old else text).encode()))
    return job_of(kind, files, gpus)


def job_of(kind: str, files: Sequence[JobFile], gpus: int | None) -> Job:
    """The job, which refuses what is unknown."""
    job = READERS[kind](JobFiles(files, gpus, "dgx-h100", GIVEN.get(kind, {})))
    if job is None:
        raise UserError(f"no job of {kind}")
    return replace(job, strict=True)


def settings(job: Job) -> dict[str, Any]:
    assert job.refusal() == ""
    return {setting.path: setting.value for setting in job.settings}
