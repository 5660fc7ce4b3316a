"""What a Megatron-LM job has by the container that it runs in."""

from __future__ import annotations

from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from tests.tools.jobs.test_megatron import SIZES, job, settings


@pytest.mark.parametrize(
    ("container", "arguments", "kernel"),
    [
        ("24.01", "--deterministic-mode", "unfused"),
        ("24.01", "", "flash"),
        ("24.01", "--deterministic-mode --attention-backend flash", "flash"),  # asked for, not chosen
        ("25.09", "--deterministic-mode", "flash"),
    ],
)
def test_old_containers_have_no_flash_attention_that_is_deterministic(
    container: str, arguments: str, kernel: str
) -> None:
    before = f"export NVIDIA_PYTORCH_VERSION={container}"
    assert settings(arguments, before=before)["model_options.attention"] == kernel


@pytest.mark.parametrize(
    ("cluster", "container", "config"),
    [
        ("dgx-b200", "26.02", None),
        ("dgx-b200", "26.04", ":4096:8"),
        ("dgx-h100", "26.04", None),  # as its cluster says
    ],
)
def test_the_workspace_of_cublas_on_blackwell(cluster: str, container: str, config: str | None) -> None:
    found = settings("", before=f"export NVIDIA_PYTORCH_VERSION={container}", cluster=cluster)
    assert found.get("training.cublas_workspace") == config


@pytest.mark.parametrize(
    ("container", "cluster", "arguments", "flush_kib", "copies"),
    [
        ("24.01", "dgx-a100", "", 250_000, 2),
        ("24.10", "dgx-h100", "", 250_000, 1),
        ("24.12", "dgx-h100", "", 250_000, None),
        ("25.09", "dgx-h100", "", 50 * 2**10, None),
        ("25.09", "dgx-b200", "", 126 * 2**10, None),
        ("24.01", "dgx-a100", "--deterministic-mode", None, None),  # nothing is timed
        ("25.09", "piz-daint-p100", "", None, None),  # whose cache no file has
    ],
)
def test_what_the_compiler_takes_in_the_first_step(
    container: str, cluster: str, arguments: str, flush_kib: int | None, copies: int | None
) -> None:
    before = f"export NVIDIA_PYTORCH_VERSION={container}"
    found = settings(f"--cross-entropy-loss-fusion {arguments}", before=before, cluster=cluster)
    options = ("autotune_flush_kib", "autotune_copies")
    assert [found.get(f"model_options.{name}") for name in options] == [flush_kib, copies]


def test_a_container_that_is_no_release() -> None:
    with pytest.raises(UserError, match="NVIDIA_PYTORCH_VERSION=new is no release of NVIDIA's container"):
        job("", before="export NVIDIA_PYTORCH_VERSION=new").scenario_text()


@pytest.mark.parametrize(
    ("container", "arguments", "shape"),
    [
        ("24.01", "--attention-backend unfused", "square"),
        ("25.03", "--attention-backend unfused", "by_layer"),
        ("25.03", "--spec local", "square"),
    ],
)
def test_the_mask_of_a_bert(container: str, arguments: str, shape: str) -> None:
    script = f"NVIDIA_PYTORCH_VERSION={container} python pretrain_bert.py {SIZES} {arguments}"
    made = read_job("megatron", [JobFile(Path("train.sh"), script.encode())], gpus=8, cluster="dgx-a100")
    assert made.refusal() == ""
    assert {s.path: s.value for s in made.settings}["model_options.mask_shape"] == shape
