"""The changes that options and backends declare: each can be made, and asks for something else."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.scenario import changed, given, written
from spbench.bench.tools.fit.suggestions import single_changes
from spbench.impls.models.model import models
from spbench.impls.registries import backends, strategies


@pytest.mark.parametrize("name", sorted(models()))
def test_what_models_declare_are_their_options(name: str) -> None:
    model: Any = models()[name]
    for saving in model.savings(stages=1):
        assert replace(model, **saving.options) != model
        assert saving.words


def test_what_strategies_and_backends_declare_are_their_options() -> None:
    for cls in (*strategies().values(), *backends().values()):
        options = cls.options_type()
        for saving in options.savings():
            assert {*saving.options} <= {field.name for field in fields(options)}
            assert replace(options, **saving.options) != options


def cell(**changes: Any) -> Cell:
    settings = {"model": "causal-transformer-tiny", "strategy": "ulysses", "batch": 8, "seq_len": 64}
    return Cell.model_validate(settings | changes)


def sets(asked: Cell) -> list[str]:
    return [written(change.settings) for change in single_changes(asked)]


def test_sizes_are_divided_anew_with_micro_batches_of_the_same_size() -> None:
    found = sets(cell(sizes={"dp": 4, "sp": 2}, training={"backend": "ddp"}))
    assert "sizes.sp=4,sizes.dp=2,training.micro_batches=2" in found
    assert "sizes.pp=2,sizes.sp=1" in found
    assert "sizes.dp=8,sizes.sp=1" in found  # whose micro-batches are of one sample, for there are no more
    assert {"training.backend=zero1", "training.backend=zero3", "training.micro_batches=2"} <= {*found}


def test_what_shares_out_less_is_no_help() -> None:
    found = sets(cell(sizes={"dp": 2, "sp": 2}, training={"backend": "zero2"}))
    assert "training.backend=zero3" in found
    assert not {"training.backend=zero1", "training.backend=ddp"} & {*found}
    of_megatron = sets(cell(sizes={"dp": 2, "sp": 2}, training={"backend": "megatron"}))
    assert "training.distributed_optimizer=true" in of_megatron
    assert not [each for each in of_megatron if "backend" in each]


def test_another_length_or_batch_is_another_job() -> None:
    others = [written(c.settings) for c in single_changes(cell(sizes={"dp": 2})) if c.other_job]
    assert others == ["batch=4", "seq_len=32"]


def test_experts_have_changes_of_their_own() -> None:
    asked = cell(model="moe-tiny", sizes={"dp": 2, "sp": 2}, training={"backend": "megatron"})
    found = sets(asked)
    assert "model_options.recompute=selective,model_options.recompute_modules=moe_act" in found
    assert {"sizes.ep=2", "model_options.capacity=1.0"} <= {*found}
    part = "training.distributed_optimizer=true,training.optimizer=host,"
    assert f"{part}training.optimizer_offload_fraction=0.5" in found
    (capacity,) = (c for c in single_changes(asked) if "model_options.capacity" in c.settings)
    assert capacity.other_job


def test_changes_are_read_as_they_are_written() -> None:
    settings: dict[str, Any] = {"training.backend": "zero1", "sizes.sp": 2, "mesh": ["sp", "dp"]}
    settings |= {"model_options.tied": True, "model_options.recompute_modules": ["layernorm", "mlp"]}
    pairs = [tuple(pair.split("=")) for pair in written(settings).split(",")]
    assert given(pairs) == settings  # type: ignore[arg-type]
    assert given([("seq_len", "4K"), ("batch", "3")]) == {"seq_len": 4096, "batch": 3}


def test_a_search_for_what_is_set_is_over() -> None:
    searched = cell(seq_len=None, search={"quantity": "seq_len"})
    assert changed(searched, {"seq_len": 128}).search is None
    assert changed(searched, {"batch": 4}).search is not None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"traning.steps": 2}, "--set traning.steps: unknown setting; did you mean 'training'?"),
        ({"training.backend": "fsdp"}, "--set training.backend: unknown backend 'fsdp'"),
        ({"batch.x": 2}, "--set batch.x: unknown setting; batch has no parts"),
        ({"model_options.layers": "two"}, "--set model_options.layers: must be a valid integer"),
        ({"sizes.cp": 2}, "--set sizes.cp: 2: the strategy ulysses does not use the axis cp"),
    ],
)
def test_a_change_that_cannot_be_is_named(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(UserError) as error:
        changed(cell(), settings)
    assert problem in str(error.value)
