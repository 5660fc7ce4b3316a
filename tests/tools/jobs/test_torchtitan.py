"""torchtitan's registries in Python, and its models with experts, and its pipelines."""

from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile
from spbench.bench.tools.jobs.torchtitan_models import first_stage_layers, split_layers, stage_layers
from tests.tools.jobs.job_inputs import data, job_of, settings, tabled

REGISTRY = data(__file__)["REGISTRY"]


def registry(name: str, text: str = REGISTRY) -> Job:
    file = JobFile(Path("qwen3/config_registry.py"), text.encode(), name)
    return job_of("torchtitan", [file], 16)


def test_one_function_of_a_registry_is_read_by_name() -> None:
    made = settings(registry("qwen3_debug"))
    expected = {"model": "qwen3-30b-a3b", "batch": 32, "seq_len": 4096, "sizes.dp": 16}
    expected |= {"model_options.loss_tile": 1024, "model_options.recompute": "full"}
    assert made | expected == made
    assert "sizes.ep" not in made
    changed = settings(registry("qwen3_of_eight"))
    expected = {"sizes.ep": 8, "sizes.dp": 8, "sizes.tp": 2, "batch": 16, "strategy": "megatron_sp"}
    assert changed | expected == changed
    assert "model_options.recompute" not in changed
    assert registry("qwen3_of_eight").cell().sizes.by_axis["ep"] == 8


def test_a_registry_of_version_0_3() -> None:
    """Counts sequences, cuts the loss, and has one matmul of queries, keys and values."""
    text = data(__file__)["OF_SEQUENCES"]
    chunked, whole = (settings(registry(name, text)) for name in ("llama3_8b", "llama3_8b_whole"))
    expected = {"model_options.separate_projections": "mlp", "batch": 32, "model_options.loss_tile": 2048}
    assert chunked | expected == chunked
    assert whole["batch"] == 16
    assert "model_options.loss_tile" not in whole
    assert not any("CUDA graph" in remark for remark in registry("llama3_8b", text).remarks)


@tabled(__file__, "what_a_registry_cannot_say_is_refused_in_a_line")
def test_what_a_registry_cannot_say_is_refused_in_a_line(name: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem) as refused:
        registry(name).cell()
    assert "\n" not in str(refused.value)


EXPERTS = data(__file__)["EXPERTS"]


def with_experts(name: str, flavor: str, ep: int = 4, etp: int = 1) -> Job:
    text = EXPERTS.format(name, flavor, ep, etp)
    return job_of("torchtitan", [JobFile(Path("train.toml"), text.encode())], 16)


@tabled(__file__, "models_with_experts_have_their_published_parameters")
def test_models_with_experts_have_their_published_parameters(name: str, flavor: str, elements: float) -> None:
    made = settings(with_experts(name, flavor))
    assert made["sizes.ep"] == 4
    assert "sizes.etp" not in made
    cell = with_experts(name, flavor).cell()
    assert model_parameters(cell) == pytest.approx(elements, rel=0.005)


def test_how_experts_are_split() -> None:
    for ep, etp, expected in ((4, 2, {"sizes.ep": 4, "sizes.etp": 2}), (1, 1, {"sizes.etp": 2})):
        made = settings(with_experts("qwen3", "30B-A3B", ep, etp))
        assert made | expected == made
    with pytest.raises(UserError, match="expert_tensor_parallel_degree 4 is neither 1 nor"):
        with_experts("qwen3", "30B-A3B", 4, 4).cell()
    explained = with_experts("llama3", "8B").arguments
    assert {a.outcome for a in explained if "expert" in a.name} == {"no effect"}


TOML = data(__file__)["TOML"]


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


@tabled(__file__, "other_pipelines_are_refused")
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
