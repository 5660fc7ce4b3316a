"""What gpt-oss's layers have in a Megatron-LM job, what a script adds under a condition, and arguments that
are given."""

from __future__ import annotations

import pytest

from spbench.bench.errors import UserError
from tests.tools.jobs.test_megatron import job, settings

_GATE = "--quick-geglu --glu-linear-offset 1.0 --activation-func-clamp-value 7.0"


def test_windows_a_sink_and_the_gate_are_those_of_gpt_oss() -> None:
    made = settings(f"{_GATE} --softmax-type learnable --window-size 127,0 --window-attn-skip-freq 2")
    kept = {name: made[f"model_options.{name}"] for name in ("mlp", "sinks", "window", "pattern")}
    assert kept == {"mlp": "clamped_swiglu", "sinks": True, "window": 128, "pattern": "WS"}
    model = job(f"{_GATE} --window-size 127,0 --window-attn-skip-freq '[1,0,1,1]'").cell().model_options
    assert model["pattern"] == "WSWW"
    alike = settings("--window-size '(63,0)'")
    assert (alike["model_options.window"], "model_options.pattern" in alike) == (64, False)


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (
            "--quick-geglu",
            "--quick-geglu: a quick GELU that is not gpt-oss's (--glu-linear-offset 1.0, "
            "--activation-func-clamp-value 7.0): not modelled",
        ),
        (
            "--softmax-type off-by-one",
            "--softmax-type off-by-one: a softmax with a sink that is not learned: not modelled",
        ),
        (
            "--window-size 127,127",
            "--window-size 127,127: a window that is not N,0 (N positions before each): not modelled",
        ),
        (
            "--window-size 9,0 --window-attn-skip-freq '[1,0]'",
            "--window-attn-skip-freq [1,0] is neither a number of layers nor a list for 4 layers",
        ),
        (f"--swiglu {_GATE}", "--swiglu and --quick-geglu are both given; leave one"),
    ],
)
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
