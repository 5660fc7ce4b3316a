"""Jobs of ms-swift: what its scripts start beside a tuning, and models by Megatron-Core."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, read_job

TUNED = "--model Qwen/Qwen3-8B --max_length 4096 --per_device_train_batch_size 1 --deepspeed zero2"


def job(script: str, gpus: int | None = None) -> Job:
    return read_job(None, [JobFile(Path("tune.sh"), script.encode())], gpus=gpus, cluster="dgx-h100")


def made(script: str, gpus: int | None = None) -> dict[str, Any]:
    read = job(script, gpus)
    read.cell()
    return {setting.path.rpartition(".")[2]: setting.value for setting in read.settings}


def test_what_is_exported_or_inferred_beside_a_tuning_is_passed_over() -> None:
    script = f"swift export --model a/b\nNPROC_PER_NODE=4 swift sft {TUNED}\nswift infer --adapters out"
    assert made(script)["dp"] == 4


def test_its_file_may_be_started_by_torchrun() -> None:
    script = (
        "nnodes=2\nn=4\ntorchrun --nproc_per_node=$n --nnodes=$nnodes swift/cli/sft.py "
        f"{TUNED} --gradient_accumulation_steps $(expr 32 / $n / $nnodes)"
    )
    settings = made(script)
    assert (settings["dp"], settings["batch"], settings["micro_batches"]) == (8, 32, 4)


def test_its_file_by_accelerate_is_a_job_of_accelerate() -> None:
    with pytest.raises(UserError, match="--config_file: give this configuration of accelerate beside"):
        job(f"accelerate launch --config_file fsdp.json swift/cli/sft.py {TUNED}", 8).cell()


def test_a_script_that_tunes_by_preferences_is_refused_by_name() -> None:
    with pytest.raises(UserError, match="a script of ms-swift that does not tune by next tokens"):
        job(f"NPROC_PER_NODE=2 \\\nswift rlhf --rlhf_type dpo {TUNED}")


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("moonshotai/Moonlight-16B-A3B", {"kv_lora_rank": 512, "experts": 64, "shared_inner": 2816}),
        ("Qwen/Qwen1.5-MoE-A2.7B", {"experts": 60, "shared_gate": True, "qkv_bias": True}),
        ("zai-org/GLM-4.5-Air", {"experts": 128, "router": "sigmoid", "rotary_share": 0.5}),
        ("mistralai/Mistral-Nemo-Base-2407", {"layers": 40, "head_dim": 128}),
    ],
)
def test_models_of_megatron_core_have_their_sizes(model: str, expected: dict[str, Any]) -> None:
    options = made(
        f"NPROC_PER_NODE=8 megatron sft --model {model} --max_length 4096 --micro_batch_size 1 "
        "--global_batch_size 16 --recompute_granularity none --loss_scale hermes"
    )
    assert options | expected == options


def test_adapters_by_megatron_core_are_of_fused_projections() -> None:
    script = (
        "NPROC_PER_NODE=8 megatron sft --model MODEL --max_length 4096 --micro_batch_size 1 "
        "--global_batch_size 16 --tuner_type lora --lora_rank 16"
    )
    dense = made(script.replace("MODEL", "Qwen/Qwen3-8B"))
    assert dense["lora_rank"] == 16
    assert not dense.get("separate_projections")
    assert made(script.replace("MODEL", "Qwen/Qwen3-30B-A3B"))["lora_targets"] == ["all-linear", "experts"]
