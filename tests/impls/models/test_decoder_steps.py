"""What a step of causal language models sends and holds, and what its backward keeps."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from tests.slow import slow


def cell(model: str, **changes: Any) -> Cell:
    defaults = {"model": model, "strategy": "tensor_parallel", "batch": 2, "seq_len": 48}
    return Cell.model_validate(defaults | changes)


@pytest.mark.parametrize(
    ("name", "options"), [("tnl-tiny", {"attention_norm": "head"}), ("linear-llama3-tiny-hybrid", {})]
)
@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize(
    ("sizes", "tied"),
    [
        ({"tp": 2, "pp": 2}, True),
        ({"tp": 2, "dp": 2}, False),
        slow({"tp": 4}, True),
        slow({"tp": 2}, False),
    ],
)
def test_tensor_parallelism_sends_what_its_formula_says(
    name: str, options: dict[str, Any], checkpointing: bool, sizes: dict[str, int], tied: bool
) -> None:
    changed = options | {"checkpointing": checkpointing, "tied": tied}
    measured = VirtualEngine().measure(cell(name, sizes=sizes, precision="bf16", model_options=changed))
    assert measured.formula_difference == []
    assert measured.communication


def test_a_norm_over_all_features_is_refused_where_they_are_split() -> None:
    with pytest.raises(ValueError, match="set its option attention_norm or"):
        VirtualEngine().measure(cell("tnl-tiny", sizes={"tp": 2}))


def bytes_a_token(model: str, **options: Any) -> float:
    """By which the peak grows with a position of a single sequence."""
    changes = {"strategy": "single", "batch": 1, "precision": "bf16", "model_options": options}
    peaks = [tracing.trace(cell(model, seq_len=n, **changes)).memory.peak() for n in (8192, 16384)]
    assert peaks[1].phase == "backward"
    return (peaks[1].nbytes - peaks[0].nbytes) / 8192


def test_what_a_layer_of_tnl_keeps() -> None:
    """In units of [B, L, H] in bfloat16: the layer's input and the normalised one; four projections; silu(q)
    and silu(k); the output of attention, its norm, that times the gate; two more after the residual; two
    projections and their product of 2.75 each; a float32 state [D, A] a head in 256 positions, here 1."""
    unit = 2 * 2048
    layer = bytes_a_token("tnl-1b", layers=3) - bytes_a_token("tnl-1b", layers=2)
    expected = 2 + 4 + 2 + 3 + 2 + 3 * 5632 / 2048 + 128 * 128 * 16 * 4 / 256 / unit
    statistics = 3 * 4 / unit  # of a norm a token each
    assert layer / unit == pytest.approx(expected + statistics, abs=1e-3)


def test_the_peak_holds_12_bytes_a_logit() -> None:
    """Log-softmax, its gradient and the gradient of the logits, each in float32, as fairseq's loss has it."""
    rows = 50272
    more = bytes_a_token("tnl-1b", layers=2, vocabulary=2 * rows) - bytes_a_token("tnl-1b", layers=2)
    assert more / rows == pytest.approx(12, abs=1e-3)
