"""Variables of the environment: what of them is mapped, moves something that is not modelled, or nothing."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.changed_figures import changed_cluster
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.tools.fit.anatomy import examine
from spbench.bench.tools.jobs.job import Argument, Job
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from spbench.bench.tools.jobs.variables import _rules
from spbench.bench.yaml_files import read_yaml
from tests.tools.jobs.test_megatron import SIZES

TABLES = Path(__file__).parents[3] / "bench/tools/jobs"


def job(*variables: str, arguments: str = "") -> Job:
    lines = [*(f"export {each}" for each in variables), f"python pretrain_gpt.py {SIZES} {arguments}"]
    return read_job(
        "megatron", [JobFile(Path("train.sh"), "\n".join(lines).encode())], gpus=8, cluster="dgx-h100"
    )


def told(made: Job) -> dict[str, Argument]:
    return {each.name: each for each in made.arguments if not each.name.startswith("--")}


@pytest.mark.parametrize("variable", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_what_is_modelled_of_the_allocator_is_a_setting(variable: str) -> None:
    for value in ("expandable_segments:True", "max_split_size_mb:512"):
        made = job(f"{variable}={value},pinned_num_register_threads:8")
        assert made.cell().training.cuda_alloc_conf == value
        assert f"{variable}={value}" in made.scenario_text()
        outcomes = [each.outcome for each in told(made).values()]
        assert outcomes == ["mapped", "no effect"]
    both = job(f"{variable}='max_split_size_mb:512, expandable_segments:True'")
    assert both.cell().training.cuda_alloc_conf == "expandable_segments:True"
    assert told(both)[f"{variable} max_split_size_mb"].outcome == "approximated"
    assert job(f"{variable}=expandable_segments:False").cell().training.cuda_alloc_conf is None


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ("max_split_size_mb:20", "more than 20"),
        ("expandable_segments", "is no list of NAME:VALUE"),
        ("expandable_segments:True,expandable_segments:True", "is no list of NAME:VALUE, each given once"),
        (
            "expandible_segments:True",
            "has no argument PYTORCH_CUDA_ALLOC_CONF expandible_segments, a setting",
        ),
        ("$CONF", "PYTORCH_CUDA_ALLOC_CONF: $CONF is not set in the script"),
    ],
)
def test_what_torch_would_not_read_of_the_allocator_is_refused(value: str, problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        replace(job(f"PYTORCH_CUDA_ALLOC_CONF={value}"), strict=True).cell()


@pytest.mark.parametrize(
    ("variable", "outcome", "detail"),
    [
        (
            "PYTORCH_CUDA_ALLOC_CONF='roundup_power2_divisions:[256:1,512:2,>:8]'",
            "approximated",
            "move memory",
        ),
        ("PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.8", "approximated", "may move memory"),
        ("PYTORCH_CUDA_ALLOC_CONF=backend:cudaMallocAsync", "approximated", "may move time and memory"),
        ("NCCL_BUFFSIZE=8388608", "approximated", "may move time and memory: NCCL's buffers"),
        ("NCCL_BUFFSIZE=4194304", "no effect", "is so without it"),
        ("NCCL_MAX_NCHANNELS=4", "approximated", "may move time and memory"),
        ("NCCL_NVLS_ENABLE=0", "approximated", "may move time and memory"),
        ("NCCL_ALGO=Tree", "approximated", "may move time"),
        ("NCCL_DEBUG=INFO", "no effect", "logs"),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1", "no effect", "in the order in which they are launched"),
        ("CUDA_DEVICE_MAX_CONNECTIONS=32", "approximated", "may move time"),
        ("CUDA_LAUNCH_BLOCKING=1", "approximated", "may move time"),
        ("TORCH_NCCL_AVOID_RECORD_STREAMS=0", "approximated", "may move memory"),
        ("CUBLASLT_WORKSPACE_SIZE=65536", "approximated", "may move memory"),
        ("CUBLAS_WORKSPACE_CONFIG=:4096:2", "mapped", "training.cublas_workspace"),
        ("NVTE_FWD_LAYERNORM_SM_MARGIN=16", "approximated", "may move time"),
        ("OMP_NUM_THREADS=8", "no effect", "of the host"),
        ("NVTE_NEW_SWITCH=1", "unknown", "in the environment"),
        ("DATA=/data", "no effect", "a variable of the script's own"),
    ],
)
def test_a_variable_that_may_move_something_is_never_without_effect(
    variable: str, outcome: str, detail: str
) -> None:
    made = job(variable)
    (argument,) = told(made).values()
    assert (argument.outcome, detail in argument.detail) == (outcome, True), argument
    named = any(argument.name in remark for remark in made.remarks)
    assert named == (outcome == "approximated")


def test_expandable_segments_flip_the_verdict_of_a_job() -> None:
    """On a card that has between what is reserved in segments of fixed sizes and in those that grow."""
    sizes = "--num-layers 2 --hidden-size 256 --num-attention-heads 8 --seq-length 3000 --vocab-size 32000"
    script = (
        f"python pretrain_gpt.py {sizes} --max-position-embeddings 3000 --micro-batch-size 1 --bf16 --swiglu"
    )
    whole = load_cluster("dgx-h100")
    spare = (whole.usable_memory_bytes or 0) - 1000 * 2**20
    total = whole.content["device"]["memory_total_bytes"]["value"] - spare
    small = changed_cluster("dgx-h100", {"device.memory_total_bytes": str(total)})
    fits = {}
    for value in ("False", "True"):
        text = f"export PYTORCH_CUDA_ALLOC_CONF=expandable_segments:{value}\n{script}"
        made = read_job("megatron", [JobFile(Path("train.sh"), text.encode())], gpus=8, cluster=small)
        fits[value] = examine(made.cell()).status
    assert fits == {"False": "oom", "True": "ok"}


def test_variables_of_attention_are_those_that_megatron_sets_itself() -> None:
    assert job("NVTE_FUSED_ATTN=0").cell().model_options["attention"] == "flash"
    assert "runs in older versions alone" in "".join(job("NVTE_FUSED_ATTN=0").remarks)
    same = told(job("NVTE_FUSED_ATTN=0", arguments="--attention-backend flash"))["NVTE_FUSED_ATTN"]
    assert (same.outcome, same.detail) == ("no effect", "is so with --attention-backend flash")
    with pytest.raises(UserError, match="NVTE_FLASH_ATTN=0 and --attention-backend flash are both given"):
        job("NVTE_FLASH_ATTN=0", arguments="--attention-backend flash").cell()


#: of another form
OWN = ("other_programs", "model_zoo", "primus_models")


def test_every_entry_of_the_tables_has_a_reason() -> None:
    tables = [path for path in TABLES.glob("*.yaml") if path.stem not in OWN]
    assert len(tables) > 12
    for path in tables:
        content = read_yaml(path)
        for group in content["no_effect"]:
            assert len(group["reason"].split()) >= 3, group
        stood_for = [group for group in content.get("refused", ()) if "may_move" in group]
        for group in [*content["not_modelled"], *stood_for]:
            assert group["may_move"] in ("time", "memory", "time and memory", "nothing"), group
            assert len(group["because"].split()) >= 3, group
    assert _rules(False)
    assert _rules(True)
