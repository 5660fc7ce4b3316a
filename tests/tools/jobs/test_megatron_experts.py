"""Experts, latent attention and multi-token prediction of Megatron-LM's jobs, and the way back. Muon and
hybrids of Megatron-LM's jobs, what gpt-oss's layers have in one, what a script adds under a condition, and
arguments that are given.
"""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.tools.jobs.flags import differences, program_flags
from tests.tools.jobs.job_inputs import tabled
from tests.tools.jobs.test_flags import MEGATRON, cell, read_back, same
from tests.tools.jobs.test_megatron import SIZES, job, settings

EXPERTS = "--num-experts 8 --disable-bias-linear"
SPLIT = f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel"
LATENTS = "--multi-latent-attention --qk-layernorm"


@tabled(__file__, "layers_with_experts")
def test_layers_with_experts(pattern: str, path: str, value: object) -> None:
    assert settings(f"{EXPERTS} --moe-layer-freq {pattern}").get(f"model_options.{path}") == value


@tabled(__file__, "a_pattern_that_is_none_is_refused_in_a_line")
def test_a_pattern_that_is_none_is_refused_in_a_line(pattern: str) -> None:
    made = job(f'{EXPERTS} "--moe-layer-freq={pattern}"')
    assert "is neither a number nor a list of 0 and 1 for 4 layers" in made.refusal()
    assert "\n" not in made.refusal()


@tabled(__file__, "a_setting_of_experts_and_latents")
def test_a_setting_of_experts_and_latents(arguments: str, path: str, value: object) -> None:
    assert settings(arguments).get(path) == value


