"""Which cells of a table make a line."""

from __future__ import annotations

from typing import Any

from spbench.bench.report.arrangement import Arrangement, arranged, point_of
from spbench.bench.report.gathered import Gathered


def cell(**fields: Any) -> dict[str, Any]:
    given = {"model": "bert-base", "strategy": "lasp", "sizes": {"sp": 2}, "batch": 1, "seq_len": 512}
    return point_of({**given, "training": {"backend": "ddp"}, **fields})


def test_cells_along_one_setting_are_one_line() -> None:
    assert arranged([cell(seq_len=n) for n in (512, 1024, 2048)]) == Arrangement("seq_len", ())
    assert arranged([cell(sizes={"sp": n}) for n in (2, 4, 8)]) == Arrangement("gpus", ())


def test_methods_are_lines_of_one_panel_and_models_panels() -> None:
    points = [
        cell(sizes={"sp": n}, strategy=strategy, model=model)
        for n in (2, 4, 8)
        for strategy in ("lasp", "ulysses")
        for model in ("bert-base", "bert-large")
    ]
    assert arranged(points) == Arrangement("gpus", ("model",))


def test_the_longer_lines_are_taken() -> None:
    points = [cell(sizes={"sp": n}, seq_len=length) for n in (2, 4) for length in (512, 1024, 2048)]
    assert arranged(points) == Arrangement("seq_len", ("gpus",))


def test_cells_that_make_no_line_are_drawn_one_by_one() -> None:
    points = [cell(strategy_options={"fused": fused, "cached": c}) for fused in (True, False) for c in (1, 0)]
    assert arranged(points) == Arrangement(None, ())


def test_two_weak_scalings_are_two_panels(gathered: Gathered) -> None:
    """RSA's Table 4: the batch grows with the GPUs, or the sequence does."""
    rows = [c.row for c in gathered.cells if c.scenario == "rsa_table4"]
    assert arranged([point_of(row["cell"]) for row in rows]) == Arrangement("gpus", ("tokens_per_gpu",))
