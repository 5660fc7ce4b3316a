"""Jobs of programs around transformers: what their keys are here, and what stands for what is missing."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.engines.cell_schedule import played_arguments
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile
from tests.tools.jobs.job_inputs import INPUTS, JOBS, data, job_of, read, tabled


def lenient(name: str, change: tuple[str, str] = ("", ""), gpus: int = 8) -> Job:
    kind, files = JOBS[name]
    file = next((each for each in files if change[0] in (INPUTS / each).read_text()), files[0])
    return replace(read(kind, files, {file: change}, gpus=gpus), strict=False)


def made(name: str, change: tuple[str, str] = ("", "")) -> dict[str, Any]:
    job = lenient(name, change)
    assert job.cell().sizes.world == 8
    return {setting.path: setting.value for setting in job.settings}


@tabled(__file__, "what_a_programs_keys_are_here")
def test_what_a_programs_keys_are_here(name: str, expected: dict[str, Any]) -> None:
    settings = made(name)
    assert settings | expected == settings


@tabled(__file__, "the_loss_is_that_of_the_program")
def test_the_loss_is_that_of_the_program(
    name: str, change: tuple[str, str], expected: list[str | None]
) -> None:
    settings = made(name, change)
    options = "strategy_options.loss", "model_options.cross_entropy", "model_options.logits_held"
    assert [*map(settings.get, options)] == expected
    assert settings["strategy"] != "megatron_sp" or settings["strategy_options.vocabulary"] == "split"


@tabled(__file__, "adapters_are_those_of_the_modules_that_a_job_names")
def test_adapters_are_those_of_the_modules_that_a_job_names(asked: str, targets: list[str] | None) -> None:
    adapted = f"adapter: lora\nlora_r: 4\nlora_target_modules: {asked}\nsample_packing"
    peft = f"model: {{peft_config: {{r: 4, target_modules: {asked}}}, "
    for job, change in (("axolotl", ("sample_packing", adapted)), ("ArcticTraining", ("model: {", peft))):
        settings = made(job, change)
        assert settings["model_options.lora_rank"] == 4
        assert settings.get("model_options.lora_targets") == targets
    every = ("sample_packing", f"lora_target_linear: true\n{adapted}")
    assert made("axolotl", every).get("model_options.lora_targets") is None


@pytest.mark.parametrize("field", ["target_modules", "modules_to_save"])
def test_a_section_that_names_no_modules(field: str) -> None:
    for named, problem in (("7", ["7 is no name of modules and no list of these"]), ("lm_head", [])):
        job = lenient("ArcticTraining", ("model: {", f"model: {{peft_config: {{r: 4, {field}: {named}}}, "))
        assert [each.rpartition(": ")[2] for each in job.problems] == problem
        whole = [s.value for s in job.settings if s.path == "model_options.lora_whole"]
        assert whole == ([["head"]] if (field, named) == ("modules_to_save", "lm_head") else [])


def test_adapters_of_experts_are_asked_for_by_name() -> None:
    rest = "\n  torch_dtype: bf16\n  attn_implementation: sdpa\n"
    peft = "peft: {{_target_: nemo_automodel.PeftConfig, target_modules: [{}]}}\n"
    changes = [
        (f"meta-llama/Llama-3.1-8B{rest}", f"Qwen/Qwen3-30B-A3B{rest}{peft.format(names)}")
        for names in ("'*_proj'", "'*_proj', '*experts'")
    ]
    targets = [made("Automodel", change).get("model_options.lora_targets") for change in changes]
    assert targets == [None, ["all-linear", "experts"]]


@tabled(__file__, "what_something_close_stands_for")
def test_what_something_close_stands_for(name: str, key: str, missing: str) -> None:
    job = lenient(name)
    (argument,) = [each for each in job.arguments if each.name == key]
    assert (argument.outcome, argument.missing) == ("approximated", missing)
    assert argument.detail.startswith(("may move ", "does not move "))
    assert any(key in warning and argument.detail in warning for warning in job.warnings)
    with pytest.raises(UserError, match=rf"{key}.*not modelled"):
        replace(job, strict=True).cell()


@tabled(__file__, "what_a_programs_job_cannot_be_here")
def test_what_a_programs_job_cannot_be_here(name: str, old: str, new: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        lenient(name, (old, new)).cell()


RECIPES = data(__file__)["RECIPES"]


def test_a_recipe_of_megatron_bridge_is_read_by_its_name() -> None:
    path = Path("recipes.py")
    for part, tp, micro_batches in (("small", 4, 8), ("wide", 1, 4)):
        job = job_of("bridge", [JobFile(path, RECIPES.encode(), part)], 8)
        with pytest.raises(UserError, match="what bfloat16 lacks of float32, 16 bits: not modelled"):
            job.cell()  # what Megatron-LM's own script is refused for too
        cell = replace(job, strict=False).cell()
        assert (cell.sizes.tp, cell.batch, cell.training.micro_batches) == (tp, 32, micro_batches)
        assert cell.training.backend_options["exp_avg_dtype"] == "bf16"
        assert (cell.seq_len, cell.model_options["layers"], cell.precision) == (4096, 36, "bf16")
        assert ("line 21: what a branch or loop sets is not known" in job.remarks) == (part == "wide")
    with pytest.raises(
        UserError, match=r"2 functions make a configuration \(small, wide\); name one, as recipes\.py:small"
    ):
        job_of("bridge", [JobFile(path, RECIPES.encode())], 8)
    with pytest.raises(UserError, match=r"no function 'smal'.*did you mean 'small'"):
        job_of("bridge", [JobFile(path, RECIPES.encode(), "smal")], 8)


@pytest.mark.parametrize(("asked", "kernel"), [("sdpa", "cudnn"), ("flash_attention_2", "flash_attention_2")])
def test_torchs_own_attention_pads_no_values(asked: str, kernel: str) -> None:
    """FlashAttention rejects other head sizes than keys', so that SDPA takes a kernel that does not."""
    model = "deepseek-ai/DeepSeek-V2-Lite"
    text = f"base_model: {model}\nsequence_len: 2048\nmicro_batch_size: 1\nbf16: true\n"
    text += f"attn_implementation: {asked}\n"
    job = replace(job_of("axolotl", [JobFile(Path("job.yaml"), text.encode())], 8), strict=False)
    cell = job.cell()
    assert cell.model_options["attention"] == kernel
    assert played_arguments(cell)[1].get("padded_values", False) == (asked != "sdpa")
