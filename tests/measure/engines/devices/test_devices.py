"""A step has every tensor on the device of its mesh, and is the same step on each: proved without one, by an
accelerator that does nothing and fake tensors on it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import spbench
from tests.grid import tabled
from tests.measure.engines.devices import accelerator

ROOT = Path(spbench.__file__).resolve().parents[1]

pytestmark = [
    pytest.mark.slow,  # g++ takes most of a minute
    pytest.mark.skipif(accelerator.COMPILER is None, reason="the accelerator needs the compiler g++"),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return accelerator.compiled(tmp_path_factory.mktemp("accelerator"))


def in_a_process(library: Path, selection: str) -> dict[str, Any]:
    """What :mod:`tracing` prints; in a process of its own, for an accelerator cannot be taken away again."""
    command = [sys.executable, "-m", "tests.measure.engines.devices.tracing", str(library), selection]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.fixture(scope="module")
def few(library: Path) -> dict[str, Any]:
    return in_a_process(library, "few")


def test_a_step_on_the_accelerator_is_the_step_on_the_cpu(few: dict[str, Any]) -> None:
    assert few["problems"] == []
    assert few["traces"] >= 4


@tabled(__file__, "a_tensor_left_on_the_cpu_is_named")
def test_a_tensor_left_on_the_cpu_is_named(few: dict[str, Any], fault: str, caught: str) -> None:
    assert few["planted"][fault] == f"ElsewhereError: {caught}"


def test_every_strategy_model_and_backend(library: Path) -> None:
    found = in_a_process(library, "all")
    print(f"{found['traces']} traces on the accelerator, each as on the CPU")
    assert found["problems"] == []
    assert found["traces"] > 500
