"""A strategy, a model and a backend of another distribution are used by their names, each one file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.grid import data

pytestmark = pytest.mark.slow  # processes that import torch

FILES = data(__file__)["FILES"]


#: in one process, as it takes seconds to import torch: a sweep without workers, then the command
RUN_AND_REFUSE = data(__file__)["RUN_AND_REFUSE"]


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(folder), str(Path(__file__).parents[2])])
    command = [sys.executable, *arguments]
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, timeout=300)


def write(folder: Path, **changed: str) -> None:
    for name, text in {**FILES, **changed}.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)


def test_plug_ins_are_run_with_options_of_their_own_and_no_others(tmp_path: Path) -> None:
    write(tmp_path, **{"wrong.yaml": FILES["mine.yaml"].replace("mood", "mod")})
    ran = python(tmp_path, "-c", RUN_AND_REFUSE)
    assert "my strategy asked" in ran.stdout, ran.stderr
    assert "my backend is in a bad mood" in ran.stdout
    (row,) = [json.loads(line) for line in (tmp_path / "found" / "cells.jsonl").read_text().splitlines()]
    assert row["status"] == "ok"
    assert row["cell"]["training"]["mood"] == "bad"
    sent = {entry["collective"] for entry in row["measurement"]["communication"]}
    assert sent == {"all_to_all", "all_reduce"}
    assert ran.returncode == 2
    assert "groups[0].training.mod: unknown key; did you mean 'mood'?" in ran.stderr


def test_a_plug_in_that_cannot_be_loaded_is_one_line(tmp_path: Path) -> None:
    write(tmp_path, **{"my_backend.py": "import no_such_module\n"})
    ran = python(tmp_path, "-m", "spbench", "run", "--scenario", "mine.yaml")
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("spbench: the entry point mine = my_backend:MyBackend of spbench.backends cannot")
    assert line.endswith("No module named 'no_such_module'; mend or uninstall it")
