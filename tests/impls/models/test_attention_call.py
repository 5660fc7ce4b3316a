"""One attention call: what it holds, what refuses it, and what bounds its time."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.impls.layout import Unsupported
from spbench.impls.models.model import model_preset

LENGTH = 65_536


def call(**settings: Any) -> Cell:
    content: dict[str, Any] = {
        "model": "attention-call",
        "strategy": "ulysses+ring_attention",
        "batch": 1,
        "seq_len": LENGTH,
        "precision": "bf16",
        "cluster": "a100-sxm-80gb",
        "training": {"step": "inference"},
    }
    return Cell.model_validate(content | settings)


def test_a_rank_holds_its_heads_and_positions_in_the_precision_of_the_cell() -> None:
    measured = VirtualEngine().measure(call(sizes={"sp": 2, "cp": 4}))
    (by_class,) = {each["rank"]: each for each in measured.by_class or ()}.values()
    q_and_o, k_and_v = 2 * 32, 2 * 8
    assert by_class["allocated_bytes"] == LENGTH // 8 * (32 + k_and_v) * 128 * 2  # q, k and v alone
    assert measured.peak_memory_bytes > LENGTH // 8 * (q_and_o + k_and_v) * 128 * 2


def test_zigzag_halves_the_work_of_the_last_rank_of_a_ring() -> None:
    """Seven blocks and half of its own, or half of each of the eight; so long that little else counts."""
    contiguous, zigzag = (
        VirtualEngine().measure(
            call(sizes={"cp": 8}, seq_len=16 * LENGTH, strategy_options={"placement": placement})
        )
        for placement in ("contiguous", "zigzag")
    )
    assert contiguous.step_time_s is not None
    assert zigzag.step_time_s is not None
    assert contiguous.step_time_s / zigzag.step_time_s == pytest.approx(7.5 / 4, rel=0.03)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"training": {}}, "attention-call has no weights to train; set training: {step: inference}"),
        (
            {"strategy": "tensor_parallel", "sizes": {"tp": 2}},
            "this model is given its heads",
        ),
        ({"strategy": "ulysses", "sizes": {"sp": 3}}, "32 attention heads cannot be split over 3 ranks"),
    ],
)
def test_what_cannot_run_is_refused(settings: dict[str, Any], reason: str) -> None:
    with pytest.raises(Unsupported, match=reason):
        plan(call(**{"seq_len": 3 * LENGTH} | settings))


def test_options_are_checked() -> None:
    with pytest.raises(ValueError, match="heads 32 are not divisible by kv_heads 5"):
        model_preset("attention-call", {"kv_heads": 5})
    with pytest.raises(ValueError, match="attention"):
        model_preset("attention-call", {"attention": "unfused"})


def test_inputs_are_drawn_by_heads() -> None:
    inputs = model_preset("attention-call", {"head_size": 4}).inputs(2, 3, torch.Generator().manual_seed(0))
    assert {name: list(x.shape) for name, x in inputs.items()} == {
        "q": [2, 3, 32, 4],
        "k": [2, 3, 8, 4],
        "v": [2, 3, 8, 4],
    }