@tabled(__file__, "what_experts_and_latents_cannot_be_is_said_in_a_line")
def test_what_experts_and_latents_cannot_be_is_said_in_a_line(arguments: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        job(arguments).scenario_text()
    assert problem in str(error.value)


@tabled(__file__, "an_argument_of_what_the_model_has_not_has_no_effect")
def test_an_argument_of_what_the_model_has_not_has_no_effect(arguments: str, name: str, reason: str) -> None:
    (argument,) = [each for each in job(arguments).arguments if each.name == name]
    assert argument.outcome == "no effect"
    assert argument.detail.startswith(reason)


def _lists(draw: st.DrawFn) -> dict[str, Any]:
    """Which of 32 layers have experts, as the importer writes it."""
    return draw(
        st.sampled_from(
            [{}, {"dense_layers": 3}, {"expert_pattern": (1, 0, 0)}, {"expert_pattern": (0, 1) * 16}]
        )
    )


@st.composite
def expert_cells(draw: st.DrawFn) -> Cell:
    """Models with experts, latent attention or both, as the importer writes them."""
    tp, etp, ep = (draw(st.sampled_from([1, 2])) for _ in range(3))
    model: dict[str, Any] = {"recompute": draw(st.sampled_from(["none", "full", "selective"]))}
    if draw(st.booleans()):
        model |= {"kv_lora_rank": 512, "q_lora_rank": draw(st.sampled_from([None, 768])), "kv_heads": None}
        model |= {"v_head_dim": draw(st.sampled_from([64, 128]))}
    if draw(st.booleans()):
        model |= {"mtp_layers": 1, "mtp_weight": draw(st.sampled_from([0.1, 0.5]))}
    model |= {"experts": 16, "experts_per_token": draw(st.integers(1, 4)), **_lists(draw)}
    for name, values in {
        "dispatcher": ["all_gather", "all_to_all", "node_deduplicated", "hybrid_ep"],
        "experts_matmul": ["grouped", "sequential"],
        "permutation": ["plain", "fused"],
        "router_dtype": ["float32", "model"],
        "routing": ["learned", "even"],
        "expert_inner": [None, 512],
        "shared_inner": [0, 256],
        "z_weight": [0.0, 0.001],
        "router_scale": [1.0, 2.5],
    }.items():
        model[name] = draw(st.sampled_from(values))
    model["shared_gate"] = bool(model["shared_inner"]) and draw(st.booleans())
    beside = bool(model["shared_inner"]) and model["dispatcher"] != "all_gather"
    model["shared_overlap"] = beside and draw(st.booleans())
    kind = draw(st.sampled_from(["softmax", "sigmoid", "sinkhorn"]))
    if kind == "softmax":
        model["router_scores"] = draw(st.sampled_from(["all", "chosen"]))
    elif kind == "sigmoid":
        model |= {"router_normalized": model["experts_per_token"] > 1, "router_bias": draw(st.booleans())}
        model |= {"router_groups": 4, "router_group_topk": 2} if draw(st.booleans()) else {}
    model["router"] = kind
    if kind != "sinkhorn" and draw(st.booleans()):
        model |= {"aux_loss": draw(st.sampled_from(["batch", "sequence", "global"])), "aux_weight": 0.01}
    if model["dispatcher"] in ("all_gather", "all_to_all") and draw(st.booleans()):
        model |= {"capacity": 1.25, "capacity_padded": draw(st.booleans())}
    if model["recompute"] == "selective":
        modules = ("core_attn",), ("moe_act", "layernorm"), ("moe", "core_attn")
        model["recompute_modules"] = draw(st.sampled_from(modules))
    return cell(
        MEGATRON,
        strategy="megatron_sp" if tp > 1 else "tensor_parallel",
        strategy_options={"vocabulary": "split"} if tp > 1 else {},
        sizes={"dp": 4, "tp": tp, "ep": ep, "etp": etp},
        batch=8,
        model_options=model,
        training={"distributed_optimizer": draw(st.booleans())},
    )


@examples(deadline=None, max_examples=30, derandomize=True)
@given(expert_cells())
def test_flags_of_experts_are_the_same_cell_again(cell: Cell) -> None:
    found = program_flags("megatron", cell)
    assert (found.missing, found.beside) == ((), ())
    assert same(cell, read_back("megatron", cell, found).cell())


@tabled(__file__, "experts_in_other_words")
def test_experts_in_other_words(model: dict[str, Any], missing: list[str]) -> None:
    one = cell(MEGATRON, sizes={"dp": 8, "ep": 8}, model_options={"experts": 8, **model})
    found = program_flags("megatron", one)
    assert [*found.missing] == missing
    if not missing:
        assert not [*differences(one, read_back("megatron", one, found).cell())]


def test_ranks_of_experts_that_are_left_out_are_found() -> None:
    one = cell(MEGATRON, sizes={"dp": 8, "ep": 8}, model_options={"experts": 8})
    other = cell(MEGATRON, sizes={"dp": 8, "ep": 4, "etp": 2}, model_options={"experts": 8})
    assert [*differences(one, other)] == [("sizes.ep", 8, 4), ("sizes.etp", 1, 2)]
    layers = cell(MEGATRON, model_options={"experts": 8, "dense_layers": 1})
    paths = [path for path, *_ in differences(layers, cell(MEGATRON, model_options={"experts": 8}))]
    assert paths == ["model_options.expert_pattern"]


def test_a_skewed_router_is_what_no_program_is_asked_for() -> None:
    one = cell(MEGATRON, sizes={"dp": 8, "ep": 8}, model_options={"experts": 8, "routing": "zipf:0.8"})
    found = program_flags("megatron", one)
    assert (found.missing, found.beside) == ((), ("model_options.routing: learned there, zipf:0.8 here",))


@pytest.mark.parametrize("scenario", ["experts_b200"])
def test_cells_with_experts_are_commands(scenario: str) -> None:
    found = [each for variant in load_scenario(scenario).cells.values() for each in variant]
    assert found
    assert {program_flags("megatron", each).missing for each in found} == {()}


def test_a_preset_without_its_experts() -> None:
    none = {"experts": 0, "aux_loss": "none", "aux_weight": 0.0}
    one = Cell.model_validate(MEGATRON | {"model": "qwen3-30b-a3b", "model_options": none})
    assert not [line for line in program_flags("megatron", one).lines if "experts" in line.setting]


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
