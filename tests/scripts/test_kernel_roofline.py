"""results/benchmarks/kernels.md holds what the script prints, and the script counts what kernels do."""

import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "scripts" / "kernel_roofline.py"


@pytest.fixture(scope="module")
def script() -> dict[str, Any]:
    return runpy.run_path(str(SCRIPT), run_name="roofline")


@pytest.mark.parametrize(("marker", "table"), [("kernels", "kernel_table"), ("blocks", "block_table")])
def test_the_page_has_what_is_printed(script: dict[str, Any], marker: str, table: str) -> None:
    page = (ROOT / "results" / "benchmarks" / "kernels.md").read_text()
    shown = page.partition(f"<!-- {marker} -->\n")[2].partition("<!-- end -->")[0]
    assert shown == script["markdown"](script[table]())


def test_counts_by_hand(script: dict[str, Any]) -> None:
    """Two heads of size 64, 512 positions in two blocks of 256."""
    states, output, *_ = script["linear_kernels"](2, 64, 512)
    assert states.flops == 2 * 2 * 512 * 64 * 64
    rows, state = 512 * 64 * 2, 64 * 64 * 4
    # k and v, the decays, and three states a head
    assert states.least_bytes == 2 * 2 * rows + 2 * 4 + 2 * 3 * state
    # one tile of 64 x 64: k and v once, the states written, read and written
    assert states.loaded_bytes == 2 * 2 * rows + 3 * 2 * 3 * state
    # of 4 tiles a block the programs meet 1, 2, 3 and 4; each also reads its own rows once more for each
    meets = 2 * 2 * (1 + 2 + 3 + 4)
    tile = 64 * 64 * 2
    assert output.loaded_bytes == 2 * 8 * (state + 2 * tile) + meets * 3 * tile
    assert output.flops == 2 * (meets * 64 * 64 * 128 + 2 * 512 * 64 * 64)


def test_the_slower_of_memory_and_matmuls_counts(script: dict[str, Any]) -> None:
    kernel = script["Kernel"]("any", flops=100, least_bytes=10)
    assert kernel.roofline_s(flop_rate=10, byte_rate=10) == 10
    assert kernel.roofline_s(flop_rate=1000, byte_rate=10) == 1
    assert script["Kernel"]("any", 100, 10, rate=0.5).roofline_s(10, 10) == 20
