"""`spbench calibrate --from`: the file that it writes, what it says is missing, and what it refuses."""

import json
import shutil
from pathlib import Path

import pytest

from spbench.bench.measure.clusters.cluster import load_cluster
from tests.tools.calibrate.test_logs import SAMPLES
from tests.tools.commands.conftest import Run

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
