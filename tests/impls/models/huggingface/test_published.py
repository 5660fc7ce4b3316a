"""Models by their names on Hugging Face: parameters beside published ones."""

import re
from dataclasses import replace

import pytest

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.config import counting_fields, model_from_config
from spbench.impls.models.huggingface.published import Published, published_model, published_models
from spbench.impls.models.model import Model, model_preset

ONE_A_CONFIG = {id(each.config): each for each in published_models()}.values()
#: those of which a count is published
COUNTED = [each for each in ONE_A_CONFIG if each.parameters]
UNITS = {"M": 1e6, "B": 1e9, "T": 1e12}


def parameters(model: Model) -> int:
    if isinstance(model, CausalTransformerModel):
        model = replace(model, mtp_layers=0)
    (site,) = (site for site in model.sites(1, 512) if site.kind == "parameters")
    return site.dims["elements"]


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


@pytest.mark.parametrize(
    ("name", "preset"),
    [
        ("meta-llama/Llama-3.1-8B-Instruct", "llama3-8b"),
        ("Qwen/Qwen3-30B-A3B", "qwen3-30b-a3b"),
        ("deepseek-ai/DeepSeek-V3", "deepseek-v3"),
        ("openai/gpt-oss-20b", "gpt-oss-20b"),
    ],
)
def test_a_name_and_a_preset_are_one_size(name: str, preset: str) -> None:
    known = published_model(name.upper())
    assert known.name == name
    assert parameters(model_from_config(known.config)) == parameters(model_preset(preset))


def test_a_name_that_is_not_known_has_no_model() -> None:
    assert published_model("nobody/nothing") is None
