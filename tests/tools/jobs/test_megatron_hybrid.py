"""Muon and hybrids of Megatron-LM's jobs, what gpt-oss's layers have in one, what a script adds under a
condition, and arguments that are given.
"""

import pytest

from spbench.bench.errors import UserError
from tests.tools.jobs.job_inputs import tabled
from tests.tools.jobs.test_megatron import SIZES, job, settings

SPEC = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
SHARDS = "--optimizer muon --use-distributed-optimizer"


#: without --num-layers, which a pattern says
HYBRID = SIZES.replace("--num-layers 4 ", "")


def hybrid(pattern: str, more: str = "") -> str:
    return f"--hybrid-layer-pattern '{pattern}' {SPEC} {more}"


def sizes_of(arguments: str) -> str:
    return HYBRID if SPEC in arguments else SIZES


@tabled(__file__, "settings")
def test_settings(arguments: str, path: str, value: object) -> None:
    assert settings(arguments, sizes=sizes_of(arguments)).get(path) == value


@tabled(__file__, "refused_in_a_line")
def test_refused_in_a_line(arguments: str, refusal: str) -> None:
    made = job(arguments, sizes=sizes_of(arguments)).refusal()
    assert refusal in made
    assert "\n" not in made


@pytest.mark.parametrize("arguments", ["--optimizer muon", SHARDS, hybrid("M-M*-")])
def test_what_is_read_is_a_cell(arguments: str) -> None:
    made = job(arguments, sizes=sizes_of(arguments))
    assert not made.refusal()
    made.cell()


_GATE = "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0"


def test_windows_a_sink_and_the_gate_are_those_of_gpt_oss() -> None:
    made = settings(f"{_GATE} --softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2")
    kept = {name: made[f"model_options.{name}"] for name in ("mlp", "sinks", "window", "pattern")}
    assert kept == {"mlp": "clamped_swiglu", "sinks": True, "window": 128, "pattern": "WS"}
    model = job(f"{_GATE} --window-size 127,0 --window-attn-skip-freq '[1,0,1,1]'").cell().model_options
    assert model["pattern"] == "WSWW"
    alike = settings("--window-size '(63,0)'")
    assert (alike["model_options.window"], "model_options.pattern" in alike) == (64, False)


@tabled(__file__, "other_gates_sinks_and_windows_are_refused")
def test_other_gates_sinks_and_windows_are_refused(arguments: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        job(arguments).scenario_text()
    assert str(error.value) == f"train.sh: {problem}"


def test_arguments_under_a_condition_count_where_none_has_an_effect() -> None:
    before = 'MORE=(--bf16)\nif [ -n "$KEY" ]; then MORE+=({0}); fi'
    quiet = job("${MORE[@]}", before=before.format("--wandb-project x --log-interval 1"))
    assert quiet.refusal() == ""
    assert {"--wandb-project", "--log-interval"} <= {each.name for each in quiet.of("no effect")}
    loud = job("${MORE[@]}", before=before.format("--log-interval 1 --swiglu"))
    assert loud.refusal() == (
        "what arguments $MORE, which line 2 sets under a condition adds is not known; --given MORE=VALUE"
    )
    assert job("${MORE[@]}", before=before.format("--swiglu"), environment={"KEY": ""}).refusal() == ""


def test_arguments_that_are_given_stand_in_place_of_the_files() -> None:
    tokenizer = "--tokenizer-type HuggingFaceTokenizer"
    assert "--given vocab-size=N" in job(tokenizer).refusal()
    made = settings(f"{tokenizer} --vocab-size 9000", environment={"vocab-size": "32000"})
    assert made["model_options.vocabulary"] == 32000
    by_name = settings(f"{tokenizer} --tokenizer-model Qwen/Qwen3-8B")
    assert by_name["model_options.vocabulary"] == 151936
