"""Pipelines of torchtitan."""

from __future__ import annotations

from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile
from spbench.bench.tools.jobs.torchtitan_pipeline import first_stage_layers, split_layers, stage_layers
from tests.tools.jobs.job_inputs import job_of

TOML = """[model]
name = "llama3"
flavor = "405B"
[training]
local_batch_size = 16
[parallelism]
tensor_parallel_degree = 8
pipeline_parallel_degree = 8
"""


def job(more: str = "", start: str = TOML) -> Job:
    return job_of("torchtitan", [JobFile(Path("train.toml"), (start + more).encode())], 256)


def test_the_ends_count_as_layers() -> None:
    """As generate_llm_fqn_per_model_part of torchtitan 0.2.2 divides them."""
    assert stage_layers(126, 16, 1, 1) == [7, *[8] * 14, 7]
    assert stage_layers(32, 4, 1, 1) == [8, 9, 8, 7]  # 34 = 9 + 9 + 8 + 8
    assert stage_layers(32, 4, 0, 0) == [8, 8, 8, 8]
    assert stage_layers(6, 8, 1, 1) == [0, 1, 1, 1, 1, 1, 1, 0]
    assert stage_layers(6, 9, 1, 1) == stage_layers(32, 4, 12, 1) == []


def test_a_pipeline_keeps_weights_between_micro_batches() -> None:
    training = job('pipeline_parallel_schedule = "interleaved1F1B"\n').cell().training
    assert training.backend == "zero2"
    assert (training.micro_batches, training.schedule, training.virtual_stages) == (16, "interleaved", 2)
    assert training.stage_layers == [7, *[8] * 14, 7]
    again = job('fsdp_reshard_after_forward = "always"\npipeline_parallel_microbatch_size = 2\n').cell()
    assert (again.training.backend, again.training.micro_batches) == ("zero3", 8)
    assert (again.mesh, again.sizes.dp, again.shape[0]) == (["pp", "dp", "sp", "tp"], 4, 64)


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (
            'pipeline_parallel_schedule = "ZBVZeroBubble"',
            "another schedule than 1F1B, GPipe, Interleaved1F1B",
        ),
        ('pipeline_parallel_schedule_csv = "a.csv"', "stages or a schedule that are written out"),
        ("pipeline_parallel_layers_per_stage = 8", "makes 16 stages, which 1F1B cannot run on 8"),
        ("pipeline_parallel_microbatch_size = 3", "training.local_batch_size 16 is no multiple of"),
        ("pipeline_parallel_first_stage_less_layers = 40", "126 layers, 40 and 1 for the ends, are too few"),
        ("[training]\nglobal_batch_size = 128", "a pipeline that runs several times a step"),
    ],
)
def test_other_pipelines_are_refused(more: str, problem: str) -> None:
    start = TOML.replace("[training]\n", "") if more.startswith("[") else TOML
    text = start.replace("local_batch_size = 16\n", "") if more.startswith("[") else start
    more = f"{more}\nlocal_batch_size = 16" if more.startswith("[") else more
    with pytest.raises(UserError) as error:
        job(more, text).scenario_text()
    assert problem in str(error.value)


def test_without_a_pipeline_its_keys_have_no_effect() -> None:
    text = TOML.replace("pipeline_parallel_degree = 8", 'pipeline_parallel_schedule = "1F1B"')
    assert "schedule" not in {each.path.rpartition(".")[2] for each in job("", text).settings}
    assert job("", text).refusal() == ""


def older(more: str) -> Job:
    text = TOML.replace("local_batch_size", "batch_size").replace("parallelism", "experimental")
    text = text.replace("tensor_parallel_degree = 8\n", "").replace(
        "[training]", "[training]\ncompile = false"
    )
    return job(more, text)


def test_a_pipeline_of_december_2024() -> None:
    """As generate_split_points and build_pipeline_schedule of torchtitan 3f20451b have it: no layers for the
    ends, and as many micro-batches as ranks."""
    assert first_stage_layers(126, 8) == [15, *[16] * 6, 15]
    assert first_stage_layers(31, 4) == [7, 8, 8, 8]
    assert first_stage_layers(9, 2) == [4, 5]
    assert first_stage_layers(3, 4) == []
    training = older("").cell().training
    assert (training.backend, training.micro_batches, training.schedule) == ("zero2", 8, "1f1b")
    assert training.stage_layers == [15, *[16] * 6, 15]
    points = ",".join(f"layers.{n}" for n in (14, 30, 46, 62, 78, 94, 110))
    more = f'pipeline_parallel_split_points = "{points}"\npipeline_parallel_microbatches = 4\n'
    training = older(more).cell().training
    assert (training.stage_layers, training.micro_batches) == ([14, *[16] * 7], 4)
    assert "is no multiple of experimental.pipeline_parallel_microbatches 3" in str(
        older("pipeline_parallel_microbatches = 3\n").problems
    )
    assert split_layers(["layers.8", "layers.4"], 16) == split_layers("tok_embeddings", 16) == []


def test_a_pipeline_of_version_0_1() -> None:
    text = TOML.replace("[training]", "[training]\ncompile = false")
    training = job('pipeline_parallel_schedule = "Interleaved1F1B"\n', text).cell().training
    assert (training.micro_batches, training.stage_layers) == (16, [7, *[8] * 14, 7])
