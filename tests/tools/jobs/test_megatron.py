"""Jobs of Megatron-LM: every argument accounted for, and the defaults that it derives."""

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
from tests.tools.jobs.job_inputs import tabled

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
    """And most of these tests can be imported."""
    kinds: Counter[str] = Counter()
    unknown = 0
    found = {case.case: case for case in cases()}
    assert len(found) == 221
    assert sum(not case.job.refusal() for case in found.values()) >= 190
    for case in found.values():
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


@tabled(__file__, "a_setting_and_the_defaults_that_are_derived")
def test_a_setting_and_the_defaults_that_are_derived(
    cluster: str, container: str, arguments: str, path: str, value: object
) -> None:
    before = f"export NVIDIA_PYTORCH_VERSION={container}" if container else ""
    assert settings(arguments, before=before, cluster=cluster).get(path) == value


def test_a_container_that_is_no_release() -> None:
    with pytest.raises(UserError, match="NVIDIA_PYTORCH_VERSION=new is no release of NVIDIA's container"):
        job("", before="export NVIDIA_PYTORCH_VERSION=new").scenario_text()


@tabled(__file__, "the_mask_of_a_bert")
def test_the_mask_of_a_bert(container: str, arguments: str, shape: str) -> None:
    script = f"NVIDIA_PYTORCH_VERSION={container} python pretrain_bert.py {SIZES} {arguments}"
    bert = read_job("megatron", [JobFile(Path("train.sh"), script.encode())], gpus=8, cluster="dgx-a100")
    assert bert.refusal() == ""
    assert {s.path: s.value for s in bert.settings}["model_options.mask_shape"] == shape


@tabled(__file__, "stages_of_different_numbers_of_layers")
def test_stages_of_different_numbers_of_layers(arguments: str, stages: list[int]) -> None:
    sizes = SIZES.replace("--num-layers 4", f"--num-layers {sum(stages)}")
    found = settings(f"--pipeline-model-parallel-size 4 {arguments}", sizes=sizes)
    assert found["training.stage_layers"] == stages


@tabled(__file__, "what_a_job_cannot_be_is_told_in_a_line")
def test_what_a_job_cannot_be_is_told_in_a_line(arguments: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        job(arguments, strict=True).scenario_text()
    assert str(error.value) == f"train.sh: {problem}"


def test_sequences_are_cut_into_two_chunks_a_rank() -> None:
    made = job("--context-parallel-size 8 --cp-comm-type a2a", sizes=SIZES.replace("128", "136"))
    assert made.refusal() == "--seq-length 136 is no multiple of 2 x --context-parallel-size 8"
    of_parts = job("--context-parallel-size 2")
    assert of_parts.refusal() == ""
    assert {s.path: s.value for s in of_parts.settings}["model_options.attention_dropout"] == 0.0


@tabled(__file__, "what_a_long_job_should_know_is_remarked")
def test_what_a_long_job_should_know_is_remarked(arguments: str, old: str, new: str, said: str) -> None:
    remarks = job(arguments, sizes=SIZES.replace(old, new)).remarks
    told = [each for each in remarks if re.search("a mask of|sequences of", each)]
    assert [said in each for each in told] == [True] * bool(said)


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


@tabled(__file__, "what_is_left_out_cannot_write_settings")
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
