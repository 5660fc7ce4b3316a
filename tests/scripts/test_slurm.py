"""scripts/slurm.sbatch, with stand-ins for the commands of Slurm."""

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grid import data, tabled

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "slurm.sbatch"

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")

SCONTROL = """#!/usr/bin/env bash
[[ "$*" == "show hostnames node[1-2]" ]] && for host in $HOSTS; do echo "$host"; done
"""

SRUN = data(__file__)["SRUN"]


class Job:
    """A Slurm job of two nodes with one GPU each.

    Args:
        folder: an empty one.
        environment: beside that of this process and that of the job.
    """

    def __init__(self, folder: Path, environment: dict[str, str]):
        python = f'#!/bin/sh\nexec {sys.executable} "$@"\n'
        for name, text in (("scontrol", SCONTROL), ("srun", SRUN), ("python", python)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        self.words = folder / "words"
        self.environment = {
            **os.environ,
            "PATH": f"{folder}:{os.environ['PATH']}",
            "WORDS": str(self.words),
            "HOSTS": "node1 node2",
            "SLURM_JOB_ID": "1234567",
            "SLURM_JOB_NODELIST": "node[1-2]",
            "SLURM_GPUS_ON_NODE": "8",
            **environment,
        }

    def run(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = ["bash", str(SCRIPT), *words]
        return subprocess.run(command, env=self.environment, capture_output=True, text=True, timeout=300)


def test_one_torchrun_a_node(tmp_path: Path) -> None:
    job = Job(tmp_path, {"NO_TASKS": "yes"})
    done = job.run("--scenario", "my file.yaml", "--timeout", "60")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    words = job.words.read_text().splitlines()
    start = words.index("python")
    assert {"--nodes=2", "--ntasks=2", "--ntasks-per-node=1", "--kill-on-bad-exit=1"} == {*words[:start]}
    assert words[start:] == [
        *("python", "-m", "torch.distributed.run", "--nnodes=2", "--nproc-per-node=8"),
        *("--rdzv-backend=c10d", "--rdzv-id=1234567", "--rdzv-endpoint=node1:19567"),
        *("-m", "spbench", "run", "--engine", "distributed"),
        *("--scenario", "my file.yaml", "--timeout", "60"),
    ]


def test_ranks_of_a_node_can_be_set(tmp_path: Path) -> None:
    job = Job(tmp_path, {"NO_TASKS": "yes", "RANKS_PER_NODE": "4"})
    assert job.run("--scenario", "gate").returncode == 0
    assert "--nproc-per-node=4" in job.words.read_text().splitlines()


@tabled(__file__, "mistakes_are_one_line")
def test_mistakes_are_one_line(
    changed: dict[str, str], words: list[str], code: int, message: str, tmp_path: Path
) -> None:
    job = Job(tmp_path, changed)
    done = job.run(*words)
    assert done.returncode == code
    assert done.stderr.startswith(f"slurm.sbatch: {message}")
    assert len(done.stderr.splitlines()) == 1
    assert not job.words.exists()


@pytest.mark.slow
def test_the_commands_start(tmp_path: Path) -> None:
    """Two torchruns find each other as two nodes would, and start `python -m spbench run`: the first process
    runs the command line, the second waits for jobs."""
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        port = any_port.getsockname()[1] % 15000 + 15000
    job = Job(
        tmp_path,
        {
            "HOSTS": "127.0.0.1 127.0.0.1",
            "SLURM_JOB_ID": str(port - 15000),
            "RANKS_PER_NODE": "1",
            "PYTHONPATH": str(ROOT),
        },
    )
    done = job.run("--help")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Run the cells of SCENARIO, and compare with published numbers.") == 1
