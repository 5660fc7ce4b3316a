"""Jobs of Primus: models of its own files, matmuls in eight bits, an optimizer of other precisions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from tests.tools.jobs.job_inputs import INPUTS, JOBS
from tests.tools.jobs.test_programs import lenient

_MODEL, _KEY = "llama3.1_8B", "mock_data: true"


def primus(model: str, *keys: str, gpus: int = 8) -> Job:
    """A job of that model with further keys."""
    lines = "\n      ".join((_KEY, *keys))
    job = lenient("Primus", (_KEY, lines), gpus=gpus)
    return lenient("Primus", (_MODEL, model), gpus=gpus) if not keys else job


def made(job: Job) -> dict[str, Any]:
    assert job.cell().sizes.tp == 2
    return {setting.path.rpartition(".")[2]: setting.value for setting in job.settings}


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("qwen2.5_7B", {"layers": 28, "hidden": 3584, "inner": 18944, "kv_heads": 4, "vocabulary": 151665}),
        ("qwen3_30B_A3B", {"layers": 48, "experts": 128, "experts_per_token": 8, "expert_inner": 768}),
        ("deepseek_v3", {"layers": 61, "kv_lora_rank": 512, "router_groups": 8, "mtp_layers": 1}),
        ("gpt_oss_20B", {"layers": 24, "experts": 32, "qk_norm": True, "vocabulary": 102400}),
    ],
)
def test_models_of_its_own_files_have_their_sizes(model: str, expected: dict[str, Any]) -> None:
    options = made(primus(model, gpus=16))
    assert options | expected == options


def test_layers_that_no_model_here_has_are_refused_by_name() -> None:
    with pytest.raises(UserError, match=r"model zebra_llama_1B.yaml: .*Mamba.*not modelled"):
        primus("zebra_llama_1B").cell()
    with pytest.raises(UserError, match=r"did you mean 'qwen3_32B'"):
        primus("qwen3_32").cell()


def test_a_cap_of_logits_that_a_models_file_has_is_named() -> None:
    job = primus("grok2")
    assert any("final_logit_softcapping" in each and "may move time" in each for each in job.warnings)


def test_eight_bits_are_by_delayed_scaling_unless_a_model_has_experts() -> None:
    dense = made(primus(_MODEL, "fp8: hybrid"))
    assert (dense["fp8"], dense["fp8_history"]) == ("delayed", 1024)
    changed = "mixtral_8x7B_v0.1}.yaml\n    overrides:\n      fp8: hybrid"
    job = lenient("Primus", (f"{_MODEL}}}.yaml\n    overrides:", changed))
    assert made(job)["fp8"] == "tensorwise"
    (argument,) = [each for each in job.arguments if each.name == "fp8"]
    assert (argument.outcome, argument.missing) == ("approximated", "scales of experts from earlier steps")


def test_gradients_and_moments_in_bfloat16_are_mapped() -> None:
    keys = ("use_precision_aware_optimizer: true", "main_grads_dtype: bf16", "exp_avg_dtype: bf16")
    both = made(primus(_MODEL, *keys, "exp_avg_sq_dtype: bf16"))
    assert (both["accumulate_allreduce_grads_in_fp32"], both["exp_avg_dtype"]) == (False, "bf16")
    job = primus(_MODEL, *keys)
    assert "exp_avg_dtype" not in made(job)
    outcomes = {each.name: each.outcome for each in job.arguments}
    assert (outcomes["main_grads_dtype"], outcomes["exp_avg_dtype"]) == ("mapped", "approximated")
    with pytest.raises(UserError, match="needs --use-precision-aware-optimizer"):
        primus(_MODEL, keys[1]).cell()


def test_zero_is_false_for_a_switch() -> None:
    job = primus(_MODEL, "use_torch_fsdp2: 0", "auto_continue_train: 1")
    assert made(job)["backend"] == "megatron"
    assert not re.search("auto_continue_train", " ".join(job.warnings))


def test_a_tuning_has_its_own_defaults_and_adapters() -> None:
    without = ("      micro_batch_size: 2\n      global_batch_size: 32\n", "")
    kind, files = JOBS["Primus"]
    text = (INPUTS / files[0]).read_text().replace(*without).replace("pre_trainer:", "post_trainer:", 1)
    read = [
        JobFile(Path("tune.yaml"), f"{text}      lora: {{enabled: {on}, dim: 8}}\n".encode())
        for on in ("true", "false")
    ]
    jobs = [read_job(kind, [file], gpus=8, cluster="dgx-h100") for file in read]
    assert made(jobs[1])["batch"] == 128
    assert made(jobs[0])["lora_rank"] == 8
    outcomes = [{each.name: each.outcome for each in job.arguments}["lora"] for job in jobs]
    assert outcomes == ["mapped", "no effect"]


_TITAN = """modules:
  pre_trainer:
    framework: torchtitan
    model: llama3.1_8B{bits}.yaml
    overrides:
      sink_level: null
      training: {{local_batch_size: "${{BATCH:4}}", seq_len: 8192, mock_data: false}}
      activation_checkpoint: {{mode: full}}
      primus_turbo: {{enable_primus_turbo: true, enable_attention_float8: {attention}}}
"""


def titan(bits: str = "", attention: str = "false", given: dict[str, str] | None = None) -> Job:
    file = JobFile(Path("job.yaml"), _TITAN.format(bits=bits, attention=attention).encode())
    return read_job(None, [file], gpus=8, cluster="dgx-h100", environment=given)


def test_an_experiment_by_torchtitan_has_torchtitans_keys_and_primuss_defaults() -> None:
    settings = {each.path: each.value for each in titan().settings}
    assert (settings["model"], settings["batch"], settings["training.backend"]) == ("llama3-8b", 32, "zero3")
    assert settings["model_options.recompute"] == "full"
    assert settings["model_options.fusions"]  # compiled by default
    assert titan(given={"BATCH": "1"}).cell().batch == 8
    assert not [each for each in titan().arguments if each.outcome == "unknown"]
    assert titan("-fp8").cell().model_options["fp8"] == "tensorwise"
    with pytest.raises(UserError, match="attention in 8 bits: not modelled"):
        titan(attention="true").cell()
    with pytest.raises(UserError, match=r"llama3.1_8B-int4.yaml is none of Primus's own for torchtitan"):
        titan("-int4").cell()
