"""What `spbench fit` takes for granted of a model."""

from __future__ import annotations

import pytest

from spbench.bench.tools.fit.asked import Asked
from spbench.bench.tools.fit.subject import subject

OPTION = "strategy_options.placement"


def asked(strategy: str, axis: str, **settings: object) -> Asked:
    of_model = {f"sizes.{axis}": 2, "seq_len": 1024, **settings}
    return Asked(cluster="dgx-a100", gpus=2, strategy=strategy, settings=of_model)


@pytest.mark.parametrize(
    ("model", "strategy", "settings", "placement"),
    [
        ("causal-transformer-tiny", "ring_attention", {}, "zigzag"),
        ("causal-transformer-tiny", "all_gather_kv", {}, "zigzag"),
        ("causal-transformer-tiny", "ring_attention", {OPTION: "contiguous"}, "contiguous"),
        ("causal-transformer-tiny", "ring_attention", {"seq_len": 1026}, None),  # not divisible by 2 x 2
        ("causal-transformer-tiny", "ring_attention", {"model_options.window": 64}, "zigzag"),
        ("causal-transformer-tiny", "ulysses", {}, None),
        ("mistral-7b-v0.1", "ring_attention", {"seq_len": 8192}, None),  # a halo, of contiguous chunks
        ("tnl-tiny", "ring_attention", {}, None),  # linear attention has contiguous chunks alone
        ("st-dit-tiny", "ring_attention", {"seq_len": 72}, None),  # no causal mask
    ],
)  # fmt: skip
def test_text_is_placed_as_programs_do(
    model: str, strategy: str, settings: dict[str, object], placement: str | None
) -> None:
    found = subject([model], asked(strategy, "sp", **settings))
    (cell,) = found.cells
    assert cell.strategy_options.get("placement") == placement
    said = any(f"{OPTION} zigzag" in remark for remark in found.remarks)
    assert said == (placement == "zigzag")
