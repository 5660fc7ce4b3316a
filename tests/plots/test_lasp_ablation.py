"""The figure of LASP's ablations: bars of fused and cached, and of the longest sequences."""

from typing import Any

from spbench.plots.lasp import draw_lasp_ablation
from tests.plots.drawn import artists, assert_below_zero, drawn, legend
from tests.plots.rows import ran

Row = dict[str, Any]
GIB = 2**30


def combined(fusion: bool, caching: bool, status: str = "ok") -> Row:
    """10 GiB more without fused kernels, and half the speed without cached states."""
    return ran(
        status,
        {"peak_memory_bytes": (30 + 10 * (not fusion)) * GIB, "tokens_per_s": 4000.0 * (1 + caching)},
        model="tnl-1b",
        strategy="lasp",
        sizes={"sp": 8},
        batch=1,
        seq_len=65536,
        strategy_options={"kernel_fusion": fusion, "state_caching": caching},
        training={"backend": "fsdp_flat"},
    )


def longest(
    strategy: str, length: int, backend: str = "ddp", checkpointing: bool = False, status: str = "ok"
) -> Row:
    return ran(
        status,
        {"answer": length},
        model="tnl-1b",
        strategy=strategy,
        sizes={"sp" if strategy == "lasp" else "dp": 8},
        batch=1 if strategy == "lasp" else 8,
        training={"backend": backend},
        model_options={"checkpointing": True} if checkpointing else {},
        search={"quantity": "seq_len", "step": 1024},
    )


COMBINED = [combined(fusion, caching) for fusion in (True, False) for caching in (True, False)]
SEARCHES = [
    longest(strategy, length * 1024, backend, checkpointing)
    for strategy, length in (("single", 12), ("lasp", 96))
    for checkpointing in (False, True)
    for backend in ("ddp", "fsdp_flat")
]


def test_bars_are_the_rows() -> None:
    figure = drawn(draw_lasp_ablation, [*COMBINED, *SEARCHES])
    memory, throughput, lengths = figure.axes
    assert [ax.get_ylabel() for ax in (memory, throughput)] == ["Peak memory (GiB)", "Tokens per second"]
    assert memory.get_title() == "tnl-1b, 8 GPUs, 64K tokens"
    assert lengths.get_title() == "tnl-1b, 8 GPUs: longest sequence that fits"
    expected = {"fused, cached": (30, 8000), "fused": (30, 4000), "cached": (40, 8000), "neither": (40, 4000)}
    for name, numbers in expected.items():
        for ax, quantity, number in zip((memory, throughput), ("memory", "throughput"), numbers, strict=True):
            (bar,) = artists(figure, f"{quantity} {name} LASP")
            assert (bar.axes, bar.get_height()) == (ax, number)
    for name in ("DDP", "FSDP", "DDP, recomputed", "FSDP, recomputed"):
        (alone,), (lasp,) = (artists(figure, f"length {name} {who}") for who in ("single", "LASP"))
        assert (alone.get_height(), lasp.get_height()) == (12, 96)
        assert alone.get_x() + alone.get_width() < lasp.get_x()
    assert {text.get_text() for text in lengths.texts} == {"12K", "96K"}
    assert legend(figure) == ["data parallel only", "LASP"]


def test_bars_without_a_number_are_marked_and_told() -> None:
    rows = [combined(True, True), combined(False, True, "failed"), longest("single", 0, status="oom")]
    figure = drawn(draw_lasp_ablation, [*rows, *SEARCHES[4:]])
    (failed,) = artists(figure, "throughput cached LASP")
    (lost,) = artists(figure, "length DDP single")
    for mark in (failed, lost):
        assert_below_zero(mark)
    assert legend(figure)[-2:] == ["failed", "out of memory"]
    (notes,) = artists(figure, "notes")
    assert notes.get_text() == "cached: failed (reason of failed)"
