"""Verification of the model of a config.json, in sizes that float64 on a few ranks can take."""

from __future__ import annotations

from pathlib import Path

import pytest

import tests.impls.models.huggingface as published
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import verify
from spbench.impls.models.model import models as all_models

FOLDER = Path(published.__file__).parent


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("llama3-405b", "ring_attention"),
        ("qwen2-7b", "ulysses"),
        ("gpt-neox-20b", "tensor_parallel"),
        ("qwen3-0.6b", "megatron_sp"),
    ],
)
def test_green(pool: RankPool, name: str, strategy: str) -> None:
    path = name if name in all_models() else str(FOLDER / f"{name}.json")
    rows = [*verify([strategy], [path], (4,), parts=["attention"], pool=pool)]
    assert {row.model for row in rows} == {path}
    assert {row.status for row in rows} <= {"green", "unsupported"}
    assert rows[0].status == "green", rows[0].reason


@pytest.mark.slow
@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.json")), ids=lambda path: path.stem)
def test_every_family_under_every_way_to_cut_it(pool: RankPool, path: Path) -> None:
    strategies = ["tensor_parallel", "megatron_sp", "ulysses", "ring_attention", "ring_self_attention"]
    rows = [*verify(strategies, [str(path)], (3, 4), pool=pool)]
    assert {row.status for row in rows} == {"green", "unsupported"}
    assert sum(row.status == "green" for row in rows) >= 20
