"""Jobs of torchtitan, DeepSpeed and Megatron-Bridge: every key accounted for. What jobs compile, and how
their optimizers update: fusions of layers, and torch's default update. An argument is mapped, approximated
or refused, and --strict refuses what stands for something else. Names of models: copies, tuned and quantized
ones have the sizes of what they come from.
"""

import itertools
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.setting_values import read_model_file
from spbench.bench.tools.choose.advise_report import scenario_text
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.subject import subject
from spbench.bench.tools.jobs import bridge
from spbench.bench.tools.jobs.flags import program_flags
from spbench.bench.tools.jobs.job import APPROXIMATED, Job
from spbench.bench.tools.jobs.job_files import JobFile, imported, read_job
from spbench.bench.yaml_files import parse_yaml
from spbench.impls.models.huggingface.config import model_from_config
from spbench.impls.models.huggingface.published import near_model
from spbench.impls.registries import model_preset
from tests.tools.jobs.job_inputs import GPUS, INPUTS, JOBS, data, job_of, read, settings, tabled
from tests.tools.jobs.test_megatron import SIZES, job
from tests.tools.jobs.test_programs import lenient

HUGGING_FACE = Path(__file__).parents[2] / "impls/models/huggingface"


@pytest.mark.parametrize("name", JOBS)
def test_every_key_has_an_outcome_and_the_scenario_is_a_cell(name: str) -> None:
    kind, files = JOBS[name]
    job = replace(read(kind, files, gpus=GPUS.get(name, 8)), strict=False)
    assert job.arguments
    assert not job.of("unknown") + job.of("refused")
    assert all(argument.detail for argument in job.arguments)
    assert job.cell().sizes.world == GPUS.get(name, 8)
    assert "\ngroups:\n" in job.scenario_text()


QWEN3 = data(__file__)["QWEN3"]


def qwen3(flavor: str) -> Job:
    text = QWEN3.replace("8B", flavor)
    return job_of("torchtitan", [JobFile(Path("qwen3.toml"), text.encode())], 16)


def test_qwen3_of_torchtitan_is_that_of_its_config_json() -> None:
    made = settings(qwen3("8B"))
    cell = qwen3("8B").cell()
    theirs = HUGGING_FACE / "qwen3-8b.json"
    model, other = model_preset(*cell.model_arguments), model_from_config(json.loads(theirs.read_text()))
    alike = {"separate_projections": False, **{n: vars(other)[n] for n in ("attention", "cross_entropy")}}
    assert (model.cross_entropy, replace(model, **alike)) == ("loss_parallel", other)
    assert made["strategy"] == "megatron_sp+all_gather_kv"
    assert qwen3("32B").cell().model_options["head_dim"] == 128
    written = JobFile(Path("a.toml"), program_flags("torchtitan", cell).content.encode())
    again = read_job(None, [written], cluster="dgx-h100")
    assert again.cell().model_arguments == cell.model_arguments
    for flavor, problem in data(__file__)["OTHER_FLAVORS"].items():
        with pytest.raises(UserError, match=problem):
            qwen3(flavor).cell()


IN_PYTHON = data(__file__)["IN_PYTHON"]


def in_python(text: str) -> Job:
    return job_of("torchtitan", [JobFile(Path("config_registry.py"), text.encode())], 64)


def test_a_configuration_in_python_is_read_and_not_run() -> None:
    assert settings(in_python(IN_PYTHON)) == settings(read("torchtitan", ["llama3_70b.toml"], gpus=64))
    for old, new, problem in data(__file__)["NOT_IN_PYTHON"]:
        assert old in IN_PYTHON
        with pytest.raises(UserError, match=problem):
            in_python(IN_PYTHON.replace(old, new, 1)).cell()


@tabled(__file__, "keys_of_torchtitan_that_set_something")
def test_keys_of_torchtitan_that_set_something(old: str, new: str, expected: dict[str, Any]) -> None:
    made = settings(read("torchtitan", ["llama3_8b.toml"], {"llama3_8b.toml": (old, new)}, gpus=8))
    assert made | expected == made
    assert ("model_options.recompute" in made) == ("none" not in new)


