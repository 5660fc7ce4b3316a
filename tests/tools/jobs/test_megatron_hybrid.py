"""Muon and hybrids of Megatron-LM's jobs."""

from __future__ import annotations

import pytest

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
