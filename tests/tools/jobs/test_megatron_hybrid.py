"""Muon and hybrids of Megatron-LM's jobs, what gpt-oss's layers have in one, what a script adds under a
condition, and arguments that are given.
"""

from __future__ import annotations

import pytest

from spbench.bench.errors import UserError
from tests.tools.jobs.test_megatron import SIZES, job, settings

SPEC = "--spec megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec"
SHARDS = "--optimizer muon --use-distributed-optimizer"


#: without --num-layers, which a pattern says
HYBRID = SIZES.replace("--num-layers 4 ", "")


def hybrid(pattern: str, more: str = "") -> str:
    return f"--hybrid-layer-pattern '{pattern}' {SPEC} {more}"


def sizes_of(arguments: str) -> str:
    return HYBRID if SPEC in arguments else SIZES


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        ("", "training.update", None),
        ("--optimizer muon", "training.update", "muon"),
        ("--optimizer muon", "training.distributed_optimizer", None),
        ("--optimizer dist_muon", "training.distributed_optimizer", True),
        (SHARDS, "training.layer_wise_layout", None),
        (f"{SHARDS} --no-use-layer-wise-param-layout", "training.layer_wise_layout", False),
        (f"{SHARDS} --muon-num-ns-steps 8", "training.muon_steps", 8),
        (f"{SHARDS} --muon-tp-mode blockwise", "training.muon_tp_mode", "blockwise"),
        (hybrid("M-M*-"), "model", "nemotron-h-8b"),
        (hybrid("M-M*-"), "model_options.pattern", "M-MS-"),
        (hybrid("M-M*-"), "model_options.layers", 3),
        (hybrid("M-M*-"), "model_options.state_heads", 8),  # 2 x 256 / 64
        (hybrid("M-M*-"), "model_options.autotune_states_kib", 2**18),
        (hybrid("M-M*-", "--deterministic-mode"), "model_options.autotune_states_kib", None),
        (hybrid("M-M*-"), "model_options.state_processors", 108),
        (hybrid("*-*-"), "model_options.state_processors", None),
        (hybrid("M-M*-", "--mamba-num-heads 4"), "model_options.state_heads", 4),
        (hybrid("M-M*-", "--mamba-state-dim 64"), "model_options.key_size", 64),
        (hybrid("M-M*-"), "model_options.kv_heads", 8),
        (*(hybrid("M-M*-|M-", "--pipeline-model-parallel-size 2"),), *("training.stage_layers", [3, 1])),
        (hybrid("M-|M-|*-|M-", "--pipeline-model-parallel-size 2"), "training.virtual_stages", 2),
        (hybrid("MEM*E", "--num-experts 8 --disable-bias-linear"), "model_options.pattern", "MEMSE"),
        (hybrid("M-M*-", "--context-parallel-size 2"), "strategy", "tensor_parallel+ulysses"),
    ],
)
def test_settings(arguments: str, path: str, value: object) -> None:
    assert settings(arguments, sizes=sizes_of(arguments)).get(path) == value


@pytest.mark.parametrize(
    ("arguments", "refusal"),
    [
        ("--optimizer lion", "another optimizer than Adam and Muon"),
        ("--optimizer muon --muon-scalar-optimizer lion", "another optimizer than Adam beside Muon"),
        ("--optimizer muon --muon-tp-mode distributed", "spread over tensor parallel ranks"),
        (hybrid("M-M*-", "--optimizer muon"), "Muon for a hybrid"),
        (hybrid("M-G-"), "layers G of a hybrid: not modelled"),
        (hybrid("-M-"), "behind no layer that mixes tokens"),
        (hybrid("MM*"), "layers without an MLP alone: not modelled"),
        ("--hybrid-layer-pattern M-M-M-", "--num-layers 4: not the 6 layers of --hybrid-layer-pattern"),
        (hybrid("M-M-", "--pipeline-model-parallel-size 2"), "set | between the stages"),
        ("--is-hybrid-model", "--is-hybrid-model needs --hybrid-layer-pattern"),
    ],
)
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