@tabled(__file__, "what_deepspeed_cannot_be_here_is_said")
def test_what_deepspeed_cannot_be_here_is_said(file: str, old: str, new: str, problem: str) -> None:
    if file == "config.json":
        job = read("deepspeed", ["zero1.json", "trainer.yaml"], gpus=8)
        assert "which model it is is not said" in job.refusal()
        return
    with pytest.raises(UserError, match=problem):
        read(*JOBS["ZeRO-1"], {file: (old, new)}, gpus=8).cell()


CONTEXT = data(__file__)["CONTEXT"]


def with_context(text: str = CONTEXT, more: str = "") -> Job:
    others = {name: (INPUTS / name).read_bytes() for name in ("config.json",)}
    others |= {"accelerate.yaml": text.encode(), "trainer.yaml": f"max_length: 65536\n{more}".encode()}
    return job_of("deepspeed", [JobFile(INPUTS / name, content) for name, content in others.items()], None)


def test_context_parallelism_of_accelerate_is_torchs() -> None:
    made = settings(with_context())
    assert (made["strategy"], made["sizes.sp"], made["sizes.dp"]) == ("all_gather_kv", 8, 1)
    assert (made["training.backend"], made["strategy_options.placement"]) == ("zero3", "zigzag")
    ring = CONTEXT.replace("cp_size: 8", "cp_size: 4, parallelism_config_cp_comm_strategy: alltoall")
    made = settings(with_context(ring.replace("shard_size: 1", "shard_size: 2")))
    assert (made["strategy"], made["sizes.sp"], made["sizes.dp"]) == ("ring_attention", 4, 2)
    whole = with_context(ring.replace("cp_size: 4", "cp_size: 1").replace("shard_size: 1", "shard_size: 8"))
    assert settings(whole)["strategy"] == "single"
    (how,) = [each for each in whole.arguments if each.name.endswith("cp_comm_strategy")]
    assert (how.outcome, how.detail) == ("no effect", "sequences are whole")
    for old, new, more, problem in data(__file__)["NO_CONTEXT"]:
        with pytest.raises(UserError, match=problem):
            with_context(CONTEXT.replace(old, new), more).cell()


def test_experts_latents_and_eight_bits_of_bridge() -> None:
    content = {
        "model": {"expert_model_parallel_size": 8, "moe_router_dtype": "fp32", "seq_length": 4096},
        "train": {"global_batch_size": 16, "micro_batch_size": 1},
        "ddp": {"use_distributed_optimizer": True},
        "mixed_precision": "bf16_with_fp8_subchannel_scaling_mixed",
    }
    experts = {
        **json.loads((INPUTS / "config.json").read_text()),
        "model_type": "qwen3_moe", "num_experts": 64, "num_experts_per_tok": 4, "moe_intermediate_size": 256,
    }  # fmt: skip
    expected = {
        "sizes.ep": 8, "model_options.experts": 64, "model_options.experts_per_token": 4,
        "model_options.expert_inner": 256, "model_options.dispatcher": "all_to_all",
        "model_options.permutation": "fused", "model_options.router_dtype": "float32",
        "model_options.fp8": "blockwise",
    }  # fmt: skip

    def made(model: dict[str, Any]) -> Job:
        bridged = {**content, "model": {**content["model"], **model}}
        named = {"bridge.json": bridged, "config.json": experts}
        return job_of("bridge", [JobFile(Path(n), json.dumps(c).encode()) for n, c in named.items()], 8)

    assert settings(made({})) | expected == settings(made({}))
    latents = settings(made({"multi_latent_attention": True, "q_lora_rank": 96}))
    assert (latents["model_options.q_lora_rank"], latents["model_options.kv_lora_rank"]) == (96, 512)
    assert "model_options.kv_lora_rank" not in settings(made({"kv_lora_rank": 64}))


def test_a_kind_is_told_by_the_files() -> None:
    paths = [INPUTS / name for name in JOBS["ZeRO-2"][1]]
    assert read_job(None, paths, gpus=8, cluster="dgx-h100").kind == "deepspeed"
    with pytest.raises(UserError, match="no job of torchtitan"):
        read_job("torchtitan", paths)
    with pytest.raises(UserError, match="not one of the files of a DeepSpeed job"):
        read_job("deepspeed", [*paths, INPUTS / "llama3_8b.toml"])
    with pytest.raises(UserError, match="a second configuration of DeepSpeed"):
        read_job("deepspeed", [*paths, INPUTS / "zero1.json"])


