"""Experts, pipelines, eight bits and other optimizers in jobs of programs around transformers."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs import deepspeed
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.tools.jobs.torchtitan_models import stage_layers
from spbench.bench.tools.jobs.transformers_settings import stages_of
from tests.tools.jobs.job_inputs import data, job_of, tabled

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
