"""The figures of the DSP paper: by number of GPUs, and bars of memory."""

from typing import Any

import pandas as pd
from matplotlib.figure import Figure

from spbench.plots import dsp
from tests.plots.drawn import artists, assert_below_zero, drawn, legend, points
from tests.plots.rows import published, ran, table

Row = dict[str, Any]
GIB = 2**30
THROUGHPUT = "throughput_samples_per_s"


def at(
    strategy: str,
    count: int,
    frames: int = 64,
    places: int = 4096,
    status: str = "ok",
    model: str = "st-dit-xl",
    cut: int | None = None,
    measurement: dict[str, Any] | None = None,
    **model_options: Any,
) -> Row:
    """DSP trains a sample a second and GPU, another method half of one, and less if it cuts places."""
    rate = count * (1.0 if strategy == "dsp" else 0.5 if not cut else 0.25)
    axis = "tp" if strategy in ("megatron_sp", "tensor_parallel") else "dp" if strategy == "single" else "sp"
    return ran(
        status,
        measurement or {"samples_per_s": rate, "step_time_s": 1 / rate, "tokens_per_s": 1000 * rate},
        model=model,
        strategy=strategy,
        sizes={axis: count},
        batch=1,
        seq_len=frames * places,
        model_options={"temporal": frames, **model_options},
        strategy_options={} if cut is None else {"grid_dim": cut},
    )


VIDEOS = ((256, 4096), (64, 4096), (128, 4096), (128, 9216))
CUTS = [at("ulysses", n, cut=cut) for cut in (0, 1) for n in (4, 2, 8)]
TRAINED = [*CUTS, *(at("dsp", n, *video) for video in VIDEOS for n in (8, 2, 4))]
PUBLISHED = table(
    *(published(row, THROUGHPUT, 0.7) for row in CUTS),
    *(published(row, THROUGHPUT, 2.5) for row in TRAINED[6:] if row["cell"]["seq_len"] == 262144),
    *(published(row, THROUGHPUT, None, "unstated") for row in TRAINED[6:9]),
)
FORWARD = [
    *(at("single", 1, frames) for frames in (64, 128)),
    *(at(name, n, frames) for name in ("dsp", "ulysses") for frames in (64, 128) for n in (2, 4, 8)),
]
LONG = [at(name, n, 1024) for name in ("dsp", "ring_attention") for n in (8, 16, 32)]
SCALED = [
    *(at("dsp", n, 1024, model="st-dit-3b") for n in (8, 32)),
    *LONG,
    *(at("megatron_sp", n, 1024, status="unsupported" if n == 32 else "ok") for n in (8, 16, 32)),
    at("dsp", 16, 512),
    at("dsp", 64, 2048),
]


def held(strategy: str, gib: float, recomputed: bool, status: str = "ok") -> Row:
    peak = {"peak_memory_bytes": gib * GIB}
    return at(strategy, 8, 128, status=status, measurement=peak, checkpointing=recomputed)


MEMORY = [
    *(held(name, gib, True) for name, gib in (("dsp", 16), ("megatron_sp", 4), ("ulysses", 17))),
    *(held(name, 2 * gib, False) for name, gib in (("dsp", 16), ("megatron_sp", 4))),
    held("ulysses", 0, False, "oom"),
    held("ring_attention", 0, True, "failed"),
]


def formula(row: Row, claim: str, number: float, metered: float) -> dict[str, Any]:
    return {
        **published(row, "sent_elements", number),
        "claim": f"{claim}, {row['cell']['sizes']['sp']} GPUs, virtual",
        "reproduced": metered,
        "relative_error": metered / number - 1,
        "status_published": "",
    }


