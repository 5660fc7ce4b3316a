"""What jobs compile, and how their optimizers update: fusions of layers, and torch's default update."""

from __future__ import annotations

from dataclasses import replace

import pytest

from spbench.bench.measure.engines import tracing
from spbench.bench.tools.jobs.job import APPROXIMATED, Job
from tests.tools.jobs.job_inputs import read, settings

TITAN, OLD, AUTOMODEL = "llama3_8b.toml", "llama3_8b_2024.toml", "automodel.yaml"
DEEPSPEED = ["zero2.json", "config.json", "trainer.yaml"]
FUSIONS, UPDATE = "model_options.fusions", "training.implementation"


def outcomes(job: Job, name: str) -> set[str]:
    return {each.outcome for each in job.arguments if each.name == name}


@pytest.mark.parametrize(
    ("kind", "file", "before", "after", "switch"),
    [
        ("torchtitan", TITAN, "[compile]\nenable = false", "[compile]\nenable = true", "compile.enable"),
        ("torchtitan", OLD, "compile = false", "compile = true", "training.compile"),
        ("automodel", AUTOMODEL, "ci: {", "compile: {enabled: true}\nci: {", "compile.enabled"),
    ],
)
def test_what_is_compiled_fuses_layers(kind: str, file: str, before: str, after: str, switch: str) -> None:
    eager, compiled = read(kind, [file], gpus=8), read(kind, [file], {file: (before, after)}, gpus=8)
    assert FUSIONS not in settings(eager)
    assert settings(compiled)[FUSIONS] == ["swiglu", "rope"]
    assert settings(compiled).get("model_options.rms_norm", "fused") == "fused"
    assert outcomes(compiled, switch) == {APPROXIMATED}
    # torchtitan of 2024 compiled no loss
    assert settings(compiled).get("model_options.cross_entropy") == ("compiled" if file == TITAN else None)


def test_a_loss_over_parts_of_the_vocabulary_is_torchs_until_it_is_compiled() -> None:
    """A compiled one makes the gradient in forward, in the one full-precision tensor that there is."""
    name, loss = "llama3_70b.toml", "model_options.cross_entropy"
    changes = (
        ("enable = false", "enable = true"),
        ("tensor_parallel_degree = 8", "disable_loss_parallel = true"),
    )
    assert settings(read("torchtitan", [name], gpus=64))[loss] == "loss_parallel"
    for change in changes:
        assert loss not in settings(read("torchtitan", [name], {name: change}, gpus=64))
    old = ("tensor_parallel_degree = 1\ncompile = false", "tensor_parallel_degree = 8\ncompile = true")
    assert settings(read("torchtitan", [OLD], {OLD: old}, gpus=64))[loss] == "loss_parallel"


@pytest.mark.parametrize(
    ("kind", "files", "changed", "text"),
    [
        ("deepspeed", DEEPSPEED, "trainer.yaml", ("bf16: true", "bf16: true\ntorch_compile: true")),
        (
            "accelerate",
            ["accelerate.sh"],
            "accelerate.sh",
            ("--bf16 true", "--bf16 true --torch_compile true"),
        ),
    ],
)
def test_the_trainer_compiles_what_transformers_has(
    kind: str, files: list[str], changed: str, text: tuple[str, str]
) -> None:
    """Both are read as DeepSpeed with transformers; norms are operators there, and a kernel each once
    compiled."""
    eager, compiled = (
        replace(read(kind, files, change, gpus=8), strict=False) for change in (None, {changed: text})
    )
    assert FUSIONS not in settings(eager)
    assert settings(eager)["model_options.rms_norm"] == "plain"
    assert settings(compiled)[FUSIONS] == ["swiglu", "rope"]
    assert "model_options.rms_norm" not in settings(compiled)
    assert outcomes(compiled, "TrainingArguments.torch_compile") == {APPROXIMATED}


def test_a_loss_that_is_compiled_alone_fuses_no_layer() -> None:
    text = 'enable = true\ncomponents = ["loss"]'
    job = read(
        "torchtitan", [TITAN], {TITAN: ('enable = false\ncomponents = ["model", "loss"]', text)}, gpus=8
    )
    assert FUSIONS not in settings(job)


@pytest.mark.parametrize(
    ("kind", "file", "change", "update"),
    [
        ("torchtitan", TITAN, None, None),
        ("torchtitan", TITAN, ("lr = 3e-4", 'lr = 3e-4\nimplementation = "foreach"'), "foreach"),
        ("torchtitan", TITAN, ("lr = 3e-4", 'lr = 3e-4\nimplementation = "for-loop"'), None),
        ("torchtitan", OLD, None, "foreach"),  # without fused = true, torchtitan asks torch for it
        ("torchtitan", OLD, ("lr = 3e-4", "lr = 3e-4\nfused = true"), None),
        ("automodel", AUTOMODEL, None, "foreach"),
    ],
)
def test_an_update_is_torchs_default_where_a_job_has_it(
    kind: str, file: str, change: tuple[str, str] | None, update: str | None
) -> None:
    job = read(kind, [file], {file: change} if change else None, gpus=8)
    assert settings(job).get(UPDATE) == update


def test_a_compiled_job_keeps_fewer_bytes() -> None:
    """SiLU's result and the turned queries and keys are not kept, of two layers as of one."""
    before, after = "[compile]\nenable = false", "[compile]\nenable = true"
    peaks = []
    for changed in (None, {TITAN: (before, after)}):
        cell = read("torchtitan", [TITAN], changed, gpus=8).cell()
        options = {**cell.model_options, "layers": 2, "recompute": "none"}
        options.pop("recompute_early_stop", None)
        training = cell.training.model_copy(update={"steps": 1})
        cell = cell.model_copy(update={"model_options": options, "training": training, "seq_len": 4096})
        peaks.append(tracing.trace(cell).measurement(None).peak_memory_bytes)
    # SiLU keeps its input, and its product with the gate two tensors of 14,336 features
    assert peaks[0] - peaks[1] >= 4096 * 14336 * 2
