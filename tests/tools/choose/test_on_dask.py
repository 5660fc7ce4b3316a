"""`spbench advise` whose layouts are traced by the workers of a real Dask cluster."""

import importlib.util
import json
from pathlib import Path

import pytest

from spbench.bench.files import CACHE_FOLDER
from tests.bench.hosts import needs_proc
from tests.measure.processes.command_process import ROOT
from tests.measure.processes.dask_processes import DaskProcesses
from tests.tools.choose.questions import MODEL
from tests.tools.commands.conftest import Run

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        importlib.util.find_spec("distributed") is None, reason="needs dask[distributed], the extra 'cluster'"
    ),
    needs_proc,
    pytest.mark.usefixtures("no_savings"),
]


def test_it_answers_as_on_one_machine(advise: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with a figure of the cluster that the workers' files do not have."""
    question = (
        *(MODEL, "--cluster", "dgx-a100", "--gpus", "4", "--seq-len", "256", "--batch", "4"),
        *("--only", "ulysses,ring_attention,zero3", "--fixed", "micro_batch=1", "--format", "json"),
        *("--set", "node_link.bandwidth_bytes_per_s=x0.25"),
    )
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "here"))
    code, out, _ = advise(*question)
    assert code == 0
    (here,) = json.loads(out)
    (tmp_path / "dask").mkdir()
    with DaskProcesses(tmp_path / "dask", {"PYTHONPATH": str(ROOT)}) as dask:  # with torch
        dask.start_workers(2)
        monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "there"))
        code, out, _ = advise(*question, "--executor", dask.address)
        assert code == 0
        assert dask.files_left() == []
    (there,) = json.loads(out)
    assert len(here["layouts"]) > 2
    for each in (*here["layouts"], *there["layouts"]):
        del each["cell"]  # has the path of the changed cluster, which is in the folder of the cache
    assert there["layouts"] == here["layouts"]
    assert there["counts"]["traced with few layers"] >= here["counts"]["traced with few layers"]
