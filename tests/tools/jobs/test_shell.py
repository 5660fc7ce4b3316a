"""What a launch script says, read without running it; and which variables of the environment are mapped, or
move something that is not modelled, or nothing.
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.tools.choose.anatomy import examine
from spbench.bench.tools.choose.changed_figures import changed_cluster
from spbench.bench.tools.jobs.job import Argument, Job
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from spbench.bench.tools.jobs.launch import Launch, launched
from spbench.bench.tools.jobs.shell_syntax import given_flag, shown_word, unknown_in, words_in
from spbench.bench.tools.jobs.variables import _rules
from spbench.bench.yaml_files import read_yaml
from tests.tools.jobs.test_megatron import SIZES

PROGRAM = re.compile(r"pretrain_\w+\.py")


def launch(script: str, **environment: str) -> Launch:
    found = launched(JobFile(Path("job.sh"), script.encode()), PROGRAM, environment)
    assert found is not None
    return found


def arguments(script: str, **environment: str) -> list[str]:
    return [shown_word(word) for word in launch(script, **environment).arguments]


@pytest.mark.parametrize(
    ("script", "expected"),
    [
        ("python pretrain_gpt.py --a 1 --b='x y'", ["--a", "1", "--b=x y"]),
        ("A=3\npython pretrain_gpt.py --a $A --b ${A} --c ${B:-4} --d \"${A}x\"", "--a 3 --b 3 --c 4 --d 3x"),
        ("ARGS=(--a 1 # one\n  --b \"x y\"\n)\npython pretrain_gpt.py ${ARGS[@]}", "--a 1 --b x y"),
        ("ARGS=(--a 1 --b \"x y\")\npython pretrain_gpt.py \"${ARGS[@]}\"", ["--a", "1", "--b", "x y"]),
        ("ARGS=\"\n  --a 1\n  --b 2\n\"\npython pretrain_gpt.py $ARGS", "--a 1 --b 2"),
        ("ARGS=\"--a 1\"\nARGS+=\" --b 2\"\npython pretrain_gpt.py $ARGS", "--a 1 --b 2"),
        ("ARGS=(--a)\nARGS+=(--b)\npython pretrain_gpt.py \"${ARGS[@]}\" \\\n  --c", "--a --b --c"),
        ("N=$((2 * 4))\nM=$(($N/2))\npython pretrain_gpt.py --a $N --b $M", "--a 8 --b 4"),
        ("N=4\npython pretrain_gpt.py --a $(expr 32 / $N / 2) --b $(expr $N \\* 3)", "--a 4 --b 12"),
        ("python pretrain_gpt.py --a 1 \\\n", "--a 1"),
        ("S=8B\ncase \"${S}\" in\n\"1B\") A=1;;\n8B|9B) A=2\n;;\nesac\n./pretrain_gpt.py --a $A", "--a 2"),
        ("S=2B\ncase $S in 1B) A=1;; *) A=3;; esac\n./pretrain_gpt.py --a $A", "--a 3"),
        ("python pretrain_gpt.py --a '$A' 'b c'", ["--a", "$A", "b c"]),
        ("RUN=\"pretrain_gpt.py --a 1\"\nsrun -N 2 sh -c \"python $RUN --b 2\"", "--a 1 --b 2"),
        ("python pretrain_gpt.py --a 1 2>&1 | tee log", "--a 1"),
        ("python pretrain_gpt.py --a 1 &> log --b 2", "--a 1 --b 2"),
        ("A=1 B=2\npython pretrain_gpt.py --a $A --b $B", "--a 1 --b 2"),
        ("python pretrain_gpt.py --a ${A:-\"1 2\"} \"${B:-3 4}\" ${C:+5}", ["--a", "1", "2", "3 4"]),
        ("A=1\nif [ $A -eq 1 ]; then B=2; else B=3; fi\npython pretrain_gpt.py --b $B", "--b 2"),
        ("if false; then B=2; elif [[ -n x && 2 -lt 1 ]]; then B=3; else B=4; fi\n./pretrain_gpt.py -b $B",
         "-b 4"),
        ("A=0\nif (( A + 1 > 1 )) || [ -z \"$A\" ]; then B=2; else B=3; fi\npython pretrain_gpt.py --b $B",
         "--b 3"),
        ("[ -z x ] && A=2\n[ \"y\" != x ] && B=3\npython pretrain_gpt.py --a ${A:-1} --b $B", "--a 1 --b 3"),
        ("cat > x <<EOF\nit's $A\nEOF\npython pretrain_gpt.py --a 1", "--a 1"),
        ("A=1\nsbatch <<EOF\n#!/bin/sh\ntorchrun pretrain_gpt.py --a $A \"b c\"\nEOF", ["--a", "1", "b c"]),
        ("{ python pretrain_gpt.py --a 1; }", "--a 1"),
        ("python pretrain_gpt.py --a $@", ["--a"]),
        ("A=1\nwhile [[ $# -gt 0 ]]; do A=$1; shift; done\npython pretrain_gpt.py --a $A", "--a 1"),
    ],
)  # fmt: skip
def test_the_words_of_a_command(script: str, expected: str | list[str]) -> None:
    assert arguments(script) == (expected.split() if isinstance(expected, str) else expected)


@pytest.mark.parametrize(
    ("script", "unknown"),
    [
        ("python pretrain_gpt.py --a $A", "$A"),
        ("A=$(cat size)\npython pretrain_gpt.py --a $A", "$(cat size)"),
        ("for A in 1 2; do echo; done\npython pretrain_gpt.py --a $A", "$A, of a loop"),
        (
            "if [ -d /data ]; then\n  A=2\nfi\npython pretrain_gpt.py --a $A",
            "$A, which line 2 sets under a condition",
        ),
        (
            "A=1\n[ $A = b -a -n c ] || A=2\npython pretrain_gpt.py --a $A",
            "$A, which line 2 sets under a condition",
        ),
        (
            "[ 0 ] || A=2\n[[ x == x* ]] || A=2\npython pretrain_gpt.py --a $A",
            "$A, which line 2 sets under a condition",
        ),
        ("[ -f x ] && A=2\npython pretrain_gpt.py --a $A", "$A, which line 1 sets under a condition"),
        ("python pretrain_gpt.py --a ${A%.*}", "${A%.*}"),
        ("python pretrain_gpt.py --a $((N * 2))", "$((N * 2)), where $N is not known"),
    ],
)
def test_what_only_a_run_could_tell_is_a_mark(script: str, unknown: str) -> None:
    assert unknown_in(launch(script).arguments[1]) == [unknown]


def test_what_is_given_stands_in_place_of_what_the_script_sets() -> None:
    script = "A=1\nB=(--b 2)\n[ -d x ] && B+=(--c 3)\npython pretrain_gpt.py --a $A ${B[@]}"
    assert arguments(script, A="4", B="") == ["--a", "4", "--b", "2"]
    assert arguments(script, B="--d 5") == ["--a", "1", "--b", "2", "--d", "5"]


def test_an_array_under_a_condition_tells_which_words_it_may_be() -> None:
    *_, last = launch("B=(1)\n[ -d x ] && B+=(--c ${D} '2 3')\npython pretrain_gpt.py ${B[@]}").arguments
    assert unknown_in(last) == ["$B, which line 2 sets under a condition"]
    assert words_in(last) == ["--c", "$D", "2 3"]


def test_a_case_whose_word_is_not_known_leaves_its_variables_open() -> None:
    for head in ("case $S in 1B) A=1;; esac", "S=1Bx\ncase $S in 1B*) A=1;; esac"):
        (word,) = [w for w in launch(f"{head}\n./pretrain_gpt.py $A").arguments if unknown_in(w)]
        assert unknown_in(word)[0].startswith("$A, which line")


def test_one_of_several_commands_is_chosen_by_its_line() -> None:
    script = "python pretrain_gpt.py --a 1\npython pretrain_gpt.py --a 2"
    assert arguments(script, line="2") == ["--a", "2"]
    with pytest.raises(UserError, match="several commands train, in lines 1 and 2"):
        launch(script, line="3")


def test_a_variable_in_arithmetic_is_asked_for() -> None:
    (word,) = [w for w in launch("python pretrain_gpt.py $(expr 16 / $N)").arguments if unknown_in(w)]
    assert given_flag(unknown_in(word)[0]) == "--given N=VALUE"


def test_exported_variables_and_those_before_a_command_are_its_environment() -> None:
    script = "A=1\nexport B=2 C=3\nD=4\nexport D\nE=5 python pretrain_gpt.py"
    assert launch(script, F="6").environment == {"B": "2", "C": "3", "D": "4", "E": "5", "F": "6"}


@pytest.mark.parametrize(
    ("script", "gpus"),
    [
        ("torchrun --nproc_per_node 8 --nnodes=4 pretrain_gpt.py", 32),
        ("N=8\npython -m torch.distributed.run --nproc-per-node $N pretrain_gpt.py", 8),
        ("#SBATCH --nodes=4 --exclusive\n#SBATCH --ntasks-per-node 8\nsrun python pretrain_gpt.py", 32),
        ("mpirun -np 16 python pretrain_gpt.py", 16),
        ("export WORLD_SIZE=$((2*8))\npython pretrain_gpt.py", 16),
        ("python pretrain_gpt.py", None),
        ("./pretrain_gpt.py --bf16", None),
        ("torchrun --nproc_per_node 8 --nnodes $NODES pretrain_gpt.py", None),
    ],
)
def test_the_gpus_of_a_launcher(script: str, gpus: int | None) -> None:
    assert launch(script).gpus == gpus


@pytest.mark.parametrize(
    ("script", "problem"),
    [
        ("python pretrain_gpt.py 'a", 'job.sh:1: no shell script from here on: "\'a"'),
        ("\npython pretrain_gpt.py $(a", "job.sh:2: a ) is missing"),
        ("A=(a\npython pretrain_gpt.py", "job.sh:2: a ) is missing"),
        (
            "python pretrain_gpt.py\npython pretrain_gpt.py",
            "job.sh: several commands train, in lines 1 and 2; leave one, or --given line=N",
        ),
        (
            "if grep x y\nthen python pretrain_gpt.py\nfi",
            "job.sh:2: the command that trains is under a condition, in a loop or in a function, which are "
            "not read; write it by itself",
        ),
    ],
)
def test_what_cannot_be_read_is_told_in_a_line(script: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        launch(script)
    assert str(error.value) == problem


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
OWN = ("other_programs", "model_zoo", "primus_models", "transformers")


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
