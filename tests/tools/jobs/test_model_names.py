"""Names of models in jobs: copies, tuned and quantized ones have the sizes of what they come from."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.setting_values import read_model_file
from spbench.bench.tools.jobs.job_files import JobFile, imported
from spbench.impls.models.huggingface.published import near_model
from tests.tools.jobs.job_inputs import INPUTS, JOBS, job_of
from tests.tools.jobs.test_programs import lenient


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("Qwen/Qwen2.5-Math-7B-Instruct", "Qwen/Qwen2.5-7B"),
        ("someone/Meta-Llama-3.1-8B-Instruct-AWQ", "meta-llama/Meta-Llama-3.1-8B"),
        ("/data/models/Qwen3-30B-A3B-Instruct-2507-FP8/", "Qwen/Qwen3-30B-A3B"),
        ("unsloth/gpt-oss-120b-BF16", "openai/gpt-oss-120b"),
        ("Qwen3-0.6B", "Qwen/Qwen3-0.6B"),
    ],
)
def test_words_that_change_no_size_are_passed_over(name: str, known: str) -> None:
    near = near_model(name)
    assert near is not None
    assert near.name == known


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-9B", "a/Llama-3B", "Qwen/Qwen3-Embedding-8B", "Qwen/Qwen3-VL-8B-Instruct", "a/Mistral-7B"],
)
def test_other_words_make_another_model(name: str) -> None:
    assert near_model(name) is None


def test_a_name_that_stands_for_another_is_said_and_refused_by_strict() -> None:
    job = lenient("axolotl", ("NousResearch/Meta-Llama-3-8B", "nobody/Meta-Llama-3-8B-GPTQ"))
    assert job.cell().model == "meta-llama/Meta-Llama-3-8B"
    (said,) = [each for each in job.warnings if "base_model" in each]
    assert "Meta-Llama-3-8B-GPTQ is taken to have the sizes of meta-llama/Meta-Llama-3-8B" in said
    (argument,) = [each for each in job.arguments if each.name == "base_model"]
    assert (argument.outcome, argument.missing) == ("approximated", "sizes of this model")


def test_what_a_model_has_that_none_here_has_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^Qwen/Qwen2.5-VL-7B-Instruct has a tower for .*: not modelled$"):
        read_model_file("Qwen/Qwen2.5-VL-7B-Instruct")
    with pytest.raises(UserError, match=r"^swiss-ai/Apertus-8B-2509 has another activation"):
        read_model_file("swiss-ai/Apertus-8B-2509", tmp_path)
    with pytest.raises(UserError, match="No such file"):
        read_model_file("nobody/nothing")


@pytest.mark.parametrize(
    ("name", "missing", "said"),
    [
        ("Qwen/Qwen3.5-9B", "samples of images and text", "a tower for images of 0.46 billion parameters is"),
        ("google/gemma-3-4b-it", "samples of images and text", "of 0.42 billion parameters is left out"),
        (
            "google/gemma-2-9b-it",
            "a cap on attention's scores in this model",
            "none is counted: within a flash",
        ),
        (
            "ByteDance-Seed/Seed-OSS-36B-Base",
            "dropout, 0.1 in this model as published",
            "masks of 1 byte an element",
        ),
    ],
)
def test_what_is_left_out_of_a_model_is_said(name: str, missing: str, said: str) -> None:
    job = lenient("axolotl", ("NousResearch/Meta-Llama-3-8B", name))
    assert job.cell().model == name
    (argument,) = [each for each in job.arguments if each.name == "base_model"]
    assert (argument.outcome, argument.missing) == ("approximated", missing)
    assert any(said in each for each in job.warnings if "base_model" in each)


def test_what_is_left_out_of_a_file_beside_is_said(tmp_path: Path) -> None:
    beside = tmp_path / "config.json"
    beside.write_text(json.dumps(read_model_file("ByteDance-Seed/Seed-OSS-36B-Base")))
    paths = (*(INPUTS / each for each in ("zero3.json", "trainer.yaml")), beside)
    deepspeed = job_of("deepspeed", [JobFile(path, path.read_bytes()) for path in paths], 8)
    assert [each for each in deepspeed.remarks if each.startswith("dropout, 0.1 in this model as published")]


@pytest.mark.parametrize("where", ["here.yaml", "b/beside.yaml", "link/below.yaml"])
def test_the_path_of_a_model_holds_where_the_scenario_lies(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "c/d"):
        Path(folder).mkdir(parents=True)
    Path("link").symlink_to("c/d")
    files = [shutil.copy(INPUTS / name, "a") for name in JOBS["ZeRO-2"][1]]
    imported(("deepspeed", *files), 8, "dgx-h100", False, False, (), Path(where))
    (cell,) = load_scenario(where).cells[""]
    assert (Path(where).parent / cell.model).resolve() == tmp_path / "a" / "config.json"
