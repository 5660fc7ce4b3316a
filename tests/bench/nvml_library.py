"""A folder with a libnvidia-ml.so.1 that is built from nvml_library.c, and processes that load it."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SOURCE = Path(__file__).with_suffix(".c")
#: the variable that says what goes wrong
SCENARIO = "SPBENCH_TEST_NVML"
UUIDS = ("GPU-00000000-aaaa-bbbb-cccc-000000000000", "GPU-11111111-aaaa-bbbb-cccc-111111111111")


def built(folder: Path, *flags: str) -> Path:
    """Build the library in a folder; the test is skipped where there is no C compiler."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    library = folder / "libnvidia-ml.so.1"
    subprocess.run([compiler, "-shared", "-fPIC", "-w", *flags, "-o", library, SOURCE], check=True)
    return folder


def environment(folder: Path, scenario: str = "") -> dict[str, str]:
    """The environment of a process that loads the library of the folder."""
    return {**os.environ, "LD_LIBRARY_PATH": str(folder), SCENARIO: scenario}


def printed(folder: Path, code: str, *arguments: str) -> Any:
    """What a Python process with that library prints, as JSON; its messages must be empty."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=environment(folder),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return json.loads(done.stdout)
