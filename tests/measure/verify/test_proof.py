"""A peer is measured only where verification proves its gradients right."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.sweep.results import ResultsFile
from spbench.bench.measure.sweep.sweep import sweep
from spbench.bench.measure.verify import proof
from spbench.bench.measure.verify.cases import VerifyRow
from spbench.bench.measure.verify.proof import reasons_against
from spbench.impls.strategies.nesting import Nesting
from tests.bench import fakes
from tests.measure.verify import attention_faults


def cell(strategy: str = "torch_context_parallel", **settings: Any) -> Cell:
    defaults = {"model": "causal-transformer-tiny", "sizes": {"sp": 2}, "batch": 2, "seq_len": 48}
    return Cell.model_validate({**defaults, "strategy": strategy, "precision": "fp32", **settings})


class PlantedPeer(attention_faults.OneNthGradients):
    """Gradients scaled by 1/N, as if another package had made them."""

    requires = ("torch",)


def test_one_that_is_right_is_measured_and_asked_about_once(
    pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []
    verified = proof._verified

    def counted(*arguments: Any) -> Any:
        row = verified(*arguments)
        asked.append(f"{row.model} {row.mesh} {row.dtype} {row.status}")
        return row

    monkeypatch.setattr(proof, "_verified", counted)
    cells = [cell(), cell(batch=4), cell(sizes={"sp": 6}, strategy_options={"placement": "zigzag"})]
    assert reasons_against(cells, pool) == {}
    models = proof._tiny(cell())
    assert {"causal-transformer-tiny", "causal-transformer-tiny-gqa", "gpt3-tiny"} <= {*models}
    refused = {"mla-tiny"}  # by a ring
    status = {name: "unsupported" if name in refused else "green" for name in models}
    assert asked == [f"{name} sp{ranks} fp32 {status[name]}" for ranks in (2, 4) for name in models]


@pytest.mark.parametrize("least", [2, 1])
def test_fewer_ranks_are_tried_where_more_cannot_run_a_tiny_model(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    asked: list[int] = []

    def verified(pool: object, of: Cell, sizes: Any, name: str, preset: object) -> VerifyRow:
        asked.append(sizes["sp"])
        status: Any = "green" if sizes["sp"] == least else "unsupported"
        return VerifyRow(
            strategy="",
            model=name,
            part="",
            size=sizes["sp"],
            dtype="fp32",
            status=status,
            reason="3 heads; use 3",
        )

    monkeypatch.setattr(proof, "_verified", verified)
    found = reasons_against([cell(sizes={"sp": 4})], object())  # type: ignore[arg-type]
    presets = len(proof._tiny(cell()))
    assert asked == [ranks for ranks in (4, 3, 2) for _ in range(presets)]
    assert [*found.values()] == (
        [] if least == 2 else ["not measured, as nothing could be verified: 3 heads; use 3"]
    )


def test_one_that_rounds_to_float32_may_not_be_measured_in_float64(pool: RankPool) -> None:
    wanted = cell(precision="fp64")
    (reason,) = reasons_against([wanted, cell()], pool).values()
    case = f"{next(iter(proof._tiny(wanted)))} on sp2 Gloo ranks in fp64"
    assert reason.startswith(f"not measured, as verification is red ({case}): ")
    assert "not a scale" in reason


def test_a_planted_factor_is_in_the_reason(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "nesting", lambda name: Nesting((PlantedPeer,)))
    planted = cell("ring_self_attention", model="bert-tiny", sizes={"sp": 4})
    (reason,) = reasons_against([planted], pool).values()
    assert " is 0.25 times the reference (residual " in reason
    assert "\n" not in reason


def test_ours_are_not_verified_again_and_refused_cells_say_so_themselves() -> None:
    class NoPool:
        def run(self, *_: Any) -> None:
            raise AssertionError

    cells = [cell("ring_attention"), cell(seq_len=47), cell(sizes={"sp": 1})]
    assert reasons_against(cells, NoPool()) == {}  # type: ignore[arg-type]


def test_a_sweep_keeps_the_reason_and_runs_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell(), cell("ring_attention"), cell(batch=4)]
    monkeypatch.setattr(f"{sweep.__module__}.reasons_against", lambda cells: {cells[-1].key: "planted"})
    refused = sorted(cells, key=lambda each: each.batch or 0)[-1]
    events: list[str] = []
    with ResultsFile(tmp_path) as results:
        rows = sweep(
            cells,
            results,
            run=fakes.answer,
            jobs=1,
            on_start=lambda each: events.append(f"start {each.key}"),
            on_end=lambda row: events.append(f"end {row['key']}"),
        )
    assert {row["key"]: row["status"] for row in rows} == {
        each.key: "numerics" if each is refused else "ok" for each in cells
    }
    kept = next(row for row in rows if row["status"] == "numerics")
    assert (kept["reason"], kept["measurement"]) == ("planted", {})
    assert events[:2] == [f"start {refused.key}", f"end {refused.key}"]
    assert len(events) == 6
