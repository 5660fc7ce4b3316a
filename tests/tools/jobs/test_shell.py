"""What a launch script says, read without running it; and which variables of the environment are mapped, or
move something that is not modelled, or nothing.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.tools.choose.asked import changed_cluster
from spbench.bench.tools.choose.look import examine
from spbench.bench.tools.jobs.argument_tables import program_table
from spbench.bench.tools.jobs.job import Argument, Job
from spbench.bench.tools.jobs.job_files import JobFile, read_job
from spbench.bench.tools.jobs.launch import Launch, launched
from spbench.bench.tools.jobs.shell_syntax import given_flag, shown_word, unknown_in, words_in
from spbench.bench.tools.jobs.variables import _rules
from spbench.bench.yaml_files import read_yaml
from tests.tools.jobs.job_inputs import tabled
from tests.tools.jobs.test_megatron import SIZES

PROGRAM = re.compile(r"pretrain_\w+\.py")


def launch(script: str, **environment: str) -> Launch:
    found = launched(JobFile(Path("job.sh"), script.encode()), PROGRAM, environment)
    assert found is not None
    return found


def arguments(script: str, **environment: str) -> list[str]:
    return [shown_word(word) for word in launch(script, **environment).arguments]


@tabled(__file__, "the_words_of_a_command")
def test_the_words_of_a_command(script: str, expected: str | list[str]) -> None:
    assert arguments(script) == (expected.split() if isinstance(expected, str) else expected)


@tabled(__file__, "what_only_a_run_could_tell_is_a_mark")
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


@tabled(__file__, "the_gpus_of_a_launcher")
def test_the_gpus_of_a_launcher(script: str, gpus: int | None) -> None:
    assert launch(script).gpus == gpus


@tabled(__file__, "what_cannot_be_read_is_told_in_a_line")
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


@tabled(__file__, "what_torch_would_not_read_of_the_allocator_is_refused")
def test_what_torch_would_not_read_of_the_allocator_is_refused(value: str, problem: str) -> None:
    with pytest.raises(UserError, match=re.escape(problem)):
        replace(job(f"PYTORCH_CUDA_ALLOC_CONF={value}"), strict=True).cell()


@tabled(__file__, "a_variable_that_may_move_something_is_never_without_effect")
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
OWN = {
    "accelerate",
    "model_zoo",
    "other_programs",
    "own_ways",
    "tables",
    "primus_models",
    "shell_syntax",
    "transformers",
}


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


def _named(rules: Any) -> Iterator[str]:
    """The arguments that rules of a table, or lines of a step, name in conditions and as keys."""
    if isinstance(rules, list):
        yield from (name for each in rules for name in _named(each))
    elif isinstance(rules, dict):
        conditions = rules.get("if", [])
        for text in [conditions] if isinstance(conditions, str) else conditions:
            yield from (re.split("[?=<>]", word.lstrip("!"))[0] for word in text.split())
        for words in ("keys", "of", "from", "map", "map_given", "count", "any"):
            text = rules.get(words, "")
            yield from text.replace("|", " ").split() if isinstance(text, str) else ()
        below = [each for key, each in rules.items() if key not in ("if", "keys")]
        yield from (name for each in below for name in _named(each))


def test_rules_name_arguments_that_there_are() -> None:
    """Of another name nothing would ever be given, so that a rule would be silent."""
    of_environment = re.compile(r"[A-Z][A-Z0-9_]+")
    every = {path.stem: read_yaml(path) for path in TABLES.glob("*.yaml") if path.stem not in OWN}
    tables = {kind: content for kind, content in every.items() if "rules" in content}
    named = 0
    for kind, content in tables.items():
        versions = [program_table(kind, version) for version in content.get("versions", [""])]
        arguments = {name for table in versions for name in table.arguments}
        for section in ("rules", "step"):
            rules = content.get(section, [])
            for name in _named(
                [*rules.values()] if section == "rules" and isinstance(rules, dict) else rules
            ):
                if name and name[0] not in "$%" and "*" not in name and not of_environment.fullmatch(name):
                    named += 1
                    assert name in arguments, f"{kind}.yaml: {name}"
    assert named > 500
