"""Experts, latent attention and multi-token prediction of Megatron-LM's jobs, and the way back."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.tools.jobs.flags import differences, program_flags
from tests.tools.jobs.test_flags import MEGATRON, cell, read_back, same
from tests.tools.jobs.test_megatron import job, settings

EXPERTS = "--num-experts 8 --disable-bias-linear"
SPLIT = f"{EXPERTS} --tensor-model-parallel-size 2 --sequence-parallel"
LATENTS = "--multi-latent-attention --qk-layernorm"


@pytest.mark.parametrize(
    ("pattern", "path", "value"),
    [
        ("1", "expert_pattern", None),
        ("2", "expert_pattern", [1, 0]),
        ("[0,1,1,1]", "dense_layers", 1),
        ("'([0]*1+[1]*3)'", "dense_layers", 1),
        ("[1]*4", "dense_layers", 0),
        ("[0]*4", "dense_layers", 4),
        ("'([0,1])*2'", "expert_pattern", [0, 1, 0, 1]),
        ("'2*[0, 1]'", "expert_pattern", [0, 1, 0, 1]),
        ("'([1]*1+[0]*1)*2'", "expert_pattern", [1, 0, 1, 0]),
    ],
)
def test_layers_with_experts(pattern: str, path: str, value: object) -> None:
    assert settings(f"{EXPERTS} --moe-layer-freq {pattern}").get(f"model_options.{path}") == value


@pytest.mark.parametrize(
    "pattern",
    [
        *(
            "0",
            "-1",
            "1.5",
            "x",
            "[0,1]",
            "[0,1,1,2]",
            "[[0],1,1,1]",
            "[1]*9999999999",
            "[1]*4*0",
            "(1,1,1,1)",
        ),
        *("[1]+1", "[1]*[4]", "[1]**4", "1+3", "[" * 5000, "(" * 99, "[1]*4)", "+[1]*4", "[01,1,1,1]"),
        *(
            "[len(x)]*4",
            "[1]*4 if 1 else 2",
            "__import__('os').abort()",
            "[1 for x in y]",
            "[1]*-4",
            "\u00b2",
        ),
    ],
)
def test_a_pattern_that_is_none_is_refused_in_a_line(pattern: str) -> None:
    made = job(f'{EXPERTS} "--moe-layer-freq={pattern}"')
    assert "is neither a number nor a list of 0 and 1 for 4 layers" in made.refusal()
    assert "\n" not in made.refusal()


@pytest.mark.parametrize(
    ("arguments", "path", "value"),
    [
        (EXPERTS, "model_options.experts", 8),
        (EXPERTS, "model_options.experts_per_token", 2),
        (EXPERTS, "model_options.expert_biases", None),
        ("--num-experts 8", "model_options.expert_biases", True),
        (EXPERTS, "model_options.dispatcher", "all_gather"),
        (f"{EXPERTS} --moe-token-dispatcher-type alltoall", "model_options.dispatcher", "all_to_all"),
        (f"{EXPERTS} --moe-token-dispatcher-type flex", "model_options.dispatcher", "node_deduplicated"),
        (
            f"{EXPERTS} --moe-token-dispatcher-type flex --moe-flex-dispatcher-backend hybridep",
            *("model_options.dispatcher", "hybrid_ep"),
        ),
        (EXPERTS, "model_options.experts_matmul", "sequential"),
        (f"{EXPERTS} --moe-grouped-gemm", "model_options.experts_matmul", "grouped"),
        (f"{EXPERTS} --moe-permute-fusion", "model_options.permutation", "fused"),
        (f"{EXPERTS} --deterministic-mode", "model_options.permutation", "deterministic"),
        (f"{EXPERTS} --deterministic-mode --moe-permute-fusion", "model_options.permutation", "fused"),
        (f"{EXPERTS} --moe-ffn-hidden-size 96", "model_options.expert_inner", 96),
        (f"{EXPERTS} --moe-shared-expert-intermediate-size 64", "model_options.shared_inner", 64),
        (
            f"{EXPERTS} --moe-shared-expert-intermediate-size 64 --moe-shared-expert-overlap",
            "model_options.shared_overlap",
            True,
        ),
        (f"{EXPERTS} --moe-shared-expert-overlap", "model_options.shared_overlap", None),
        # the router: by default the softmax is of the chosen logits, in the model's numbers
        (EXPERTS, "model_options.router_scores", "chosen"),
        (f"{EXPERTS} --moe-router-pre-softmax", "model_options.router_scores", "all"),
        (f"{EXPERTS} --moe-router-score-function sigmoid", "model_options.router_scores", "all"),
        (f"{EXPERTS} --moe-router-score-function sigmoid", "model_options.router_normalized", True),
        (
            f"{EXPERTS} --moe-router-score-function sigmoid --moe-router-topk 1",
            "model_options.router_normalized",
            None,
        ),
        (f"{EXPERTS} --moe-router-load-balancing-type sinkhorn", "model_options.router", "sinkhorn"),
        (EXPERTS, "model_options.router_dtype", "model"),
        (f"{EXPERTS} --moe-router-dtype fp32", "model_options.router_dtype", "float32"),
        (EXPERTS, "model_options.aux_loss", None),
        (f"{EXPERTS} --moe-aux-loss-coeff 0.01", "model_options.aux_loss", "batch"),
        (
            f"{EXPERTS} --moe-router-load-balancing-type global_aux_loss --moe-aux-loss-coeff 0.01",
            "model_options.aux_loss",
            "global",
        ),
        (f"{EXPERTS} --moe-router-force-load-balancing", "model_options.routing", "even"),
        (f"{EXPERTS} --moe-expert-capacity-factor 1.5", "model_options.capacity", 1.5),
        # ranks: without --expert-tensor-parallel-size experts are split as the other layers are
        (f"{EXPERTS} --expert-model-parallel-size 4", "sizes.ep", 4),
        (EXPERTS, "sizes.ep", None),
        (f"{SPLIT} --expert-model-parallel-size 4", "sizes.etp", 2),
        (f"{SPLIT} --expert-model-parallel-size 8 --expert-tensor-parallel-size 1", "sizes.etp", None),
        (LATENTS, "model_options.kv_lora_rank", 32),
        (LATENTS, "model_options.q_lora_rank", None),
        (f"{LATENTS} --q-lora-rank 48", "model_options.q_lora_rank", 48),
        (LATENTS, "model_options.qk_norm", None),
        ("--mtp-num-layers 1", "model_options.mtp_weight", 0.1),
        ("", "model_options.experts", None),
        ("", "model_options.kv_lora_rank", None),
    ],
)
def test_a_setting_of_experts_and_latents(arguments: str, path: str, value: object) -> None:
    assert settings(arguments).get(path) == value


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (f"{EXPERTS} --tensor-model-parallel-size 2", "needs --sequence-parallel"),
        (
            f"{SPLIT} --expert-model-parallel-size 8",
            "8 GPUs are no multiple of expert x expert tensor x pipeline parallel sizes, which are 16",
        ),
        (f"{EXPERTS} --moe-router-dtype fp64", "--moe-router-dtype fp64: a router in float64"),
        (
            f"{EXPERTS} --moe-router-score-function sqrtsoftplus",
            "a router whose scores are the root of a softplus",
        ),
        (
            f"{EXPERTS} --moe-router-load-balancing-type aux_loss seq_aux_loss --moe-aux-loss-coeff 0.1 0.1",
            "several losses that balance experts",
        ),
        (f"{EXPERTS} --moe-router-load-balancing-type quantile_balancing", "balancing by quantiles"),
        (f"{EXPERTS} --moe-input-jitter-eps 0.1", "--moe-input-jitter-eps 0.1"),
        ("--multi-latent-attention", "latents without norms (no --qk-layernorm): not modelled"),
    ],
)
def test_what_experts_and_latents_cannot_be_is_said_in_a_line(arguments: str, problem: str) -> None:
    with pytest.raises(UserError) as error:
        job(arguments).scenario_text()
    assert problem in str(error.value)


@pytest.mark.parametrize(
    ("arguments", "name", "reason"),
    [
        ("--moe-router-topk 4", "--moe-router-topk", "of a mixture of experts (MoE), which the job has not"),
        ("--expert-model-parallel-size 2", "--expert-model-parallel-size", "of a mixture of experts (MoE)"),
        ("--kv-lora-rank 64", "--kv-lora-rank", "of latent attention, which the job has not"),
        ("--mtp-loss-scaling-factor 0.3", "--mtp-loss-scaling-factor", "no token beyond the next"),
        (f"{EXPERTS} --moe-shared-expert-gate", "--moe-shared-expert-gate", "there are no shared experts"),
        (f"{EXPERTS} --moe-router-group-topk 2", "--moe-router-group-topk", "there are no groups"),
    ],
)
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


@pytest.mark.parametrize(
    ("model", "missing"),
    [
        # other words for what the program does
        ({"expert_pattern": [0, 1]}, ()),
        ({"router_normalized": True}, ()),
        ({"router_scores": "chosen", "router_normalized": True}, ()),
        ({"expert_inner": 14336}, ()),
        # what it has not
        ({"router_linear_bias": True}, ("model_options.router_linear_bias true (it has false)",)),
        ({"expert_biases": True}, ("model_options.expert_biases true (it has false)",)),
        ({"dense_layers": 2, "expert_pattern": [1, 0]}, ()),
    ],
)
def test_experts_in_other_words(model: dict[str, Any], missing: tuple[str, ...]) -> None:
    one = cell(MEGATRON, sizes={"dp": 8, "ep": 8}, model_options={"experts": 8, **model})
    found = program_flags("megatron", one)
    assert found.missing == missing
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
