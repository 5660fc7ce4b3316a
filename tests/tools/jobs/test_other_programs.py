"""Files of other programs are taken for no job of those that are read, and one of several configurations.
So are scripts of ms-swift that start something beside a tuning, of transformers or Megatron-Core.
"""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.choose.asked import kind_of
from spbench.bench.tools.jobs.argument_tables import table_content
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import (
    JobFile,
    other_program,
    path_and_part,
    read_job,
)
from tests.tools.jobs.job_inputs import INPUTS, data, tabled
from tests.tools.jobs.test_configurations import IN_PYTHON

FILES = data(__file__)["FILES"]


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_program_is_named_in_a_line(name: str) -> None:
    with pytest.raises(UserError) as error:
        read_job(None, [JobFile(Path(name), FILES[name].encode())], gpus=8, cluster="dgx-h100")
    message = str(error.value)
    assert "which is not read here: " in message
    assert len(message) < 260


def test_no_file_of_a_program_that_is_read_is_taken_for_anothers() -> None:
    scripts = [JobFile(Path("train.sh"), b"accelerate launch pretrain_gpt.py --num-layers 4\n")]
    files = [JobFile(path, path.read_bytes()) for path in INPUTS.iterdir()] + scripts
    assert len(files) > 10
    assert not [file for file in files if other_program(file, "even_then")]
    programs = table_content("other_programs").values()
    assert all(program.keys() & {"keys", "text", "even_then"} for program in programs)


def test_one_of_several_configurations_is_named(tmp_path: Path) -> None:
    path = tmp_path / "registry.py"
    path.write_text(IN_PYTHON + IN_PYTHON.replace("llama3_70b", "longer").replace("4 * 2048", "16384"))
    how = {"gpus": 64, "cluster": "dgx-h100"}
    with pytest.raises(UserError, match=r"2 functions make .*; name one, as .*registry.py:llama3_70b"):
        read_job(None, [path], **how)
    job = read_job(None, [f"{path}:longer"], **how)
    assert (job.cell().seq_len, job.title) == (16384, "registry.py:longer")
    with pytest.raises(UserError, match=r"no function 'longr' .*did you mean 'longer'"):
        read_job("torchtitan", [f"{path}:longr"], **how)
    assert {kind_of([str(path)]), kind_of([f"{path}:longer"])} == {"job"}
    assert path_and_part("job.sh:x") == (Path("job.sh:x"), "")


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


@tabled(__file__, "models_of_megatron_core_have_their_sizes")
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
