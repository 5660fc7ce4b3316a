"""What cannot be is refused in the words of refusals.yaml."""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.impls.layout import MEETINGS, Unsupported
from spbench.impls.registries import all_backends as backends
from spbench.impls.registries import all_strategies as strategies
from spbench.impls.registries import model_preset
from spbench.impls.strategies.nesting import nesting
from tests.grid import data
from tests.measure.verify.attention_model import AttentionModel

REFUSALS: dict[str, list[Any]] = data(Path(__file__).with_name("refusals.yaml"))


@pytest.mark.parametrize(("name", "options", "message"), REFUSALS["models"])
def test_options_of_a_model(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises((ValueError, KeyError), match=message):
        model_preset(name, options)


@pytest.mark.parametrize(("name", "ranks", "options", "model", "seq_len", "message"), REFUSALS["strategies"])
def test_sizes_of_a_strategy(
    name: str, ranks: int, options: dict[str, Any], model: str, seq_len: int, message: str
) -> None:
    preset = AttentionModel(model) if model in MEETINGS else model_preset(model)
    with pytest.raises(Unsupported, match=message):
        strategies()[name].planned(ranks, options=options).check(preset.sites(1, seq_len))


@pytest.mark.parametrize(("name", "message"), REFUSALS["pairs"])
def test_strategies_around_each_other(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nesting(name)


@pytest.mark.parametrize(("sizes", "message"), REFUSALS["sizes"])
def test_ranks_by_axis(sizes: dict[str, int], message: str) -> None:
    for content in (sizes, {"model": "gpt-tiny", "strategy": "ulysses", "sizes": sizes}):
        with pytest.raises(ValueError, match=message):
            (Sizes if content is sizes else Cell).model_validate(content)


@pytest.mark.parametrize(("name", "options", "message"), REFUSALS["backends"])
def test_options_of_a_backend(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        backends()[name].options_type(**options)


@pytest.mark.parametrize(("fields", "message"), REFUSALS["cells"])
def test_cells(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        VirtualEngine().measure(Cell.model_validate({"batch": 1, "seq_len": 24} | fields))
