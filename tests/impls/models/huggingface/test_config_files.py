"""Models from config.json: parameters exactly as transformers' own models have them, and what is refused."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from spbench.impls.models.huggingface import config as config_files
from spbench.impls.models.huggingface.config import counting_fields, families, model_from_config
from spbench.impls.models.hybrid import HybridModel
from spbench.impls.models.model import Model, model_preset, models
from spbench.impls.strategies.base import Strategy

FOLDER = Path(__file__).parent

#: parameters of published checkpoints, as transformers counts them; of BERT those of BertForPreTraining
PUBLISHED = {
    "llama3-8b": 8_030_261_248,
    "llama3.2-1b": 1_235_814_400,
    "mistral-7b-v0.2": 7_241_732_096,
    "qwen2-7b": 7_615_616_512,
    "qwen3-8b": 8_190_735_360,
    "qwen3-0.6b": 596_049_920,
    "nemotron-h-8b": 8_100_852_736,
    "gpt2": 124_439_808,
    "gpt-neox-20b": 20_554_567_680,
    "bert-base-uncased": 110_106_428,
}


def content(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


def built_parameters(model: Model, seq_len: int) -> int:
    with torch.device("meta"):
        module = model.build(Strategy(), seq_len)
    return sum(parameter.numel() for parameter in module.parameters())


@pytest.mark.parametrize(("name", "published"), PUBLISHED.items())
def test_parameters_are_those_of_transformers(name: str, published: int) -> None:
    model = model_from_config(content(name))
    assert built_parameters(model, 512) == published
    (site,) = (site for site in model.sites(1, 512) if site.kind == "parameters")
    assert site.dims["elements"] == published


def test_there_is_a_published_model_of_each_family() -> None:
    assert {content(name)["model_type"] for name in PUBLISHED} == {*families()}


@pytest.mark.parametrize(
    ("name", "changed", "message"),
    [
        ("llama3-8b", {"hidden_act": "relu"}, 'field hidden_act = "relu" is not covered'),
        ("llama3-8b", {"num_local_experts": 8}, "field num_local_experts = 8 is not covered: no llama model"),
        ("llama3-8b", {"quantization_config": {"bits": 4}}, 'field quantization_config = {"bits": 4} is not'),
        ("llama3-8b", {"rope_scaling": {"type": "longrope"}}, 'field rope_scaling.rope_type = "longrope"'),
        ("llama3-8b", {"attention_dropout": 0.1}, "field attention_dropout = 0.1 is not covered"),
        ("llama3-8b", {"hidden_size": "4096"}, 'field hidden_size = "4096": it must be a valid integer'),
        ("llama3-8b", {"hidden_size": None}, "field hidden_size = null: it must be a valid integer"),
        ("llama3-8b", {"num_key_value_heads": 5}, "kv_heads 5 does not divide heads 32"),
        ("llama3-8b", {"model_type": "mixtral"}, 'field model_type = "mixtral" is not covered: the families'),
        ("llama3-8b", {"model_type": None}, "field model_type = null is not covered: the families"),
        ("mistral-7b-v0.2", {"sliding_window": 0}, "field sliding_window = 0: it must be greater than 0"),
        (
            "nemotron-h-8b",
            {"hybrid_override_pattern": "MEM*" * 13},
            '*" is not covered: E is a layer of experts',
        ),
        (
            "nemotron-h-8b",
            {"num_hidden_layers": 50},
            "num_hidden_layers = 50 is not covered: the pattern has",
        ),
        ("nemotron-h-8b", {"n_routed_experts": 128}, "field n_routed_experts = 128 is not covered"),
        (
            "qwen3-8b",
            {"layer_types": ["full_attention", "sliding_attention"]},
            'field layer_types = "sliding_attention" is not covered: use_sliding_window is off',
        ),
        (
            "qwen3-8b",
            {"layer_types": ["full_attention"] * 3, "use_sliding_window": True, "sliding_window": 9},
            "is not covered: there are 36 layers",
        ),
    ],
)
def test_what_is_not_covered_is_refused_by_name(name: str, changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refused:
        model_from_config(content(name) | changed)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_windows_are_in_the_layers_that_transformers_has_them_in() -> None:
    of_v1 = content("mistral-7b-v0.2") | {"sliding_window": 4096, "rope_theta": 10000.0}
    assert model_from_config(of_v1) == model_preset("mistral-7b-v0.1")
    on = {"use_sliding_window": True, "sliding_window": 4096}
    every = model_from_config(content("qwen3-8b") | on | {"max_window_layers": 0})
    assert every.attended(8192).window == 4096
    late = model_from_config(content("qwen2-7b") | on | {"max_window_layers": 20})
    kinds = ["sliding_attention", "full_attention"] * 18
    turns = model_from_config(content("qwen3-8b") | on | {"layer_types": kinds})
    assert isinstance(late, HybridModel)
    assert isinstance(turns, HybridModel)
    assert [late.mixing(i).window for i in range(28)] == [None] * 20 + [4096] * 8  # type: ignore[union-attr]
    assert (turns.pattern, turns.window) == ("WS", 4096)
    assert built_parameters(turns, 512) == PUBLISHED["qwen3-8b"]


def test_fields_without_effect_are_ignored_and_null_is_as_left_out() -> None:
    given = content("llama3-8b")
    changed = given | {"torch_dtype": "float16", "eos_token_id": [1, 2], "router_aux_loss_coef": None}
    assert counting_fields(changed) == counting_fields(given)
    assert "torch_dtype" not in counting_fields(given)


def test_scaling_of_angles_changes_no_model() -> None:
    given = content("llama3.2-1b")
    newer = {k: v for k, v in given.items() if k not in ("rope_scaling", "rope_theta")}
    # as transformers 5 writes it
    newer["rope_parameters"] = given["rope_scaling"] | {"rope_theta": given["rope_theta"]}
    assert model_from_config(newer) == model_from_config(given)
    assert model_from_config(given | {"rope_theta": 1e6}) != model_from_config(given)


def test_what_counts_makes_the_same_model() -> None:
    for name in PUBLISHED:
        counting = counting_fields(content(name))
        assert model_from_config(counting) == model_from_config(content(name))
        assert counting_fields(counting) == counting


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (
            {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8}
            | {"moe_intermediate_size": 768},
            '(MoE: num_experts = 128), which no model here has; .* "qwen3" .* intermediate_size 6144',
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 8, "num_experts_per_tok": 2}
            | {"intermediate_size": 14336},
            '"mistral" with intermediate_size 28672',
        ),
        (
            {"model_type": "qwen3_next", "num_experts": 512, "num_experts_per_tok": 10},
            "the preset qwen3-next-dense is it with one MLP",
        ),
        (
            {"model_type": "deepseek_v3", "n_routed_experts": 256, "kv_lora_rank": 512},
            "(MoE: n_routed_experts = 256) and multi-head latent attention (MLA: kv_lora_rank = 512)",
        ),
        ({"model_type": "llama4", "text_config": {"num_local_experts": 16}}, "(MoE: num_local_experts = 16)"),
        ({"model_type": "mamba"}, "the families here are bert, gpt2"),
    ],
)
def test_experts_and_latent_attention_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    pattern = re.escape(said).replace(re.escape(".*"), ".*")
    with pytest.raises(ValueError, match=rf"field model_type = .* is not covered: .*{pattern}"):
        counting_fields(fields)


def test_the_dense_stand_ins_are_there() -> None:
    assert set(config_files._PRESETS.values()) <= set(models())
    assert set(config_files._DENSE.values()) <= set(families())
