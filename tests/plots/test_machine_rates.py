"""The plots of a machine's rates."""

from pathlib import Path
from typing import Any

import pytest

from spbench.plots.machine_rates import draw_machine_rates, machine_rates
from tests.plots.drawn import assert_nothing_overlaps, assert_valid, points


def rate(operation: str, extent: int, seconds: float = 2.0, **fields: Any) -> dict[str, Any]:
    """Of three samples, from half to twice the seconds."""
    empty = {"flops_per_s": None, "bytes_per_s": None, "bus_bytes_per_s": None, "size": f"{extent} B"}
    bounds = {"seconds": seconds, "least_s": seconds / 2, "most_s": 2 * seconds}
    return {
        "operation": operation,
        "extent": extent,
        "precision": "fp32",
        "ranks": 8,
        **empty,
        **bounds,
    } | fields


RATES = [
    rate("matrix product", 256, size="[256, 256] x [256, 256]", flops_per_s=3e12),
    rate("matrix product", 128, size="[128, 128] x [128, 128]", flops_per_s=1e12),
    rate("matrix product", 128, size="[512, 128] x [128, 512]", flops_per_s=2e12),
    rate("attention forward", 1024, flops_per_s=2.5e12),
    rate("attention forward and backward", 1024, flops_per_s=1.5e12, precision="bf16"),
    rate("sum", 2**20, bytes_per_s=1e12),
    *(
        rate(operation, size, bytes_per_s=2 * size, bus_bytes_per_s=size * factor)
        for size in (2**10, 2**20, 2**30)
        for operation, factor in (("all_reduce", 3.5), ("send_recv", 1.0))
    ),
]


def test_each_kind_of_rate_has_a_panel() -> None:
    figure = machine_rates(RATES, "A machine").draw()
    assert [ax.get_title() for ax in figure.axes] == [
        *("Matrix products", "Attention", "Sum of two tensors", "Collectives on 8 ranks")
    ]
    assert figure.axes[0].get_ylabel() == "TFLOP/s"
    assert points(figure, "Matrix products fp32, [s, s] x [s, s]") == [(128, 1), (256, 3)]
    assert points(figure, "Matrix products fp32, [4s, s] x [s, 4s]") == [(128, 2)]
    assert points(figure, "Attention bf16, forward and backward") == [(1024, 1.5)]
    assert points(figure, "Sum of two tensors") == [(2**20, 1000)]
    collective = points(figure, "Collectives on 8 ranks all_reduce")
    assert collective == [(2**n, pytest.approx(3.5 * 2**n / 1e9)) for n in (10, 20, 30)]
    ticks = [text.get_text() for text in figure.axes[3].get_xticklabels()]
    assert ticks == ["1 KiB", "1 MiB", "1 GiB"]
    assert_nothing_overlaps(figure)


def test_files(tmp_path: Path) -> None:
    assert_valid(draw_machine_rates(RATES, "A machine", tmp_path / "here.yaml"), tmp_path, "here")


def test_one_rank_has_no_panel_of_collectives() -> None:
    figure = machine_rates(RATES[:6], "A device").draw()
    assert [ax.get_title() for ax in figure.axes] == ["Matrix products", "Attention", "Sum of two tensors"]
