"""A scenario that answers to a paper, for the tests of `spbench reproduce`."""

from pathlib import Path

import pytest

from tests.bench.fakes import SCENARIO
from tests.grid import data
from tests.tools.commands.conftest import Run

TABLE = data(__file__)["TABLE"]
PUBLISHED = data(__file__)["PUBLISHED"]
LOOKED_AT = data(__file__)["LOOKED_AT"]
SMALL = SCENARIO + LOOKED_AT + TABLE


@pytest.fixture
def spbench(spbench: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """As in other tests of commands, where small.yaml is another and the only scenario."""
    monkeypatch.setattr(
        "spbench.bench.tools.papers.sources.packaged", lambda package: {"small.yaml": Path("small.yaml")}
    )
    Path("small.yaml").write_text(SMALL)
    Path("t1.csv").write_text(PUBLISHED)
    made_by(monkeypatch, "abc")
    return spbench


def made_by(monkeypatch: pytest.MonkeyPatch, commit: str) -> None:
    """Let rows be made by the code of that commit."""
    monkeypatch.setattr(
        "spbench.bench.measure.sweep.sweep.provenance", lambda: {"torch": "2", "commit": commit}
    )


def refuses(spbench: Run, arguments: str, message: str) -> None:
    code, out, err = spbench("reproduce", *arguments.split())
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert message in err
    assert not Path("results/runs").exists()
