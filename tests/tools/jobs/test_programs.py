"""Jobs of programs around transformers: what their keys are here, and what stands for what is missing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.engines.cell_schedule import played_arguments
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile
from tests.tools.jobs.job_inputs import INPUTS, JOBS, job_of, read, tabled

HERE = (
    "axolotl",
    "LLaMA-Factory",
    "LLaMA-Factory v1",
    "VeOmni",
    "ArcticTraining",
    "Automodel",
    "verl",
    "ms-swift",
)


def lenient(name: str, change: tuple[str, str] = ("", ""), gpus: int = 8) -> Job:
    kind, files = JOBS[name]
    file = next((each for each in files if change[0] in (INPUTS / each).read_text()), files[0])
    return replace(read(kind, files, {file: change}, gpus=gpus), strict=False)


def test_each_job_says_what_trains() -> None:
    """transformers' Trainer by DeepSpeed is DeepSpeed."""
    trains = {name: lenient(name).cell().program for name in HERE}
    others = {
        "Automodel": "automodel",
        "VeOmni": "veomni",
        "verl": "verl",
        "LLaMA-Factory v1": "transformers",
    }
    assert trains == dict.fromkeys(HERE, "deepspeed") | others
    by_ddp = lenient("axolotl", ("deepspeed: deepspeed_configs/zero3_bf16.json", ""))
    assert by_ddp.cell().program == "transformers"
    total = lenient("axolotl", ("micro_batch_size: 1", "micro_batch_size: 1\nbatch_size: 7"))
    assert "batch_size = 7 is not micro-batch 1 x accumulation 2, which count" in total.warnings


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


def test_adapters_of_a_dense_model_are_those_of_its_linear_layers() -> None:
    assert made("LLaMA-Factory")["model_options.lora_rank"] == 16
    dense, experts = ("Qwen/Qwen3-8B", "Qwen/Qwen3-30B-A3B")
    assert made("LLaMA-Factory", (dense, experts)).get("model_options.lora_targets") is None


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


def test_names_of_modules_between_commas() -> None:
    assert made("LLaMA-Factory", ("lora_target: all", "lora_target: q_proj, v_proj"))[
        "model_options.lora_targets"
    ] == ["q_proj", "v_proj"]


def test_half_precision_on_one_card_has_no_masters_and_no_wrapper() -> None:
    without = ("deepspeed: examples/deepspeed/ds_z3_config.json\n", "pure_bf16: true\n")
    for gpus, expected in ((1, ("unwrapped", "weights")), (8, ("ddp", None))):
        job = lenient("LLaMA-Factory", without, gpus)
        made = {setting.path: setting.value for setting in job.settings}
        assert (made["training.backend"], made.get("training.state_dtype")) == expected
        assert job.cell().sizes.world == gpus


def test_what_is_trained_whole_beside_adapters() -> None:
    untied = made("LLaMA-Factory", ("lora_target: all", "additional_target: embed_tokens,lm_head"))
    assert untied["model_options.lora_whole"] == ["embedding", "head"]
    job = lenient(
        "axolotl", ("sample_packing", "adapter: lora\nlora_modules_to_save: [norm]\nsample_packing")
    )
    (argument,) = [each for each in job.arguments if each.name == "lora_modules_to_save"]
    assert (argument.outcome, argument.missing) == ("approximated", "training norm whole")
    tied = lenient(
        "axolotl",
        (
            "NousResearch/Meta-Llama-3-8B",
            "Qwen/Qwen3-0.6B\nadapter: lora\nlora_modules_to_save: [embed_tokens]",
        ),
    )
    assert tied.cell().model_options["tied"] is False
    assert any("2 V H bytes too much" in each for each in tied.warnings)


def test_adapters_of_trls_scripts() -> None:
    kind, files = JOBS["ZeRO-2"]
    words = "use_peft: true\nlora_r: 8\nload_in_4bit: true\nbf16"
    job = replace(read(kind, files, {files[-1]: ("bf16", words)}, gpus=8), strict=False)
    made = {setting.path: setting.value for setting in job.settings}
    few = ("lora_rank", "lora_targets", "frozen_bits")
    assert [made[f"model_options.{name}"] for name in few] == [8, ["q_proj", "v_proj"], 4]
    assert job.cell().model_options["lora_rank"] == 8
    plain = replace(read(kind, files, {files[-1]: ("bf16", "lora_r: 8\nbf16")}, gpus=8), strict=False)
    assert not any("lora" in each.path for each in plain.settings)


def test_adapters_of_linear_attention_are_approximated() -> None:
    job = lenient("LLaMA-Factory", ("Qwen/Qwen3-8B", "Qwen/Qwen3-Next-80B-A3B-Instruct"))
    (argument,) = [each for each in job.arguments if each.name == "lora_rank"]
    assert (argument.outcome, argument.missing) == ("approximated", "adapters (LoRA) of linear attention")


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


def test_ranks_of_adapters_are_those_of_the_files() -> None:
    veomni = made("VeOmni", ("model: {", "model: {lora_config: {rank: 64, alpha: 32}, "))
    newer = made("LLaMA-Factory v1", ("cp_mode: ulysses", "peft_config: {name: lora, r: 16}"))
    assert (veomni["model_options.lora_rank"], newer["model_options.lora_rank"]) == (64, 16)
    (argument,) = [
        each
        for each in lenient("LLaMA-Factory v1", ("cp_mode: ulysses", "peft_config: {name: freeze}")).arguments
        if each.name == "peft_config.name"
    ]
    assert argument.missing == "weights of which some are trained"


