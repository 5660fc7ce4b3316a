"""Jobs of Megatron-LM: every argument accounted for, and the defaults that it derives."""

from __future__ import annotations

import csv
import json
import re
import shlex
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from spbench.bench.tools.papers.megatron_cases import cases
from spbench.bench.yaml_files import parse_yaml

ROOT = Path(__file__).parents[3]

SIZES = (
    "--num-layers 4 --hidden-size 256 --num-attention-heads 8 --seq-length 128 --max-position-embeddings 128 "
    "--micro-batch-size 2 --bf16"
)


def job(arguments: str, gpus: int = 8, before: str = "", sizes: str = SIZES, **more: Any) -> Job:
    script = f"{before}\npython pretrain_gpt.py {sizes} {arguments}"
    file = JobFile(Path("train.sh"), script.encode())
    return read_job("megatron", [file], gpus=gpus, cluster=more.pop("cluster", "dgx-a100"), **more)


def settings(arguments: str, **more: Any) -> dict[str, Any]:
    made = job(arguments, **more)
    assert made.refusal() == ""
    return {setting.path: setting.value for setting in made.settings}


def test_every_argument_and_variable_of_the_functional_tests_is_accounted_for() -> None:
    kinds: Counter[str] = Counter()
    unknown = 0
    for case in {case.case: case for case in cases()}.values():
        given = parse_yaml(Path(case.case), case.text.encode())
        argued = [a for a in case.job.arguments if a.name.startswith("--")]
        # a flag that is off is none
        asked = {name for name, value in given["MODEL_ARGS"].items() if value is not False}
        assert {a.name.removeprefix("--") for a in argued} == asked
        others = {a.name.split()[0] for a in case.job.arguments if a not in argued}  # a variable's settings
        assert others == given["ENV_VARS"].keys()
        unknown += bool(case.job.of("unknown"))
        assert all(argument.detail or argument.outcome == "unknown" for argument in case.job.arguments)
        # what keeps a case from being imported is an argument, not a fault of ours
        assert not case.job.refusal() or case.job.of("refused") or case.job.of("approximated"), (
            case.job.refusal()
        )
        kinds.update(argument.outcome for argument in case.job.arguments)
    assert kinds.keys() == {"mapped", "no effect", "approximated", "refused", "unknown"}
    # of another program (Flextron), and variables of TransformerEngine that are in no table
    assert unknown == 5


def test_most_functional_tests_are_imported() -> None:
    found = {case.case: case for case in cases()}
    assert len(found) == 221
    assert sum(not case.job.refusal() for case in found.values()) >= 190


@pytest.mark.slow
def test_what_is_imported_is_a_cell() -> None:
    found = cases()
    assert len({(case.case, case.golden) for case in found}) == len(found) == 763
    for case in found:
        assert isinstance(case.cell, str) == bool(case.job.refusal()), case.cell


_A, _H, _B = "dgx-a100", "dgx-h100", "dgx-b200"
_NATIVE = "--bf16 --use-distributed-optimizer --fp8-param-gather --fp8-format hybrid --fp8-recipe"
_OFFLOADED = "--optimizer-cpu-offload --use-precision-aware-optimizer --use-distributed-optimizer"
_FLUSH, _COPIES, _LOSS = "autotune_flush_kib", "autotune_copies", "--cross-entropy-loss-fusion"


