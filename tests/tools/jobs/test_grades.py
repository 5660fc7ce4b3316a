"""Arguments are mapped, approximated or refused; --strict refuses what stands for something else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from tests.tools.jobs.job_inputs import read, settings
from tests.tools.jobs.test_megatron import SIZES, job


def test_what_is_approximated_is_named_with_what_it_may_move() -> None:
    made = job("--rope-type yarn")
    (argument,) = [each for each in made.arguments if each.name == "--rope-type"]
    assert (argument.outcome, argument.missing) == ("approximated", "yarn positions")
    assert argument.detail == "does not move memory or time: angles alone are others"
    assert f"# approximated: --rope-type yarn: {argument.detail}\n" in made.scenario_text()
    with pytest.raises(UserError, match="--rope-type yarn: yarn positions: not modelled"):
        replace(made, strict=True).cell()


def test_an_unknown_key_is_a_warning_that_strict_refuses() -> None:
    made = job("--our-own 3 --hiden-size 4")
    expected = "unknown to this version and left out: --our-own, --hiden-size (did you mean --hidden-size?)"
    assert made.warnings[-1] == expected
    assert made.cell().sizes.world == 8
    with pytest.raises(UserError, match="has no argument --our-own, --hiden-size"):
        replace(made, strict=True).cell()


def test_what_a_file_leaves_to_run_time_is_asked_for_and_given() -> None:
    text = f"torchrun --nnodes $N --nproc-per-node 8 pretrain_gpt.py {SIZES} --tensor-model-parallel-size $TP"
    files = [JobFile(Path("train.sh"), text.encode())]
    asked = read_job(None, files, cluster="dgx-a100").refusal()
    assert "$TP is not set in the script; --given TP=VALUE" in asked
    cell = read_job(None, files, cluster="dgx-a100", environment={"TP": "4", "N": "2"}).cell()
    assert (cell.sizes.tp, cell.sizes.world) == (4, 16)
    toml = b"[model]\nname = 'llama3'\nflavor = '8B'\n[training]\nseq_len = 8192\nlocal_batch_size = 1\n"
    given = {"training.seq_len": "4096"}
    job_file = JobFile(Path("a.toml"), toml)
    assert read_job(None, [job_file], gpus=8, cluster="dgx-a100", environment=given).cell().seq_len == 4096


def test_weights_in_few_bits_are_packed_beside_adapters() -> None:
    quantized = ("finetuning_type: lora", "finetuning_type: lora\nquantization_bit: 4")
    job = read("llama_factory", ["llama_factory.yaml"], {"llama_factory.yaml": quantized}, gpus=8)
    assert settings(job)["model_options.frozen_bits"] == 4
    assert job.cell().model_options["frozen_bits"] == 4


def test_weights_in_few_bits_say_how_much_too_many_bytes_are_counted() -> None:
    quantized = ("bf16: auto", "bf16: auto\nadapter: qlora\nlora_r: 8\nload_in_4bit: true")
    read_so = read("axolotl", ["axolotl.yaml"], {"axolotl.yaml": quantized}, gpus=8)
    (argument,) = [each for each in read_so.arguments if each.name == "load_in_4bit"]
    assert argument.missing == "weights in few bits (QLoRA)"
    assert "about 1.5 bytes a weight more than in 4 bits" in argument.detail
    assert settings(replace(read_so, strict=False))["model_options.lora_rank"] == 8