SENT = [at(name, n, 12, 8, model="st-dit-tiny") for name in ("dsp", "ulysses") for n in (2, 4)]
ELEMENTS = [80.0, 40.0, 160.0, 81.0]
COMPARISON = table(
    *(formula(r, f"{r['cell']['strategy']}-per-layer", 999, n) for r, n in zip(SENT, ELEMENTS, strict=True)),
    *(
        formula(r, f"{r['cell']['strategy']}-wire", n // 10 * 10, n)
        for r, n in zip(SENT, ELEMENTS, strict=True)
    ),
    *(formula(row, "dsp-wire-backward", 5, 5) for row in SENT[:2]),
)


def videos(rows: list[Row], comparison: pd.DataFrame) -> Figure:
    return drawn(dsp.draw_dsp_throughput, rows, comparison)


def test_a_panel_for_each_video_and_a_line_for_each_cut() -> None:
    figure = videos(TRAINED, PUBLISHED)
    axes = figure.axes
    assert [ax.get_title() for ax in axes] == [
        *("64 frames of 4096 places", "128 frames of 4096 places"),
        *("256 frames of 4096 places", "128 frames of 9216 places"),
    ]
    assert [ax.get_xlabel() for ax in axes] == ["", "", *["Number of GPUs"] * 2]
    assert [ax.get_ylabel() for ax in axes] == ["Samples per second", ""] * 2
    assert points(figure, f"ours {THROUGHPUT} Ulysses, frames cut") == [(2, 1), (4, 2), (8, 4)]
    assert points(figure, f"ours {THROUGHPUT} Ulysses, places cut") == [(2, 0.5), (4, 1), (8, 2)]
    dsp = artists(figure, f"ours {THROUGHPUT} DSP")
    assert [line.axes for line in dsp] == axes
    assert [label.get_text() for label in axes[-1].get_xticklabels()] == ["2", "4", "8"]
    assert legend(figure) == ["Ulysses, frames cut", "Ulysses, places cut", "DSP", "published"]


def test_cuts_that_are_drawn_one_over_the_other_are_told() -> None:
    assert not artists(videos(CUTS, PUBLISHED), "notes")
    same = [{**row, "measurement": {"samples_per_s": 1.0}} for row in CUTS]
    (notes,) = artists(videos(same, PUBLISHED), "notes")
    names = "Ulysses, frames cut and Ulysses, places cut"
    assert notes.get_text() == f"{names} are alike within 0.1%: 64 frames of 4096 places"


def test_latency_of_one_device_is_a_marker() -> None:
    figure = drawn(dsp.draw_dsp_inference, FORWARD)
    assert [ax.get_title() for ax in figure.axes] == [f"{n} frames of 4096 places" for n in (64, 128)]
    assert figure.axes[0].get_ylabel() == "Latency of 100 forwards (s)"
    for single, many in zip(
        *(artists(figure, f"ours latency_s {n}") for n in ("single", "DSP")), strict=True
    ):
        assert single.get_xydata().tolist() == [[1, 200]]
        assert single.get_marker() not in ("", "None", many.get_marker())
        assert many.get_xydata().tolist() == [[2, 50], [4, 25], [8, 12.5]]


def test_strong_and_weak_scaling() -> None:
    figure = drawn(dsp.draw_dsp_scaling, SCALED)
    strong, weak, larger, _ = figure.axes
    assert [ax.get_title() for ax in (strong, weak, larger)] == [
        *("st-dit-xl, strong:\n4096K positions", "st-dit-xl, weak:\n128K positions a GPU"),
        "st-dit-3b, strong:\n4096K positions",
    ]
    assert strong.get_ylabel() == "Tokens per second"
    lines = {line.axes: line for line in artists(figure, "ours throughput_tokens_per_s DSP")}
    assert lines[strong].get_xydata().tolist() == [[n, 1000 * n] for n in (8, 16, 32)]
    assert lines[weak].get_xydata().tolist() == [[n, 1000 * n] for n in (16, 32, 64)]
    assert lines[larger].get_xydata().tolist() == [[n, 1000 * n] for n in (8, 32)]
    # of methods whose length did not grow there is nothing to see in weak scaling
    assert [line.axes for line in artists(figure, "ours throughput_tokens_per_s ring attention")] == [strong]
    assert [mark.axes for mark in artists(figure, "ours unsupported Megatron-SP")] == [strong]
    (notes,) = artists(figure, "notes")
    assert "Megatron-SP: unsupported at 32 GPUs (reason of unsupported)" in notes.get_text()


def test_bars_of_memory_are_the_rows() -> None:
    figure = drawn(dsp.draw_dsp_memory, MEMORY)
    ax = figure.axes[0]
    assert ax.get_title() == "st-dit-xl, 128 frames of 4096 places, 8 GPUs"
    assert ax.get_ylabel() == "Peak memory (GiB)"
    kept, recomputed = [label.get_text() for label in ax.get_xticklabels()]
    assert (kept, recomputed) == ("kept for backward", "recomputed in backward")
    expected = {kept: {"DSP": 32, "Megatron-SP": 8}, recomputed: {"DSP": 16, "Megatron-SP": 4, "Ulysses": 17}}
    for place, (setting, heights) in enumerate(expected.items()):
        for name, height in heights.items():
            (bar,) = artists(figure, f"memory {setting} {name}")
            assert bar.get_height() == height
            assert abs(bar.get_x() + bar.get_width() / 2 - place) < 0.45
    (lost,) = artists(figure, f"memory {kept} Ulysses")
    assert_below_zero(lost)
    assert legend(figure)[-2:] == ["out of memory", "failed"]
    (notes,) = artists(figure, "notes")
    assert notes.get_text().endswith(f"ring attention, {recomputed}: failed (reason of failed)")


def test_metered_elements_beside_the_exact_formulas() -> None:
    figure = drawn(dsp.draw_dsp_communication, SENT, COMPARISON)
    ax = figure.axes[0]
    assert (ax.get_title(), ax.get_xlabel()) == ("st-dit-tiny, 12 frames of 8 places", "Number of GPUs")
    assert points(figure, "ours sent_elements DSP") == [(2, 80), (4, 40)]
    assert points(figure, "ours sent_elements Ulysses") == [(2, 160), (4, 81)]
    # neither as the paper counts, nor backward
    assert points(figure, "published sent_elements DSP") == [(2, 80), (4, 40)]
    assert points(figure, "published sent_elements Ulysses") == [(2, 160), (4, 80)]
    assert legend(figure) == ["Ulysses", "DSP", "formula"]
    (notes,) = artists(figure, "notes")
    assert notes.get_text() == "engine virtual: metered as by the formula in 3 of 4 cells"
