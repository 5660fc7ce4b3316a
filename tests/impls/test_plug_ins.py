"""A strategy, a model and a backend of another distribution are used by their names, each one file."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # processes that import torch

FILES = {
    "my_strategy.py": """
from dataclasses import dataclass
from spbench.impls.strategies.sequence_chunks import GridOptions
from spbench.impls.strategies.ulysses import Ulysses

@dataclass(frozen=True)
class MyOptions(GridOptions):
    pad_heads: bool = False
    loud: bool = False

class MyStrategy(Ulysses):
    name = "my_strategy"
    options_type = MyOptions

    def linear_in(self, *sizes):
        if self.options.loud:
            print("my strategy asked")
        return super().linear_in(*sizes)
""",
    "my_models.py": """
from dataclasses import replace
from spbench.impls.registries import all_models
from spbench.impls.models.bert import BertModel

PRESETS = {"my-model-tiny": BertModel(layers=1, hidden=24, heads=2, vocabulary=32)}
""",
    "my_backend.py": """
from dataclasses import dataclass
from spbench.impls.backends.legacy_ddp import LegacyDistributedDataParallel
from spbench.impls.options import Options

@dataclass(frozen=True)
class MyOptions(Options):
    gradients: str = "contiguous"
    mood: str = "good"

class MyBackend(LegacyDistributedDataParallel):
    name = "my_backend"
    options_type = MyOptions

    def prepare(self):
        print("my backend is in a", self.options.mood, "mood")
        return super().prepare()
""",
    "my.dist-info/METADATA": "Metadata-Version: 2.1\nName: my\nVersion: 1\n",
    "my.dist-info/entry_points.txt": """
[spbench.strategies]
mine = my_strategy:MyStrategy
[spbench.models]
mine = my_models
[spbench.backends]
mine = my_backend:MyBackend
""",
    "mine.yaml": """
title: Of a plug-in
defaults:
  model: my-model-tiny
  strategy: my_strategy
  sizes: {sp: 2}
  batch: 2
  seq_len: 8
groups:
  - {training: {backend: my_backend, mood: bad}, strategy_options: {loud: true}}
""",
}


#: in one process, as it takes seconds to import torch: a sweep without workers, then the command
RUN_AND_REFUSE = """
import sys
import spbench
from spbench.bench.command_line.cli import exit_code

spbench.run("mine.yaml", output="found", jobs=0)
sys.exit(exit_code(["run", "--scenario", "wrong.yaml"]))
"""


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
