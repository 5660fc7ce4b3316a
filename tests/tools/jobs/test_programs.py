"""Jobs of programs around transformers: what their keys are here, and what stands for what is missing.
Experts, pipelines, eight bits and other optimizers in jobs of programs around transformers.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.engines.cell_schedule import played_arguments
from spbench.bench.tools.jobs import deepspeed
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.tools.jobs.torchtitan_models import stage_layers
from spbench.bench.tools.jobs.transformers_settings import stages_of
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


TEXTS = data(__file__)["TEXTS"]


def job(kind: str, old: str = "", new: str = "", text: str = "") -> Job:
    text = text or TEXTS[kind]
    assert old in text
    path = Path("job.sh" if kind == "verl" else "job.yaml")
    made = job_of(kind, [JobFile(path, (text.replace(old, new, 1) if old else text).encode())], 8)
    return replace(made, strict=False)


def settings(made: Job) -> dict[str, Any]:
    assert made.cell().sizes.world == 8
    return {each.path: each.value for each in made.settings}


@tabled(__file__, "experts_are_spread_over_the_ranks_of_a_stage")
def test_experts_are_spread_over_the_ranks_of_a_stage(kind: str, expected: dict[str, Any]) -> None:
    made = settings(job(kind))
    assert made | expected == made


@tabled(__file__, "what_is_no_such_job")
def test_what_is_no_such_job(kind: str, old: str, new: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        job(kind, old, new).cell()


@tabled(__file__, "what_stands_for_it_and_what_that_moves")
def test_what_stands_for_it_and_what_that_moves(kind: str, old: str, new: str, name: str, said: str) -> None:
    made = job(kind, old, new)
    made.cell()
    (argument,) = [each for each in made.arguments if each.name == name]
    assert argument.outcome == "approximated"
    assert said in argument.detail


def test_eight_bits_by_torchao_and_by_transformer_engine() -> None:
    dense = TEXTS["automodel"].replace("30B-A3B", "8B").replace("  ep_size: 4\n", "")
    torchao = settings(
        job("automodel", text=dense + "fp8: {enabled: true, recipe_name: rowwise, filter_fqns: [lm_head]}\n")
    )
    assert torchao["model_options.fp8"] == "rowwise"
    assert "model_options.library" not in torchao
    own = settings(job("automodel", "rms_norm: te", "linear: te, experts: te, te_fp8: {recipe: block}"))
    assert (own["model_options.fp8"], own["model_options.library"]) == ("blockwise", "transformer-engine")
    dense = TEXTS["axolotl"].replace("30B-A3B", "8B").replace("expert_parallel_size: 2", "fp8: true")
    assert settings(job("axolotl", text=dense))["model_options.fp8"] == "tensorwise"


@tabled(__file__, "attention_by_the_switch_of_an_older_file")
def test_attention_by_the_switch_of_an_older_file(key: str, attention: str) -> None:
    made = job("axolotl", "fused_attn_kernel", key)
    assert settings(made)["model_options.attention"] == attention
    assert next(each for each in made.arguments if each.name == key).outcome == "mapped"


def test_gradients_that_wait_for_the_last_micro_batch() -> None:
    def says(made: Job) -> bool:
        return settings(made).get("training.reduce_at") == "last"

    dense = TEXTS["automodel"].replace("  pp_size: 2\n", "")
    assert says(job("automodel", text=dense.replace("global_batch_size: 64", "global_batch_size: 128")))
    assert not says(job("automodel", text=dense))
    assert not says(job("automodel"))  # a pipeline's stages sum once, here too
    several = TEXTS["axolotl"] + "gradient_accumulation_steps: 4\n"
    assert says(job("axolotl", text=several))
    each = "accelerator_config: {gradient_accumulation_kwargs: {sync_each_batch: true}}\n"
    assert not says(job("axolotl", text=several + each))


@tabled(__file__, "the_ring_of_axolotl_follows_its_packing")
def test_the_ring_of_axolotl_follows_its_packing(further: str, strategy: str, placement: str) -> None:
    text = TEXTS["axolotl"].replace("expert_parallel_size", "context_parallel_size") + further
    made = settings(job("axolotl", text=text))
    assert (made["strategy"], made["strategy_options.placement"]) == (strategy, placement)


def test_llama_factory_by_megatron_is_refused() -> None:
    text = "model_name_or_path: Qwen/Qwen3-8B\nstage: sft\ncutoff_len: 2048\n"
    text += "per_device_train_batch_size: 1\nfinetuning_type: full\npipeline_model_parallel_size: 4\n"
    assert "training by another program: not modelled" in job("llama_factory", text=text).refusal()


def test_gathered_weights_that_wait_too() -> None:
    dense = TEXTS["automodel"].replace("  pp_size: 2\n", "").replace("size: 64", "size: 128")
    kept = dense.replace("rms_norm: te", "rms_norm: te, enable_fsdp_optimizations: true")
    assert settings(job("automodel", text=kept))["training.reduce_at"] == "kept"


def test_a_loss_without_logits_is_no_loss_of_logits() -> None:
    loss = "nemo_automodel.components.loss.linear_ce.FusedLinearCrossEntropy"
    fused = job("automodel", "dataset:", f"loss_fn: {{_target_: {loss}}}\ndataset:")
    assert settings(fused)["model_options.loss_tile"] == "liger"
    (argument,) = [each for each in fused.arguments if each.name == "loss_fn._target_"]
    assert argument.missing == "Cut Cross-Entropy"
    assert "model_options.loss_tile" not in settings(job("automodel"))


def test_eight_bits_by_accelerate() -> None:
    text = "distributed_type: FSDP\nnum_processes: 8\nmixed_precision: fp8\nfp8_config: {backend: %s}\n"
    script = b"args = TrainingArguments(per_device_train_batch_size=1, max_length=2048)"
    for backend, library, recipe in (("TE", "transformer-engine", "delayed"), ("AO", None, "tensorwise")):
        files = [JobFile(Path("a.yaml"), (text % backend).encode()), JobFile(Path("train.py"), script)]
        given = {"TrainingArguments.model_name_or_path": "Qwen/Qwen3-8B"}
        made = deepspeed.read(JobFiles(files, 8, "dgx-h100", given))
        assert made is not None
        options = {each.path: each.value for each in made.settings if each.path.startswith("model_options")}
        assert made.cell().precision == "bf16"
        assert (options["model_options.fp8"], options.get("model_options.library")) == (recipe, library)


def test_stages_as_automodel_counts_them() -> None:
    assert [stages_of(61, 2, 4, True, rounded) for rounded in ("down", "up", "")] == [28, 32, 31]
    assert [stages_of(32, None, 4, several, "") for several in (False, True)] == [4, 8]
    assert stage_layers(6, 4) == [2, 2, 1, 1]


def test_the_experts_of_gpt_oss_have_a_kernel_of_their_own_where_others_have() -> None:
    text = TEXTS["automodel"].replace("Qwen/Qwen3-30B-A3B", "openai/gpt-oss-20b")
    for experts, fusions in (("gmm", ["swiglu"]), ("torch", None)):
        settings = job("automodel", "rms_norm: te", f"experts: {experts}", text).settings
        assert next((s.value for s in settings if s.path == "model_options.fusions"), None) == fusions
