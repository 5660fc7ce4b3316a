"""`spbench calibrate --engine`: the files that it writes, and what they are good for.

`spbench calibrate --from`: the file that it writes, what it says is missing, and what it refuses.
"""

import csv
import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.sweep.results import read_rows
from spbench.bench.tools.calibrate import operator_times
from spbench.bench.tools.calibrate.compute_rates import SMALL, RateSweep
from tests.grid import data
from tests.tools.calibrate.test_logs import SAMPLES
from tests.tools.commands.conftest import Run

TINY = ("--message-bytes", "64,4096", "--sides", "8,16", "--lengths", "16")
SCENARIO = data(__file__)["SCENARIO"]


Work = Callable[[DeviceMesh, Cell], Any]


def freeing_little(mesh: DeviceMesh, cell: Cell, work: Work) -> Any:
    """The work of a rank, which otherwise writes gigabytes to see what it takes to free them."""
    with mock.patch.object(operator_times, "_FREED_BYTES", (2**20, 2**22)):
        return work(mesh, cell)


@pytest.fixture
def on_pool(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of the pool in place of new ones, few short samples, and no figure, which has its own tests."""

    def launch(cell: Cell, work: Work) -> dict[int, Any]:
        return dict(enumerate(pool.run(cell.mesh_sizes, freeing_little, cell, work)))

    def draw(rates: Sequence[Any], title: str, output: Path) -> list[Path]:
        return [output.with_suffix(suffix) for suffix in (".png", ".svg", ".pdf")]

    monkeypatch.setattr("spbench.bench.measure.launch", launch)
    report = "spbench.bench.tools.calibrate.machine_report"
    monkeypatch.setattr(f"{report}.LADDER", (SMALL,))
    monkeypatch.setattr(f"{report}.RateSweep", partial(RateSweep, samples=2, sample_s=0.002))
    monkeypatch.setattr(f"{report}.draw_machine_rates", draw)


def measure(command_line: Run, samples: int = 5) -> None:
    code, out, err = command_line("calibrate", "--engine", "distributed", *TINY, "--output", "ours.yaml")
    assert code == 0, err
    assert "| all_reduce " in out
    assert "\n\nours.yaml\nours.csv\nours.png\nours.svg\nours.pdf\n\n" in out
    cluster = load_cluster("ours.yaml")
    command = f"spbench calibrate --engine distributed --device cpu {' '.join(TINY)}"
    figures = [figure for path, figure in cluster.sourced if figure.value and path != "host.scale"]
    sources = {figure.source.partition(": ")[2] for figure in figures}
    assert sources == {command}
    with Path("ours.csv").open() as file:
        rows = list(csv.DictReader(file))
    sizes = {row["nbytes"] for row in rows if row["operation"] == "all_to_all"}
    assert sizes == {"64", "4096"}
    assert {row["wrong"] for row in rows} == {"0"}
    assert len([row for row in rows if row["operation"] == "matmul"]) == 4 * samples


def test_a_measured_cluster_can_be_simulated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run, on_pool: None
) -> None:
    monkeypatch.chdir(tmp_path)
    measure(command_line, samples=2)
    found = run_cell(SMALL.model_copy(update={"cluster": "ours.yaml"}))
    assert found.step_time_s is not None
    assert found.step_time_s > 0
    assert found.breakdown["host_s"] > 0


@pytest.mark.slow
def test_on_ranks_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> None:
    monkeypatch.chdir(tmp_path)
    measure(command_line)
    Path("mine.yaml").write_text(SCENARIO)
    words = ("run", "--scenario", "mine.yaml", "--cluster", "ours.yaml", "--output", "out")
    code, _, err = command_line(*words)
    assert code == 0, err
    (row,) = read_rows(Path("out/cells.jsonl"))[0]
    assert row["measurement"]["step_time_s"] > 0


@pytest.mark.slow
def test_one_device_has_no_collectives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, _ = command_line("calibrate", "--engine", "emulated", *TINY, "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert "sum" in {rate["operation"] for rate in found["rates"]}
    assert [rate for rate in found["rates"] if rate["bus_bytes_per_s"] is not None] == []
    assert load_cluster("measured.yaml").network.latency_s.value is None


@pytest.mark.slow
def test_a_scenario_is_measured_and_predicted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run, on_pool: None
) -> None:
    monkeypatch.chdir(tmp_path)
    group = "{strategy: single, batch: [1, 2], engine: distributed, timing: {warmup: 0, samples: 2}}"
    Path("mine.yaml").write_text(f"{SCENARIO}  - {group}\n")
    words = ("calibrate", "--engine", "distributed", *TINY, "--check", "mine.yaml", "--format", "json")
    code, out, err = command_line(*words)
    assert code == 0, err
    found = json.loads(out)
    assert [(cell["ranks"], cell["batch"]) for cell in found["cells"]] == [(1, 1), (1, 2), (2, 2)]
    for cell in found["cells"]:
        assert cell["relative_error"] == pytest.approx(cell["predicted_s"] / cell["measured_s"] - 1)
        on = load_cluster(f"measured-{cell['ranks']}.yaml")
        assert on.host is not None
        assert cell["operator_s"] == on.host.operator_s.value
        assert {"gelu", "add"} & {*on.device.operators}
    assert -1 <= found["agreement"]["tau"] <= 1


LOGS = sorted(path.name for path in SAMPLES.iterdir())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with the samples."""
    shutil.copytree(SAMPLES, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_all_samples_together(folder: Path, command_line: Run) -> None:
    words = ("--extends", "dgx-h100", "--output", "ours")
    code, out, err = command_line("calibrate", "--from", *LOGS, *words)
    assert code == 0, err
    assert "\n\nours.yaml\n\n" in out
    missing = next(line for line in out.splitlines() if line.startswith("still missing: "))
    assert missing.startswith("still missing: matmuls, fp16; matmuls, fp32; all_gather, intra-node")
    assert missing.endswith("reduce_scatter, inter-node: what dgx-h100 says is used")
    text = Path("ours.yaml").read_text()
    assert text.startswith(
        f"# spbench calibrate --from {' '.join(LOGS)} --extends dgx-h100\n# device.matmul.bf16"
    )
    assert " points, off by " in text.split("extends:")[0]
    cluster = load_cluster("ours.yaml")
    sources = {figure.source for key, figure in cluster.sourced if key.startswith("network.collectives")}
    assert sources == {"all_gather_perf_2_nodes.log (all_gather_perf of nccl-tests)", "in latency_s"}


def test_it_can_be_run_on_and_listed(folder: Path, command_line: Run) -> None:
    command_line("calibrate", "--from", "all_reduce_perf.log", "--extends", "dgx-h100", "--output", "a.yaml")
    words = ("--scenario", "communication", "--strategy", "ring_self_attention", "--cluster", "a.yaml")
    code, out, err = command_line("run", *words, "--dry-run")
    assert code == 0, err
    assert "a.yaml" in out
    assert "| all_reduce, intra-node, 8 ranks" in command_line("list", "cluster", "a.yaml")[1]


def test_as_json(folder: Path, command_line: Run) -> None:
    code, out, _ = command_line("calibrate", "--from", "mamf_finder.txt", "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert found["figures"][0]["figure"] == "device.peak_flops_per_s.bf16"
    assert "attention" in found["missing"]
    assert load_cluster("measured.yaml").device.name == "NVIDIA H100 80GB HBM3"