def test_groups_of_replicas_shard_all_weights_each() -> None:
    cell = lenient("LLaMA-Factory v1", ("cp_size: 2", "mp_replicate_size: 2"), gpus=16).cell()
    assert (cell.sizes.dp, cell.batch, cell.training.micro_batches) == (16, 16, 1)
    assert cell.training.backend_options["data_parallel_replicate_degree"] == 2


RECIPES = """
from megatron.bridge.training.config import ConfigContainer

_MODEL = "Qwen/Qwen3-8B"


def small() -> ConfigContainer:
    cfg = _pretrain_common()
    cfg.model = AutoBridge.from_hf_pretrained(_MODEL).to_megatron_provider(load_weights=False)
    cfg.model.tensor_model_parallel_size = 4
    cfg.optimizer.use_precision_aware_optimizer = True
    cfg.optimizer.exp_avg_dtype = torch.bfloat16
    cfg.optimizer.exp_avg_sq_dtype = torch.bfloat16
    return cfg


def wide() -> ConfigContainer:
    cfg = small()
    cfg.model.tensor_model_parallel_size = 1
    cfg.train.micro_batch_size = 1
    if LONG:
        cfg.model.seq_length = 8192
    return cfg
"""


def test_a_recipe_of_megatron_bridge_is_read_by_its_name() -> None:
    path = Path("recipes.py")
    for part, tp, micro_batches in (("small", 4, 8), ("wide", 1, 4)):
        job = job_of("bridge", [JobFile(path, RECIPES.encode(), part)], 8)
        cell = job.cell()
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


def script(command: str) -> JobFile:
    return JobFile(Path("job.sh"), command.encode())


def test_the_older_trainer_of_verl_has_other_names() -> None:
    """trainer/config/sft_trainer.yaml and fsdp_sft_trainer.py before ea9d6c89."""
    words = (
        "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer data.max_length=4096 "
        "data.train_batch_size=16 data.micro_batch_size_per_gpu=1 model.partial_pretrain=Qwen/Qwen3-4B "
        "ulysses_sequence_parallel_size=4 +model.fsdp_config.model_dtype=bf16 use_remove_padding=True "
        "+trainer.nnodes=$NODES"
    )
    job = replace(job_of("verl", [script(words)], 8), strict=False)
    settings = {each.path: each.value for each in job.settings}
    assert (settings["model"], settings["sizes.sp"], settings["seq_len"]) == ("Qwen/Qwen3-4B", 4, 4096)
    assert (settings["batch"], settings["training.state_dtype"]) == (16, "weights")
    # nn.CrossEntropyLoss under autocast, and gradients of each micro-batch are summed
    assert not {"model_options.cross_entropy", "training.reduce_at"} & {*settings}


def test_without_flash_attns_loss_verl_keeps_the_log_softmax() -> None:
    kind, (name, *_) = JOBS["verl"]
    first = "torchrun" if "torchrun" in (INPUTS / name).read_text() else "python"
    job = read(kind, [name], {name: (first, f"export VERL_DISABLE_FLASH_ATTN_CE=1\n{first}")}, gpus=8)
    assert {each.path: each.value for each in job.settings}["model_options.cross_entropy"] == "as_given"


@pytest.mark.parametrize("name", ["--load Qwen3-30B-A3B-mcore", "--model Qwen/Qwen3-30B-A3B"])
def test_converted_weights_are_called_as_those_that_they_were_made_of(name: str) -> None:
    words = (
        f"NPROC_PER_NODE=8 megatron sft {name} --use_hf 1 --micro_batch_size 1 --expert_model_parallel_size 8"
    )
    job = replace(job_of("swift_megatron", [script(words)], 8), strict=False)
    assert {each.path: each.value for each in job.settings}["model_options.experts"] == 128


def test_a_model_that_a_script_does_not_name_is_asked_for() -> None:
    with pytest.raises(UserError, match="which model it is is not said; write --model NAME"):
        job_of("swift_megatron", [script("megatron sft --micro_batch_size 1")], 8).scenario_text()


@pytest.mark.parametrize(("program", "kind"), [("swift", "swift"), ("megatron", "swift_megatron")])
def test_how_weights_are_tuned_has_had_other_names(program: str, kind: str) -> None:
    """ms-swift says --tuner_type since 4; taken for unknown, its default would stand for it."""
    for asked, rank in (("full", None), ("lora", 8)):
        words = f"NPROC_PER_NODE=8 {program} sft --model Qwen/Qwen3-8B --train_type {asked}"
        job = replace(job_of(kind, [script(words)], 8), strict=False)
        assert {each.path: each.value for each in job.settings}.get("model_options.lora_rank") == rank


def test_a_model_in_the_home_of_a_user_is_known_by_its_name() -> None:
    words = "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer model.path=$HOME/models/Qwen/Qwen3-8B"
    job = replace(job_of("verl", [script(words)], 8), strict=False)
    assert {each.path: each.value for each in job.settings}["model"] == "Qwen/Qwen3-8B"
