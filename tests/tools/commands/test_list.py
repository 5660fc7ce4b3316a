"""`spbench list models`, and what has a text in its name.

`spbench flags`: what it writes, and its one line where a program has not what a cell says.
"""

import json
import shutil
from functools import partial
from pathlib import Path

import pytest

from spbench.impls.models.huggingface.published import published_models
from spbench.plots import FIGURES
from tests.tools.commands.conftest import Run


def test_models_are_presets_by_size_and_names_by_owner(command_line: Run) -> None:
    out = command_line("list", "models")[1]
    (line,) = [line for line in out.splitlines() if line.startswith("| llama3-8b ")]
    assert [cell.strip() for cell in line.split("|")[2:-1]] == ["32", "4096", "32", "8", "", "128256"]
    owners = {model.name.partition("/")[0] for model in published_models()}
    assert all(f"| {owner} " in out for owner in owners)
    (line,) = [line for line in out.splitlines() if line.startswith("| EleutherAI ")]
    assert [cell.strip() for cell in line.split("|")[2:5]] == ["17", "70.4M to 20.6B", "gpt-neox, pythia"]
    assert "Qwen/Qwen3-30B-A3B" not in out
    assert "spbench list models TEXT" in out


def test_a_text_chooses_by_name(command_line: Run) -> None:
    out = command_line("list", "models", "QWEN3-30b")[1]
    (line,) = [line for line in out.splitlines() if line.startswith("| Qwen/Qwen3-30B-A3B ")]
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert cells == ["Qwen/Qwen3-30B-A3B", "30.5B", "48", "2048", "32", "4", "128", "151936"]
    assert "| qwen3-30b-a3b " in out
    assert "llama" not in out
    chosen = json.loads(command_line("list", "models", "QWEN3-30b", "--format", "json")[1])["models"]
    assert len(chosen) == 5
    assert command_line("list", "clusters", "gb300")[1].count("\n") == 2
    kinds = json.loads(command_line("list", "Ring_Self", "--format", "json")[1])
    assert [*kinds["strategies"]] == ["ring_self_attention"]
    assert set(kinds) == {"strategies"}


@pytest.mark.parametrize(
    ("of", "has", "has_not"),
    [
        ("strategies llama3-8b", {"ulysses", "ring_attention", "tensor_parallel"}, {"dsp", "lasp", "lasp2h"}),
        ("strategies Qwen/Qwen3-Next-80B-A3B-Instruct", {"lasp2h", "ulysses"}, {"lasp", "ring_attention"}),
        ("models dsp", {"st-dit-xl", "transformer-3d-tiny"}, {"llama3-8b", "bert-base", "tnl-1b"}),
        ("models lasp2", {"tnl-1b", "gated-deltanet-tiny"}, {"hybrid-tiny", "llama3-8b"}),
    ],
)
def test_strategies_of_a_model_and_models_of_a_strategy(
    of: str, has: set[str], has_not: set[str], command_line: Run
) -> None:
    kind, name = of.split()
    named = json.loads(command_line("list", kind, name, "--format", "json")[1])[kind].keys()
    assert has <= named
    assert not has_not & named


def test_each_figure_says_what_it_shows() -> None:
    assert [name for name, text in FIGURES.summaries().items() if not text] == []


@pytest.fixture
def flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command_line: Run) -> Run:
    """Run `spbench flags` in an empty folder; gives exit code, output and messages."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("flags.yaml"), "cells.yaml")
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