@pytest.mark.parametrize(
    ("cluster", "container", "arguments", "path", "value"),
    [
        (_A, "", "", "model_options.inner", 1024),
        (_A, "", "--swiglu --disable-bias-linear", "model_options.inner", 640),  # 8/3 x 256 = 682, in 64s
        (_A, "", "--swiglu --ffn-hidden-size 768", "model_options.inner", 768),
        (_A, "", "", "model_options.vocabulary", 50257),
        (_A, "", "--tokenizer-type NullTokenizer --vocab-size 1000", "model_options.vocabulary", 1000),
        (_A, "", "", "batch", 16),
        (_A, "", "--global-batch-size 64", "training.micro_batches", 4),
        (_A, "", "", "precision", "bf16"),
        (_A, "", "", "strategy", "tensor_parallel"),
        (_A, "", "--sequence-parallel", "strategy", "tensor_parallel"),
        (_A, "", "--sequence-parallel --tensor-model-parallel-size 2", "strategy", "megatron_sp"),
        (
            *(_A, "", "--context-parallel-size 2 --attention-dropout 0"),
            *("strategy", "tensor_parallel+ring_attention"),
        ),
        (_A, "", "--context-parallel-size 2 --cp-comm-type a2a", "strategy", "tensor_parallel+ulysses"),
        (_A, "", "--pipeline-model-parallel-size 2", "sizes.dp", 4),
        (_A, "", "--use-tp-pp-dp-mapping", "mesh", ["dp", "pp", "sp", "tp"]),
        (_A, "", "", "model_options.attention", "flash"),
        (_A, "", "--attention-backend fused", "model_options.attention", "cudnn"),
        (_A, "", "--transformer-impl local", "model_options.attention", "unfused"),
        (_A, "", "", "model_options.cross_entropy", "fused"),
        (_A, "", "--cross-entropy-loss-fusion", "model_options.cross_entropy", "native"),
        (_H, "", "--bf16 --fp8-format hybrid --fp8-recipe tensorwise", "model_options.fp8", "tensorwise"),
        (_H, "", "--bf16 --fp8-format e4m3 --fp8-recipe blockwise", "model_options.fp8", "blockwise"),
        (_A, "", "--fp8-recipe mxfp8 --fp8-param-gather", "model_options.fp8", None),
        (_H, "", "--bf16 --fp8-format hybrid", "model_options.fp8", "delayed"),
        (_H, "", "--fp8-format hybrid --fp8-amax-history-len 8", "model_options.fp8_history", None),
        (
            _H,
            "",
            "--fp8-format hybrid --fp8-amax-history-len 8 --fp8-amax-compute-algo max",
            "model_options.fp8_history",
            8,
        ),
        (_H, "", f"{_NATIVE} tensorwise", "training.fp8_param_gather", True),
        (_H, "", f"{_NATIVE} mxfp8", "training.fp8_param_gather", None),
        (_H, "", f"{_NATIVE} tensorwise", "model_options.fp8_transposes", None),
        (_B, "", f"{_NATIVE} tensorwise", "model_options.fp8_transposes", False),
        (_B, "", f"{_NATIVE} blockwise", "model_options.fp8_transposes", None),
        (_H, "", "--tp-comm-overlap", "strategy_options.userbuffers", None),
        (
            _H,
            "",
            "--tp-comm-overlap --sequence-parallel --tensor-model-parallel-size 2",
            "strategy_options.userbuffers",
            True,
        ),
        (_A, "", "--squared-relu", "model_options.mlp", "squared_relu"),
        (_A, "", "--qk-layernorm", "model_options.qk_norm", True),
        (_A, "", "--no-bias-dropout-fusion", "model_options.unfused", ["bias_dropout"]),
        (_A, "", "--deterministic-mode", "training.cublas_workspace", ":4096:8"),
        (_A, "", "", "training.gradient_accumulation_fusion", True),
        (_A, "", "--grad-reduce-in-bf16", "training.accumulate_allreduce_grads_in_fp32", False),
        (_A, "", "--train-iters 1", "training.steps", 1),
        (_A, "", _OFFLOADED, "training.optimizer", "host"),
        (_A, "", _OFFLOADED, "training.optimizer_offload_fraction", None),
        (_A, "", f"{_OFFLOADED} --optimizer-offload-fraction 0.5", "training.optimizer", "host"),
        (
            *(_A, "", f"{_OFFLOADED} --optimizer-offload-fraction 0.5"),
            *("training.optimizer_offload_fraction", 0.5),
        ),
        (_A, "", f"{_OFFLOADED} --optimizer-offload-fraction 0", "training.optimizer", None),
        (_A, "", "--optimizer-offload-fraction 0.5", "training.optimizer_offload_fraction", None),
        # TransformerEngine chooses attention by the card
        (_H, "", "", "model_options.attention", "cudnn"),
        (_B, "", "", "model_options.attention", "cudnn"),
        (_B, "", "--deterministic-mode", "model_options.attention", "flash"),
        (_B, "", "--deterministic-mode --attention-dropout 0", "model_options.attention", "cudnn"),
        ("v100-sxm-32gb", "", "", "model_options.attention", "unfused"),
        # old containers have no FlashAttention that is deterministic
        (_A, "24.01", "--deterministic-mode", "model_options.attention", "unfused"),
        (_A, "24.01", "", "model_options.attention", "flash"),
        (_A, "24.01", "--deterministic-mode --attention-backend flash", "model_options.attention", "flash"),
        (_A, "25.09", "--deterministic-mode", "model_options.attention", "flash"),
        # the workspace of cuBLAS
        (_B, "26.02", "", "training.cublas_workspace", None),
        (_B, "26.04", "", "training.cublas_workspace", ":4096:8"),
        (_H, "26.04", "", "training.cublas_workspace", None),  # as its cluster says
        # what the compiler takes in the first step
        (_A, "24.01", _LOSS, f"model_options.{_FLUSH}", 250_000),
        (_A, "24.01", _LOSS, f"model_options.{_COPIES}", 2),
        (_H, "24.10", _LOSS, f"model_options.{_FLUSH}", 250_000),
        (_H, "24.10", _LOSS, f"model_options.{_COPIES}", 1),
        (_H, "24.12", _LOSS, f"model_options.{_FLUSH}", 250_000),
        (_H, "24.12", _LOSS, f"model_options.{_COPIES}", None),
        (_H, "25.09", _LOSS, f"model_options.{_FLUSH}", 50 * 2**10),
        (_B, "25.09", _LOSS, f"model_options.{_FLUSH}", 126 * 2**10),
        (_A, "24.01", f"{_LOSS} --deterministic-mode", f"model_options.{_FLUSH}", None),  # nothing is timed
        ("piz-daint-p100", "25.09", _LOSS, f"model_options.{_FLUSH}", None),  # whose cache no file has
    ],
)
def test_a_setting_and_the_defaults_that_are_derived(
    cluster: str, container: str, arguments: str, path: str, value: object
) -> None:
    before = f"export NVIDIA_PYTORCH_VERSION={container}" if container else ""
    assert settings(arguments, before=before, cluster=cluster).get(path) == value


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
    bert = read_job("megatron", [JobFile(Path("train.sh"), script.encode())], gpus=8, cluster="dgx-a100")
    assert bert.refusal() == ""
    assert {s.path: s.value for s in bert.settings}["model_options.mask_shape"] == shape


