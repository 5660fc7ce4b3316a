"""What jobs compile, and how their optimizers update: fusions of layers, and torch's default update.

An argument is mapped, approximated or refused, and --strict refuses what stands for something else.
Names of models: copies, tuned and quantized ones have the sizes of what they come from.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.setting_values import read_model_file
from spbench.bench.tools.jobs.job import APPROXIMATED, Job
from spbench.bench.tools.jobs.job_files import JobFile, imported, read_job
from spbench.impls.models.huggingface.published import near_model
from tests.tools.jobs.job_inputs import INPUTS, JOBS, job_of, read, settings, tabled
from tests.tools.jobs.test_megatron import SIZES, job
from tests.tools.jobs.test_programs import lenient

TITAN, OLD, AUTOMODEL = "llama3_8b.toml", "llama3_8b_2024.toml", "automodel.yaml"
DEEPSPEED = ["zero2.json", "config.json", "trainer.yaml"]
FUSIONS, UPDATE = "model_options.fusions", "training.implementation"


def outcomes(job: Job, name: str) -> set[str]:
    return {each.outcome for each in job.arguments if each.name == name}


@tabled(__file__, "what_is_compiled_fuses_layers")
def test_what_is_compiled_fuses_layers(kind: str, file: str, before: str, after: str, switch: str) -> None:
    eager, compiled = read(kind, [file], gpus=8), read(kind, [file], {file: (before, after)}, gpus=8)
    assert FUSIONS not in settings(eager)
    assert settings(compiled)[FUSIONS] == ["swiglu", "rope"]
    assert settings(compiled).get("model_options.rms_norm", "fused") == "fused"
    assert outcomes(compiled, switch) == {APPROXIMATED}
    # torchtitan of 2024 compiled no loss
    assert settings(compiled).get("model_options.cross_entropy") == ("compiled" if file == TITAN else None)


@tabled(__file__, "the_trainer_compiles_what_transformers_has")
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


@tabled(__file__, "an_update_is_torchs_default_where_a_job_has_it")
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


@tabled(__file__, "words_that_change_no_size_are_passed_over")
def test_words_that_change_no_size_are_passed_over(name: str, known: str) -> None:
    near = near_model(name)
    assert near is not None
    assert near.name == known


@pytest.mark.parametrize(
    "name",
    ["Qwen/Qwen3-9B", "a/Llama-3B", "Qwen/Qwen3-Embedding-8B", "Qwen/Qwen3-Omni-30B", "a/Mistral-7B"],
)
def test_other_words_make_another_model(name: str) -> None:
    assert near_model(name) is None


def test_what_a_model_has_that_none_here_has_is_said(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"^Qwen/Qwen2-VL-7B-Instruct has a tower for .*: not modelled$"):
        read_model_file("Qwen/Qwen2-VL-7B-Instruct")
    with pytest.raises(UserError, match=r"^swiss-ai/Apertus-8B-2509 has another activation"):
        read_model_file("swiss-ai/Apertus-8B-2509", tmp_path)
    with pytest.raises(UserError, match="No such file"):
        read_model_file("nobody/nothing")


@tabled(__file__, "what_is_left_out_of_a_model_is_said")
def test_what_is_left_out_of_a_model_is_said(name: str, missing: str, said: str) -> None:
    job = lenient("axolotl", ("NousResearch/Meta-Llama-3-8B", name))
    assert job.cell().model == name
    (argument,) = [each for each in job.arguments if each.name == "base_model"]
    assert (argument.outcome, argument.missing) == ("approximated", missing)
    assert any(said in each for each in job.warnings if "base_model" in each)


def test_what_is_left_out_of_a_file_beside_is_said(tmp_path: Path) -> None:
    beside = tmp_path / "config.json"
    beside.write_text(json.dumps(read_model_file("ByteDance-Seed/Seed-OSS-36B-Base")))
    paths = (*(INPUTS / each for each in ("zero3.json", "trainer.yaml")), beside)
    deepspeed = job_of("deepspeed", [JobFile(path, path.read_bytes()) for path in paths], 8)
    assert [each for each in deepspeed.remarks if each.startswith("dropout, 0.1 in this model as published")]


@pytest.mark.parametrize("where", ["here.yaml", "b/beside.yaml", "link/below.yaml"])
def test_the_path_of_a_model_holds_where_the_scenario_lies(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "c/d"):
        Path(folder).mkdir(parents=True)
    Path("link").symlink_to("c/d")
    files = [shutil.copy(INPUTS / name, "a") for name in JOBS["ZeRO-2"][1]]
    imported(("deepspeed", *files), 8, "dgx-h100", False, False, (), Path(where))
    (cell,) = load_scenario(where).cells[""]
    assert (Path(where).parent / cell.model).resolve() == tmp_path / "a" / "config.json"
