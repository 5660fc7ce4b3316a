"""`spbench flags`: what it writes, and its one line where a program has not what a cell says."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from tests.tools.commands.conftest import Run

SCENARIO = """
title: Llama-3-8B on 8 H100
defaults: {cluster: dgx-h100, model: llama3-8b, precision: bf16, batch: 8, seq_len: 8192}
groups:
  - {strategy: single, sizes: {dp: 8}, training: {backend: zero3}}
  - {strategy: lasp2, sizes: {sp: 8}, model: tnl-1b}
"""


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> Run:
    """Run `spbench flags` in an empty folder; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    Path("cells.yaml").write_text(SCENARIO)
    return partial(command_line, "flags", "--scenario", "cells.yaml")


def test_a_file_that_is_imported_as_the_cell(flags: Run, command_line: Run) -> None:
    code, out, _ = flags("torchtitan", "--strategy", "single", "--output", "train.toml")
    assert code == 0
    assert "training.wrap: embedding there, blocks here" in out
    assert "data_parallel_shard_degree = 8\n" in Path("train.toml").read_text()
    code, out, _ = command_line("import", "torchtitan", "train.toml", "--cluster", "dgx-h100")
    assert (code, "backend: zero3 " in out) == (0, True)


def test_every_argument_has_its_setting(flags: Run) -> None:
    code, out, _ = flags("megatron", "--strategy", "single", "--format", "json")
    found = json.loads(out)
    assert code == 0
    assert {"argument": "--use-torch-fsdp2", "value": "", "setting": "training.backend"} in found["lines"]
    assert found["text"].startswith(found["content"])
    assert found["missing"] == []
