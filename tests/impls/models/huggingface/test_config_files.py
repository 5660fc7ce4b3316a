"""Models from config.json: parameters exactly as transformers' own models have them, and what is refused.
Models by their names on Hugging Face: parameters beside published ones."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface import config as config_files
from spbench.impls.models.huggingface.config import counting_fields, families, model_from_config
from spbench.impls.models.huggingface.published import Published, published_model, published_models
from spbench.impls.models.hybrid import HybridModel
from spbench.impls.models.model import Model
from spbench.impls.registries import all_models, model_preset
from spbench.impls.strategies.base import Strategy
from tests.grid import data, tabled
from tests.slow import slow

FOLDER = Path(__file__).parent

PUBLISHED = data(__file__)["PUBLISHED"]


def content(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text())
    return loaded


def built_parameters(model: Model, seq_len: int) -> int:
    with torch.device("meta"):
        module = model.build(Strategy(), seq_len)
    return sum(parameter.numel() for parameter in module.parameters())


def counted(model: Model) -> list[int]:
    """The elements of a model's parameters, and of those that no step trains, if there are any."""
    kinds = ("parameters", "frozen_parameters")
    return [site.dims["elements"] for site in model.sites(1, 512) if site.kind in kinds]


#: of the same classes as smaller ones, and seconds of work
LARGE = {"qwen3-next-80b-a3b", "kimi-linear-48b-a3b", "deepseek-v3", "deepseek-v3.2"}


@pytest.mark.parametrize(
    ("name", "published"), [slow(*each) if each[0] in LARGE else each for each in PUBLISHED.items()]
)
def test_parameters_are_those_of_transformers(name: str, published: int) -> None:
    model = model_from_config(content(name))
    assert built_parameters(model, 512) == published
    assert sum(counted(model)) == published


def test_there_is_a_published_model_of_each_family() -> None:
    # two families of one model: of its text, and of text and images
    of_both = {"llama4_text", "gemma3", "qwen3_5", "qwen3_5_moe"}
    tabled = {each.config["model_type"] for each in published_models()}
    assert tabled | {content(name)["model_type"] for name in PUBLISHED} == {*families()} - of_both


@tabled(__file__, "what_is_not_covered_is_refused_by_name")
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


@tabled(__file__, "families_that_are_not_here_are_refused_by_name")
def test_families_that_are_not_here_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=rf"field model_type = .* is not covered: {said}"):
        counting_fields(fields)


@tabled(__file__, "a_file_is_the_preset_of_its_model")
def test_a_file_is_the_preset_of_its_model(name: str, preset: str) -> None:
    assert model_from_config(content(name)) == model_preset(preset)


@tabled(__file__, "layers_with_experts_are_those_of_transformers")
def test_layers_with_experts_are_those_of_transformers(
    step: int, without: list[int], options: dict[str, Any]
) -> None:
    changed = {"decoder_sparse_step": step, "mlp_only_layers": without, "num_hidden_layers": 6}
    model = model_from_config(content("qwen3-30b-a3b") | changed)
    expected = {**options, "expert_pattern": tuple(options["expert_pattern"])}
    assert {name: getattr(model, name) for name in options} == expected


def test_every_second_layer_of_llama_4_may_have_an_mlp_of_its_own_size() -> None:
    model = model_from_config(content("llama4-scout")["text_config"] | {"interleave_moe_layer_step": 2})
    expected = {"expert_pattern": (0, 1), "inner": 16384, "expert_inner": 8192, "shared_inner": 8192}
    assert {name: getattr(model, name) for name in expected} == expected


def test_presets_named_in_refusals_are_there() -> None:
    assert set(config_files._PRESETS.values()) <= set(all_models())


ONE_A_CONFIG = {id(each.config): each for each in published_models()}.values()
#: those of which a count is published
COUNTED = [each for each in ONE_A_CONFIG if each.parameters]
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}


def parameters(model: Model) -> int:
    if isinstance(model, CausalTransformerModel):
        model = replace(model, mtp_layers=0)
    return sum(counted(model))


def test_there_are_sixty_models_with_a_cited_count() -> None:
    assert len(COUNTED) >= 60
    assert len(published_models()) == len({each.name.lower() for each in published_models()})


def test_only_fields_that_count_are_kept() -> None:
    for known in ONE_A_CONFIG:
        assert counting_fields(known.config) == known.config


@pytest.mark.parametrize("known", COUNTED, ids=lambda known: known.name)
def test_parameters_are_as_published(known: Published) -> None:
    ours, published = parameters(model_from_config(known.config)), known.parameters
    assert known.counted is not None
    if published.isdigit():
        assert ours == int(published)
    else:
        rounded = re.fullmatch(r"([\d.]+)([MBT])", published)
        # cards of models round down, too: Qwen2.5-32B has 32.76 billion, and says 32.5
        assert ours == pytest.approx(float(rounded[1]) * UNITS[rounded[2]], rel=0.015)


@tabled(__file__, "a_name_and_a_preset_are_one_size")
def test_a_name_and_a_preset_are_one_size(name: str, preset: str) -> None:
    known = published_model(name.upper())
    assert known.name == name
    assert parameters(model_from_config(known.config)) == parameters(model_preset(preset))


def test_a_name_that_is_not_known_has_no_model() -> None:
    assert published_model("nobody/nothing") is None