def whole_bridge(more: dict[str, Any]) -> Job:
    """The job of sizes with further keys."""
    content = parse_yaml(Path("bridge.yaml"), (INPUTS / "bridge_8b.yaml").read_bytes())
    for name, value in more.items():
        *above, key = name.split(".")
        place = content
        for section in above:
            place = place.setdefault(section, {})
        place.setdefault(key, value)
    return job_of("bridge", [JobFile(Path("bridge.yaml"), json.dumps(content).encode())], 16)


def test_a_configuration_of_bridge_that_is_written_out_whole_is_the_same() -> None:
    """With all keys that have a default at that, as its to_yaml writes them."""
    known = bridge.bridge_table().arguments
    others = ("comm_overlap.", "mixed_precision", "model.bias_activation_fusion")  # which recipes set
    defaults = {n: k.default for n, k in known.items() if k.default is not None and not n.startswith(others)}
    assert len(defaults) > 400
    whole = whole_bridge(defaults)
    assert not whole.of("refused") + whole.of("unknown")
    assert settings(whole) == settings(read(*JOBS["sizes"], gpus=16))


def test_overlaps_and_variables_of_bridge() -> None:
    made = settings(
        whole_bridge(
            {"comm_overlap.tp_comm_overlap": False, "model.pipeline_model_parallel_size": 2}
            | {"model.virtual_pipeline_model_parallel_size": 2}
        )
    )
    assert (made["training.bucket_size"], made["training.overlap_param_gather"]) == (128 * 2**20, True)
    assert made["training.overlap_p2p_communication"] is True
    assert "training.align_param_gather" not in made  # as all stages do by default
    apart = {"comm_overlap.tp_comm_overlap": False, "comm_overlap.align_param_gather": False}
    apart |= {"model.pipeline_model_parallel_size": 2, "model.virtual_pipeline_model_parallel_size": 2}
    assert settings(whole_bridge(apart))["training.align_param_gather"] is False
    with pytest.raises(UserError, match="hidden in matmuls"):
        whole_bridge({"comm_overlap.tp_comm_overlap": True}).cell()
    variables = whole_bridge({"env_vars.PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"})
    assert variables.cell().training.cuda_alloc_conf == "expandable_segments:True"
    experts = whole_bridge({"model.moe_router_topk": 4, "model.moe_grouped_gemm": True})
    assert not experts.of("refused")


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
    assert (near.name if near else "") == known


@tabled(__file__, "what_a_model_has_that_none_here_has_is_said")
def test_what_a_model_has_that_none_here_has_is_said(name: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        read_model_file(name)


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
def test_the_paths_of_model_and_cluster_hold_where_the_scenario_lies(
    where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b", "c/d"):
        Path(folder).mkdir(parents=True)
    Path("link").symlink_to("c/d")
    Path("a/ours.yaml").write_text("extends: dgx-h100\n")
    files = [shutil.copy(INPUTS / name, "a") for name in JOBS["ZeRO-2"][1]]
    imported(("deepspeed", *files), 8, "a/ours.yaml", False, False, (), (), written := Path(where))
    cell = read_job("deepspeed", files, gpus=8, cluster="a/ours.yaml").cell()
    (best := written.with_name("best.yaml")).write_text(scenario_text([cell], "best", best.parent))
    for scenario, at in itertools.product((written, best), (tmp_path, tmp_path / "c")):
        monkeypatch.chdir(at)
        (cell,) = load_scenario(tmp_path / scenario).cells[""]
        assert (tmp_path / scenario).parent.joinpath(cell.model).resolve() == tmp_path / "a" / "config.json"
        assert Path(cell.cluster).resolve() == tmp_path / "a" / "ours.yaml"


@tabled(__file__, "sequences_beyond_the_positions_of_a_model_are_told")
def test_sequences_beyond_the_positions_of_a_model_are_told(
    fields: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files = [shutil.copy(INPUTS / name, ".") for name in JOBS["ZeRO-2"][1]]
    (config := Path("config.json")).write_text(json.dumps(json.loads(config.read_text()) | fields))
    job = imported(("deepspeed", *files), 8, "dgx-h100", False, False, (), (), Path("x/y.yaml"))
    asked = Asked("dgx-h100", 8, settings={"seq_len": 4096})
    scenario = subject(["x/y.yaml"], Asked())
    for notes in (job.notes, subject(["config.json"], asked).remarks, scenario.remarks):
        assert [said in each for each in notes if "sequences of 4096 are longer" in each] == [True] * bool(
            said
        )
