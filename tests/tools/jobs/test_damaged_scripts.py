"""Damaged launch scripts and test configurations: one line each, or a scenario; never a traceback.

SPBENCH_FUZZ is how many of each kind are tried; a few by default, so that the default tests stay quick.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.expand import expand
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from spbench.bench.tools.jobs.megatron import table
from spbench.bench.tools.jobs.shell_syntax import unknown_in
from spbench.bench.yaml_files import parse_yaml

EXAMPLES = int(os.environ.get("SPBENCH_FUZZ", "25"))

SCRIPT = """#!/bin/bash
#SBATCH --nodes=2
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS=8
WORLD_SIZE=$(($GPUS*${NNODES:-2}))
MODEL=(
    --num-layers 4 --hidden-size 256   # small
    --num-attention-heads 8 --seq-length 128 --max-position-embeddings "128"
)
MORE="--bf16 --micro-batch-size 1 --global-batch-size 16 --swiglu --disable-bias-linear"
torchrun --nproc_per_node $GPUS --nnodes=2 pretrain_gpt.py ${MODEL[@]} $MORE \\
    --tensor-model-parallel-size 2 --sequence-parallel --save "$OUT" --lr 1e-4
"""
TEST = """ENV_VARS: {CUDA_DEVICE_MAX_CONNECTIONS: 1}
MODEL_ARGS:
  --num-layers: 4
  --hidden-size: 256
  --num-attention-heads: 8
  --seq-length: 128
  --max-position-embeddings: 128
  --micro-batch-size: 4
  --pipeline-model-parallel-size: 2
  --bf16: true
  --save: ${OUT}
TEST_TYPE: regular
"""
NASTY = [
    *("0", "-1", "1", "3", "4k", "1e3", "1_0", "9" * 30, "inf", "nan", "true", "''", "é", "\x00", "2**40"),
    *("$", "${", "$(", "`", "'", '"', "(", ")", "\\", "&&", ";", "|", "#", "<<EOF", "${A:-${B}}", "$((1/0))"),
    *("--", "--x", "--bf16", "--num-experts 4", "--hidden-size 64", "if true; then", "done", "ARGS+=(--x)"),
]
WORDS = [*NASTY, *sorted(table().arguments)]


def check(content: bytes, name: str) -> None:
    """Either a scenario, which is read again as the same cell, or one line."""
    files = [JobFile(Path(name), content)]
    try:
        job = read_job("megatron", files, gpus=16, cluster="dgx-a100")
        text = job.scenario_text()
    except UserError as error:
        told = str(error)
    else:
        told = ""
    if told:
        assert "\n" not in told
        assert not unknown_in(told), "a mark is shown"
        return
    (group,) = parse_yaml(Path("job.yaml"), text.encode())["groups"]
    (cell,) = expand({}, [group], {}, "", Path())
    assert cell == job.cell()
    assert cell.sizes.world == 16
    assert all(argument.outcome in ("mapped", "no effect", "not modelled") for argument in job.arguments)


@st.composite
def damaged(draw: Any, text: str) -> bytes:
    """The text with words or lines left out, put in, doubled or exchanged, or a byte changed."""
    for _ in range(draw(st.integers(1, 3))):
        lines = text.split("\n")
        at = draw(st.integers(0, len(lines) - 1))
        words = lines[at].split(" ")
        word = draw(st.integers(0, len(words) - 1))
        match draw(st.integers(0, 5)):
            case 0:
                del words[word]
            case 1:
                words.insert(word, draw(st.sampled_from(WORDS)))
            case 2:
                words[word] = draw(st.sampled_from(WORDS))
            case 3:
                words.append(words[word])
            case 4:
                words = [*words, "\n", *draw(st.sampled_from(lines)).split(" ")]
            case 5:
                words = []
        lines[at] = " ".join(words)
        text = "\n".join(lines)
    content = text.encode()
    if draw(st.integers(0, 9)) == 0:
        at = draw(st.integers(0, len(content) - 1))
        content = content[:at] + bytes([draw(st.integers(0, 255))]) + content[at + 1 :]
    return content


@pytest.mark.parametrize(("text", "name"), [(SCRIPT, "train.sh"), (TEST, "config.yaml")])
def test_as_they_are_they_are_scenarios(text: str, name: str) -> None:
    job = read_job("megatron", [JobFile(Path(name), text.encode())], gpus=16, cluster="dgx-a100")
    assert job.cell().sizes.world == 16


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=damaged(SCRIPT))
def test_a_damaged_script(content: bytes) -> None:
    check(content, "train.sh")


@settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
@given(content=damaged(TEST))
def test_a_damaged_test(content: bytes) -> None:
    check(content, "config.yaml")
