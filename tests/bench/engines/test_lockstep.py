"""Errors against float64 of all ranks in turn, and that sums in half precision show in them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.engines.lockstep import LockstepEngine
from spbench.impls.strategies import blockwise, ring_attention
from spbench.impls.strategies.base import Unsupported

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