@pytest.mark.parametrize(
    ("arguments", "stages"),
    [
        ("--decoder-first-pipeline-num-layers 1", [1, 3, 3, 3]),
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 2", [2, 3, 3, 2]),
        (
            "--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 4 "
            "--num-virtual-stages-per-pipeline-rank 2",
            [1, 1, 1, 2, 1, 1, 1, 2],
        ),
        ("--account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split", [2, 3, 3, 2]),
        ("--pipeline-model-parallel-layout 'Ett|(ttt|)*2tL'", [2, 3, 3, 1]),
        ("--pipeline-model-parallel-layout 'E,t*2|(tt|)*5,t*3|L'", [2, 2, 2, 2, 2, 2, 3, 0]),
    ],
)
def test_stages_of_different_numbers_of_layers(arguments: str, stages: list[int]) -> None:
    sizes = SIZES.replace("--num-layers 4", f"--num-layers {sum(stages)}")
    found = settings(f"--pipeline-model-parallel-size 4 {arguments}", sizes=sizes)
    assert found["training.stage_layers"] == stages


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ("--hidden-size 512", "--hidden-size 256 and --hidden-size 512 are both given; leave one"),
        ("--rotary-base 4k", "--rotary-base: 4k is not a whole number"),
        ("--normalization Layer", "--normalization: Layer is not one of LayerNorm, RMSNorm"),
        ("--swiglu true", "'true' belongs to no argument"),
        ("--squared-relu=true", "--squared-relu takes no value, but has 'true'"),
        ("--seed --rotary-base", "--seed has no value; --rotary-base has no value"),
        ("--kv-channels $SIZE", "--kv-channels $SIZE: $SIZE is not set in the script; --given SIZE=VALUE"),
        ("$MORE", "what arguments $MORE adds is not known; --given MORE=VALUE"),
        ("--tensor-model-parallel-size 3", "8 GPUs are no multiple of tensor x pipeline x context parallel "
         "sizes, which are 3"),
        ("--global-batch-size 9",
         "--global-batch-size 9 is no multiple of --micro-batch-size 2 x 8 replicas"),
        ("--use-torch-fsdp2 --untie-embeddings-and-output-weights",
         "--use-torch-fsdp2 needs --no-gradient-accumulation-fusion"),
        ("--fp8-format hybrid --fp8-recipe custom",
         "--fp8-format hybrid, --fp8-recipe custom: matmuls in 8 bits with a recipe in Python: not modelled"),
        ("--fp8-format hybrid --first-last-layers-bf16",
         "--first-last-layers-bf16 does not go with --fp8-recipe delayed, in Megatron-LM too"),
        ("--hiden-size 4", "Megatron-LM core 0.20.0 (d98e8a64) has no argument --hiden-size (did you mean "
         "--hidden-size?); without --strict it is left out"),
        ("--hidden 4", "Megatron-LM core 0.20.0 (d98e8a64) has no argument --hidden (did you mean "
         "--hidden-size?); without --strict it is left out"),
        ("--our-$NAME", "Megatron-LM core 0.20.0 (d98e8a64) has no argument --our-$NAME; without --strict "
         "it is left out"),
        ("--overlap-param-gather", "--overlap-param-gather needs --use-distributed-optimizer; "
         "--overlap-param-gather needs --overlap-grad-reduce"),
        ("--pipeline-model-parallel-layout 'Ett|tL|'", "--pipeline-model-parallel-layout 'Ett|tL|' is no E, "
         "then t and | for layers and stages, then L"),
        ("--pipeline-model-parallel-layout 'Ett|ttL'", "--pipeline-model-parallel-layout has 2 stages, which "
         "--pipeline-model-parallel-size 1 cannot have"),
        ("--pipeline-model-parallel-layout EttL",
         "--pipeline-model-parallel-layout has 2 layers, not --num-layers 4"),
        ("--overlap-param-gather-with-optimizer-step",
         "--overlap-param-gather-with-optimizer-step needs --overlap-param-gather"),
        ("--optimizer-cpu-offload", "--optimizer-cpu-offload needs --use-precision-aware-optimizer; "
         "--optimizer-cpu-offload needs --use-distributed-optimizer"),
        (f"{_OFFLOADED} --optimizer-offload-fraction 1.5",
         "--optimizer-offload-fraction 1.5 is no share from 0 to 1"),
        ("--tokenizer-type HuggingFaceTokenizer",
         "how many words the HuggingFaceTokenizer has is not said; --given vocab-size=N"),
    ],
)  # fmt: skip
def test_what_a_job_cannot_be_is_told_in_a_line(arguments: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        job(arguments, strict=True).scenario_text()
    assert str(error.value) == f"train.sh: {problem}"


def test_sequences_are_cut_into_two_chunks_a_rank() -> None:
    made = job("--context-parallel-size 8 --cp-comm-type a2a", sizes=SIZES.replace("128", "136"))
    assert made.refusal() == "--seq-length 136 is no multiple of 2 x --context-parallel-size 8"
    dropout = job("--context-parallel-size 2").refusal()
    assert dropout.startswith("--attention-dropout (by default): dropout of attention over parts")
    long = job("", sizes=SIZES.replace("128", "65536"))
    assert any(
        "a mask of 8.00 GiB" in remark and "--no-create-attention" in remark for remark in long.remarks
    )


def test_gpus_and_cluster_must_be_known() -> None:
    text = f"torchrun --nnodes $N --nproc-per-node 8 pretrain_gpt.py {SIZES}"
    problem = (
        "how many GPUs the job runs on is not said; --gpus N ($N is not set in the script); which cluster it "
        "runs on is not said; --cluster NAME (`spbench list clusters`)"
    )
    assert read_job(None, [JobFile(Path("train.sh"), text.encode())]).refusal() == problem


def test_an_unknown_argument_can_be_left_out() -> None:
    made = job("--our-own 3")
    assert "# unknown to this version and left out: --our-own 3\n" in made.scenario_text()


@pytest.mark.parametrize(
    "text",
    [
        "z\nvariants: {a: {batch: 4}}\n#",
        "z\ngroups: []",
        "z\r- model: bert-tiny",
        "\u2028title: x",
        "'\"# : &a *a",
    ],
)
def test_what_is_left_out_cannot_write_settings(text: str, tmp_path: Path) -> None:
    """In a script, as a name of a file and as a variable: what is read again is the job's cell alone."""
    script = f"python pretrain_gpt.py {SIZES} --weird {shlex.quote(text)}"
    file = JobFile(Path(f"{text}.sh"), f"export NCCL_ALGO={shlex.quote(text)}\n{script}".encode())
    made = read_job("megatron", [file], gpus=8, cluster="dgx-a100")
    (tmp_path / "job.yaml").write_text(made.scenario_text())
    found = load_scenario(tmp_path / "job.yaml")
    assert found.document.title == made.title
    assert found.cells == {"": [made.cell()]}


def test_the_scenario_says_of_each_line_what_it_came_from(tmp_path: Path) -> None:
    text = job("--swiglu --disable-bias-linear --tensor-model-parallel-size 2").scenario_text()
    (tmp_path / "job.yaml").write_text(text)
    (cell,) = load_scenario(tmp_path / "job.yaml").cells[""]
    assert (cell.sizes.dp, cell.sizes.tp, cell.batch, cell.seq_len) == (4, 2, 8, 128)
    assert re.search(r"inner: 640 +# default of Megatron-LM: 8/3 of --hidden-size, in 64s\n", text)
    assert re.search(r"biases: false +# --disable-bias-linear\n", text)


def test_a_case_of_the_scenario_of_goldens_is_imported_as_it_was_written_by_hand() -> None:
    """All settings that both have; the import has those too that are the preset's."""
    by_hand = {cell.key: cell for cell in load_scenario("megatron_goldens").cells[""]}
    wanted = next(c for key, c in by_hand.items() if "gpt3-345m/tensor_parallel/dp2xtp4" in key)
    (case,) = [c for c in cases() if (c.case, c.golden) == ("gpt3_mcore_tp4_pp1", "dev_dgx_a100")]
    assert not isinstance(case.cell, str)
    for name, value in wanted.model_options.items():
        assert case.cell.model_options[name] == value, name
    assert case.cell.training.model_dump() == wanted.training.model_dump()
    assert (case.cell.sizes, case.cell.mesh) == (wanted.sizes, wanted.mesh)


def test_the_csv_of_cases_names_each_once() -> None:
    with (ROOT / "results/measured/megatron_cases.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert len({row["case"] for row in rows}) == len(rows) == 155
    assert all(isinstance(json.loads(row["args"]), dict) for row in rows)
