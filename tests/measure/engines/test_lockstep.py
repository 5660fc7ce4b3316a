"""Errors against float64 of all ranks in turn, and that sums in half precision show in them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.lockstep import LockstepEngine
from spbench.impls.strategies import blockwise, ring_attention
from spbench.impls.strategies.base import Unsupported

ROOT = Path(__file__).parents[3]
ROWS = [
    json.loads(line) for line in (ROOT / "results/reproduction/numerics/cells.jsonl").read_text().splitlines()
]
CALL = {
    "model": "attention-call",
    "model_options": {"heads": 4, "kv_heads": 4, "head_size": 16},
    "training": {"step": "inference"},
    "seq_len": 128,
}
MODEL = {"model": "causal-transformer-tiny", "model_options": {}, "seq_len": 24, "training": {}}


def errors(strategy: str, precision: str = "bf16", sp: int = 1, **options: Any) -> dict[str, float]:
    settings = {**CALL, "batch": 1, "engine": "lockstep", "sizes": {"sp": sp}, **options}
    cell = Cell.model_validate({**settings, "strategy": strategy, "precision": precision})
    return LockstepEngine().measure(cell).errors


@pytest.mark.parametrize(
    ("strategy", "kind"),
    [
        ("ring_attention", "causal_attention"),
        ("ring_self_attention", "attention"),
        ("lasp2", "linear_attention"),
    ],
)
def test_in_float64_only_the_order_of_sums_differs(strategy: str, kind: str) -> None:
    options = CALL["model_options"] | {"kind": kind}  # type: ignore[operator]
    found = errors(strategy, "fp64", 4, model_options=options)
    assert set(found) == {"o", "d_q", "d_k", "d_v"}
    assert max(found.values()) < 1e-14


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"sp": 2, "dp": 2}])
def test_gradients_of_weights(sizes: dict[str, int]) -> None:
    strategy = "tensor_parallel" if "tp" in sizes else "ulysses"
    found = errors(strategy, "fp64", **MODEL, sizes=sizes, batch=2)
    assert set(found) == {"loss", "gradients", "worst_gradient"}
    assert max(found.values()) < 1e-13
    half = errors(strategy, "fp16", **MODEL, sizes=sizes, batch=2)
    assert 1e-5 < half["gradients"] < 1e-2


def test_a_ring_that_sums_in_float32_is_as_exact_as_a_device() -> None:
    device, ring = errors("single"), errors("ring_attention", sp=16)
    assert ring["o"] < 1.5 * device["o"]
    assert ring["d_k"] < 1.5 * device["d_k"]


def test_sums_of_a_ring_in_half_precision_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_attention, "state_dtype", lambda dtype: dtype)
    few, many = (errors("ring_attention", sp=sp)["d_k"] for sp in (2, 16))
    assert many > 1.5 * few


def test_a_wrong_merge_of_softmaxes_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(o: Tensor, lse: Tensor, block_o: Tensor, block_lse: Tensor) -> None:
        o.lerp_(block_o.to(o.dtype), torch.sigmoid(block_lse - lse).unsqueeze(-1))
        torch.maximum(lse, block_lse, out=lse)

    monkeypatch.setattr(blockwise, "merge", merge)
    assert errors("ring_attention", sp=4)["o"] > 0.05


def test_a_pass_without_gradients_is_refused() -> None:
    settings = {**MODEL, "batch": 1, "training": {"step": "inference"}, "engine": "lockstep"}
    with pytest.raises(Unsupported, match=r"leave training\.step out"):
        LockstepEngine().measure(Cell.model_validate({**settings, "strategy": "single"}))


def committed(strategy: str, kind: str, ranks: int, placement: str | None = None) -> dict[str, Any]:
    """The row in bf16 of a call of attention."""
    (row,) = [
        row
        for row in ROWS
        if (cell := row["cell"])["model"] == "attention-call"
        and (cell["strategy"], cell["precision"]) == (strategy, "bf16")
        and cell["model_options"].get("kind", "causal_attention") == kind
        and math.prod(cell["sizes"].values()) == ranks
        and placement in (None, cell["strategy_options"].get("placement"))
    ]
    return row


def test_a_committed_row_is_measured_again() -> None:
    row = committed("ring_self_attention", "attention", 4)
    found = LockstepEngine().measure(Cell.model_validate(row["cell"])).errors
    # vector units of other machines round otherwise
    assert found == pytest.approx(row["measurement"]["errors"], rel=0.05)


@pytest.mark.parametrize(
    ("line", "strategy", "kind", "placement"),
    [
        ("ring_attention zigzag", "ring_attention", "causal_attention", "zigzag"),
        ("all_gather_kv", "all_gather_kv", "causal_attention", None),
        ("ulysses", "ulysses", "causal_attention", None),
        ("ring_self_attention", "ring_self_attention", "attention", None),
        ("lasp", "lasp", "linear_attention", None),
        ("lasp2", "lasp2", "linear_attention", None),
        ("ring_attention, linear", "ring_attention", "linear_attention", None),
    ],
)
def test_the_page_shows_the_rows(line: str, strategy: str, kind: str, placement: str | None) -> None:
    page = (ROOT / "docs/numerics.md").read_text()
    for what, names in (("outputs", ["o"]), ("gradients", ["d_q", "d_k", "d_v"])):
        (shown,) = [each for each in page.splitlines() if each.startswith(f"| {line}, {what} |")]
        numbers = [text.strip() for text in shown.strip("|").split("|")[1:]]
        for ranks, number in zip([1, 4, 16, 64], numbers, strict=True):
            place = ("single", kind, 1) if ranks == 1 else (strategy, kind, ranks, placement)
            if number:
                found = committed(*place)["measurement"]["errors"]
                assert number == f"{max(found[name] for name in names) * 1e3:.1f}"
