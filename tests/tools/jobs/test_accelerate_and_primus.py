"""`accelerate launch` as a job, and cells as its options: read back they are the same cell;
and jobs of Primus: models of its own files, matmuls in eight bits, an optimizer of other precisions.
"""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.deepspeed import read_script
from spbench.bench.tools.jobs.flags import differences, program_flags
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles, read_job
from tests.tools.jobs.job_inputs import INPUTS, JOBS, data, read, tabled
from tests.tools.jobs.test_programs import lenient

STEP: dict[str, Any] = data(__file__)["STEP"]
LAYOUTS: dict[str, tuple[str, dict[str, Any], bool]] = data(__file__)["LAYOUTS"]


def job(text: str, given: dict[str, str] | None = None, cluster: str = "dgx-h100") -> Job:
    made = read_script(JobFiles([JobFile(Path("train.sh"), text.encode())], None, cluster, given or {}))
    assert made is not None
    return made


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Layouts and steps that accelerate has."""
    strategy = draw(st.sampled_from(sorted(LAYOUTS)))
    axis, options, by_deepspeed = LAYOUTS[strategy]
    replicas, parts = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 2]))
    sizes = {"dp": replicas} | ({axis: draw(st.sampled_from([2, 4]))} if axis else {})
    recompute = draw(st.sampled_from([{}, {"recompute_early_stop": True}, {"recompute_reentrant": True}]))
    backend: dict[str, Any] = {
        "backend": "zero3" if by_deepspeed else draw(st.sampled_from(["zero2", "zero3"]))
    }
    if backend["backend"] == "zero3" and draw(st.booleans()):
        backend |= {"optimizer": "host", "parameters": "host"}
    if by_deepspeed:
        whole = {"backend": "deepspeed_zero3"}
        backend = backend | {"gradient_buffer_kib": 976563} if "optimizer" in backend else whole
    if parts > 1 and not by_deepspeed:
        backend["reduce_at"] = "last"
    return Cell.model_validate(
        STEP
        | {
            "strategy": strategy,
            "strategy_options": options,
            "sizes": sizes,
            "batch": replicas * parts * draw(st.sampled_from([1, 2])),
            "seq_len": draw(st.sampled_from([4096, 32768])),
            "model_options": STEP["model_options"]
            | ({"recompute": "full", **recompute} if recompute else {}),
            "training": STEP["training"] | backend | {"micro_batches": parts},
        }
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cells())
def test_a_cell_read_back_is_the_same(cell: Cell) -> None:
    flags = program_flags("accelerate", cell)
    assert (flags.missing, flags.beside) == ((), ())
    assert list(differences(cell, job(flags.text()).cell())) == []


def test_what_accelerate_has_not_is_named() -> None:
    pipeline = Cell.model_validate(
        STEP | {"strategy": "single", "sizes": {"dp": 2, "pp": 2}, "batch": 4, "seq_len": 4096}
    )
    with pytest.raises(UserError, match=r"accelerate has no .*sizes.pp 2 \(it has 1\)"):
        program_flags("accelerate", pipeline).text()
    unnamed = pipeline.model_copy(update={"model": "llama3-8b"})
    with pytest.raises(UserError, match="accelerate has no model llama3-8b without its name on Hugging Face"):
        program_flags("accelerate", unnamed).text()


def test_a_launch_is_read_with_its_script_and_files() -> None:
    text = (INPUTS / "accelerate.sh").read_text()
    cell = job(text).cell()
    assert (cell.strategy, cell.sizes.sp, cell.sizes.dp, cell.batch, cell.seq_len) == (
        "ulysses",
        4,
        2,
        4,
        65536,
    )
    assert (cell.training.backend, cell.training.micro_batches) == ("deepspeed_zero3", 2)
    beside = (INPUTS / "accelerate_fsdp2.yaml").read_bytes()
    script = (
        "accelerate launch --config_file fsdp2.yaml sft.py --model_name_or_path $MODEL --max_length 8192 "
    )
    script += "--per_device_train_batch_size 1"
    files = [JobFile(Path("a.sh"), script.encode()), JobFile(Path("fsdp2.yaml"), beside)]
    asked = read_script(JobFiles(files, None, "dgx-h100"))
    assert asked is not None
    assert (
        "model_name_or_path=$MODEL: $MODEL is not set in the script; --given MODEL=VALUE" in asked.refusal()
    )
    made = read_script(JobFiles(files, None, "dgx-h100", {"MODEL": "Qwen/Qwen3-8B"}))
    assert made is not None
    assert (made.cell().strategy, made.cell().sizes.dp) == ("all_gather_kv", 2)
    with pytest.raises(UserError, match="several commands train"):
        job(f"{text}\naccelerate launch sft.py\n")


AGAIN = "gradient_checkpointing_kwargs"


@tabled(__file__, "a_script_of_trl_has_trls_defaults")
def test_a_script_of_trl_has_trls_defaults(old: str, new: str, expected: list[object] | str) -> None:
    """trl/trainer/base_config.py and sft_config.py of TRL 1.16; job 06 takes 56.2 GB with them."""
    changes = {"train.py": (old, new), "accelerate_fsdp2.yaml": ("fsdp_activation_checkpointing: true", "")}
    made = read("deepspeed", ["accelerate_fsdp2.yaml", "train.py"], changes)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            made.cell()
        return
    cell = replace(made, strict=False).cell()
    names = "recompute", "recompute_early_stop", "checkpoints", "loss_tile"
    assert [*map(cell.model_options.get, names), cell.seq_len] == expected


_MODEL, _KEY = "llama3.1_8B", "mock_data: true"


def primus(model: str, *keys: str, gpus: int = 8) -> Job:
    """A job of that model with further keys."""
    lines = "\n      ".join((_KEY, *keys))
    job = lenient("Primus", (_KEY, lines), gpus=gpus)
    return lenient("Primus", (_MODEL, model), gpus=gpus) if not keys else job


def made(job: Job) -> dict[str, Any]:
    assert job.cell().sizes.tp == 2
    return {setting.path.rpartition(".")[2]: setting.value for setting in job.settings}


@tabled(__file__, "models_of_its_own_files_have_their_sizes")
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


_TITAN = data(__file__)["_TITAN"]


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
