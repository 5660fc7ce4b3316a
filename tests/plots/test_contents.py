"""What is drawn is what rows and published numbers say: for each figure the points and bars by their ids, the
legend, titles, axes and notes.
Figures of other things than rows (rates, answers of advice), files, and figures of nothing."""

import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from pandas import read_csv

from spbench.plots import NothingToDraw, measured
from spbench.plots.claims import claims_of, legend_entries
from spbench.plots.convergence import draw as draw_convergence
from spbench.plots.fit_and_advise import advice_map, draw_advice
from spbench.plots.grid import Drawing
from spbench.plots.largest import draw_max_seqlen
from spbench.plots.methods import draw as draw_methods
from spbench.plots.paper import COLUMN_INCHES, PAGE_INCHES, save_as
from spbench.plots.rates import cluster_rates, draw_machine_rates, machine_rates
from spbench.plots.series import differing_settings
from spbench.plots.splits import split_names
from spbench.plots.style import TIMES, strategy_name
from tests.docs.blocks import ROOT
from tests.plots.cases_over_gpus import BARS, LARGEST, OVER_GPUS, OVER_LENGTHS
from tests.plots.figure_cases import RSA, Case, Row
from tests.plots.rows import (
    artists,
    assert_nothing_overlaps,
    assert_valid,
    below_zero,
    compared,
    data,
    drawn,
    legend,
    notes,
    ran,
    searched,
    table,
)


def learned(strategy: str, off: float, precision: str = "fp32", backend: str = "legacy_ddp") -> Row:
    losses = [{"step": step, "language": 7 / step * (1 + off * (step - 1))} for step in range(1, 40)]
    cell = {"model": "tnl-mini", "strategy": strategy, "sizes": {"sp": 4 if strategy == "lasp" else 1}}
    return ran("ok", {"losses": losses}, precision=precision, training={"backend": backend}, **cell)


CURVES = [learned("single", 0), learned("lasp", 1e-4), learned("single", 1e-8, "fp64")]
DEVIATIONS = [(1, 1e-9), *((n, 1e-4 * (n - 1)) for n in range(2, 40))]
ROLES = [(4, "predicted"), (8, "inferred"), (16, "calibrated")]
BACKENDS = {"ddp": "DDP", "fsdp_flat": "FSDP", "zero1": "ZeRO-1", "zero2": "ZeRO-2", "zero3": "ZeRO-3"}


def real(name: str, quantity: str, number: float, ours: float | None, role: str, **other: str) -> Row:
    error = None if ours is None else ours / number - 1
    numbers = {"published": number, "reproduced": ours, "relative_error": error}
    return {"table": name, "quantity": quantity, **numbers, "role": role, **other}


REAL = table(
    real("b200: case, rank 0", "peak_memory_gib", 40.0, 40.1, "inferred"),
    real("b200: case, rank 1", "peak_memory_gib", 60.0, 59.7, "inferred"),
    real("b200: case", "step_time_ms", 800.0, 840.0, "calibrated"),
    real("goldens: case, dev", "step_time_ms", 90.0, None, "predicted"),
    real("goldens: case, lts", "step_time_ms", 100.0, 60.0, "predicted"),
)
TIMED = table(
    real(
        "usp: case, tp 8", "step_time_ms", 5000.0, 4500.0, "predicted", scenario="usp", status_published="ok"
    ),
    real("full", "step_time_s", 19.6, 19.8, "inferred", scenario="a_layer", status_published=""),
)

OTHERS = {
    "curves and deviations from one device": (draw_convergence, CURVES),
    "another device takes the place of one without losses": (
        draw_convergence,
        [{**CURVES[0], "status": "failed", "reason": "a reason", "measurement": {}}, *CURVES[1:]],
    ),
    "many backends": (
        draw_convergence,
        [*(learned("lasp", 1e-7 * n, backend=name) for n, name in enumerate(BACKENDS)), *CURVES[::2]],
    ),
    "measured and ours by source and role": (measured.draw, [], REAL),
    "a panel a source of published times": (measured.draw_field, [], TIMED),
}

#: what is drawn of each
EXPECTED = yaml.load(Path(__file__).with_name("figures.yaml").read_text(), yaml.CSafeLoader)
CASES = {
    name: Case(*rows, **EXPECTED[name])
    for name, rows in {**OVER_LENGTHS, **OVER_GPUS, **LARGEST, **BARS, **OTHERS}.items()
}


def texts(figure: Figure, read: str) -> list[str]:
    return [str(getattr(ax, read)()) for ax in figure.axes if ax.axison]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_a_figure_shows_its_rows(case: Case) -> None:
    figure = drawn(case.draw, case.rows, case.comparison)
    assert texts(figure, "get_title")[: len(case.titles)] == list(case.titles)
    assert texts(figure, "get_ylabel")[: len(case.axes)] == list(case.axes)
    for gid, expected in case.data.items():
        shown = data(figure, gid)
        assert len(shown) == len(expected), gid
        assert all(
            each == "..." or np.allclose(one, each) for one, each in zip(shown, expected, strict=True)
        ), gid
    for gid, place in case.marks.items():
        assert artists(figure, gid), gid
        for mark in artists(figure, gid):
            assert below_zero(mark), gid
            assert place in (None, *mark.get_xdata())
    for gid in case.absent:
        assert not artists(figure, gid), gid
    if case.legend is not None:
        assert legend(figure) == list(case.legend)
    if case.notes is not None:
        assert bool(notes(figure)) == bool(case.notes)
        assert not [note for note in case.notes if note not in " ".join(notes(figure).split())]


def test_a_legend_of_claims_names_every_marker() -> None:
    """A black marker stands for a prediction; only where all do, it goes without a name."""
    claims = [{**compared(f"c{n}", 2.0, 2.2, f"bert-base/{RSA}/sp{n}"), "role": role} for n, role in ROLES]
    entries = {
        len(some): [str(line.get_label()) for line in legend_entries(claims_of(table(*some)))]
        for some in (claims, claims[:1])
    }
    assert entries == {
        3: ["predicted", "calibrated on this value", "a setting was inferred from this value"],
        1: [],
    }


def test_every_table_of_measurements_has_a_name_for_people() -> None:
    field, others = (
        read_csv(ROOT / f"results/reproduction/{name}.csv", keep_default_na=False)
        for name in ("field", "measured")
    )
    sources = {*measured.field_sources(field), *others["table"].str.partition(": ")[0]}
    assert len(sources) > 20
    assert sources - measured.titles().keys() == set()


@pytest.mark.parametrize("values", [[14.7, 14.9], [13.2, 12.2], [40.0, 900.0], [30.0, 6e4]])
def test_a_logarithmic_axis_has_two_ticks_or_more(values: list[float]) -> None:
    low, high, ticks = measured.logarithmic_ticks(values)
    assert 2 <= len(ticks) <= 6
    assert all(low <= tick <= high for tick in ticks)


# -- rates -----------------------------------------------------------------------------------------------


def curve(along: str, panel: str, name: str, *rates: float, **measured: float) -> dict[str, Any]:
    sizes = [2 ** (20 + n) for n in range(len(rates))]
    points = {int(size[1:]): rate for size, rate in measured.items()}
    about = {"along": along, "panel": panel, "name": name}
    return {**about, "sizes": sizes, "rates": rates, "measured": points}


CURVES_OUTPUTS = [
    curve("size", "Matmuls", "bf16", 1e12, 3e12, _1048576=2e12),
    curve("message", "Within a node", "all_reduce", 1e9, 2e9),
    curve("message", "Within a node", "all_gather", 1e9, 2e9),
    curve("message", "Within a node", "send", 4e9, 5e9),
]


@pytest.mark.parametrize("width", [PAGE_INCHES, COLUMN_INCHES])
def test_rates_of_a_cluster_that_are_the_same_are_one_line(width: float) -> None:
    figure = cluster_rates(CURVES_OUTPUTS, "A cluster").draw(width)
    assert_nothing_overlaps(figure)
    assert [ax.get_title() for ax in figure.axes if ax.get_title()] == ["Matmuls", "Within a node"]
    for gid, points in {
        "Matmuls bf16": [[2**20, 1], [2**21, 3]],
        "measured Matmuls bf16": [[2**20, 2]],
        "Within a node all-reduce, all-gather": [[2**20, 1], [2**21, 2]],
        "Within a node send": [[2**20, 4], [2**21, 5]],
    }.items():
        assert data(figure, gid) == [points]


def rate(operation: str, extent: int, **fields: Any) -> dict[str, Any]:
    """Three samples, from half to twice the seconds."""
    empty = {"flops_per_s": None, "bytes_per_s": None, "bus_bytes_per_s": None, "size": f"{extent} B"}
    bounds = {"seconds": 2.0, "least_s": 1.0, "most_s": 4.0}
    about = {"operation": operation, "extent": extent, "precision": "fp32", "ranks": 8}
    return {**about, **empty, **bounds, **fields}


RATES = [
    rate("matmul", 256, size="[256, 256] x [256, 256]", flops_per_s=3e12),
    rate("matmul", 128, size="[128, 128] x [128, 128]", flops_per_s=1e12),
    rate("matmul", 128, size="[512, 128] x [128, 512]", flops_per_s=2e12),
    rate("attention forward and backward", 1024, flops_per_s=1.5e12, precision="bf16"),
    rate("sum", 2**20, bytes_per_s=1e12),
    *(rate("all_reduce", 2**n, bytes_per_s=2.0**n, bus_bytes_per_s=3.5 * 2**n) for n in (10, 20, 30)),
]


def test_each_kind_of_a_machines_rates_has_a_panel(tmp_path: Path) -> None:
    figure = machine_rates(RATES, "A machine").draw()
    assert_nothing_overlaps(figure)
    titles = ["Matmuls", "Attention", "Sum of two tensors", "Collectives on 8 ranks"]
    assert [ax.get_title() for ax in figure.axes] == titles
    assert figure.axes[0].get_ylabel() == "TFLOP/s"
    for gid, points in {
        "Matmuls fp32, [s, s] x [s, s]": [[128, 1], [256, 3]],
        "Matmuls fp32, [4s, s] x [s, 4s]": [[128, 2]],
        "Attention bf16, forward and backward": [[1024, 1.5]],
        "Sum of two tensors": [[2**20, 1000]],
        "Collectives on 8 ranks all_reduce": [[2**n, 3.5 * 2**n / 1e9] for n in (10, 20, 30)],
    }.items():
        assert data(figure, gid) == [points]
    assert [text.get_text() for text in figure.axes[3].get_xticklabels()] == ["1 KiB", "1 MiB", "1 GiB"]
    assert [ax.get_title() for ax in machine_rates(RATES[:5], "A device").draw().axes] == titles[:3]
    assert_valid(draw_machine_rates(RATES, "A machine", tmp_path / "here.yaml"), tmp_path, "here")


# -- the map of advice -----------------------------------------------------------------------------------

LONGEST = "tensor_parallel+ulysses+ring_attention"
MESHES = {"single": "dp8", "ulysses": "dp16xsp8", LONGEST: "dp2xpp4xcp4xtp8xsp8"}


def points(gpus: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    """A winner for each pair, of the three in turn; nothing fits at the longest on the fewest GPUs."""
    answers = []
    for at, (n, length) in enumerate(itertools.product(gpus, lengths)):
        strategy = "" if (n, length) == (gpus[0], lengths[-1]) else [*MESHES][at % 3]
        question = {"model": "llama3-8b", "cluster": "dgx-h100", "figures": "", "gpus": n, "seq_len": length}
        answer = {"strategy": strategy, "mesh": MESHES.get(strategy, ""), "tie": at % 4 == 0}
        answers.append({**question, **answer})
    return answers


@pytest.mark.parametrize("lengths", [[8192, 131072], [2**k for k in range(13, 23)], [1000]])
def test_each_pair_has_a_field_that_can_be_read(lengths: list[int]) -> None:
    asked = points([8, 64, 512], lengths)
    figure = advice_map(asked)
    assert_nothing_overlaps(figure)
    (ax,) = figure.axes
    fields = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    assert len(fields) == len(asked)
    assert [bool(field.get_hatch()) for field in fields] == [point["tie"] for point in asked]
    texts = [text.get_text() for text in ax.texts]
    assert texts.count("-") == 1
    assert "dp2xpp4\ncp4xtp8\nsp8" in texts
    named = {strategy_name(point["strategy"]) for point in asked if point["strategy"]}
    assert {*legend(figure)} == named | {"tie with another strategy", "nothing fits"}
    colors = {(point["strategy"], field.get_facecolor()) for point, field in zip(asked, fields, strict=True)}
    assert len(colors) == len(named) + 1
    assert ax.get_xticklabels()[0].get_text() in ("8K", "1000")


def test_a_file_of_advice_is_of_the_type_that_its_name_says(tmp_path: Path) -> None:
    asked = points([8, 64], [8192])
    assert draw_advice(asked, tmp_path / "new.svg").read_text().startswith("<?xml")
    with pytest.raises(ValueError, match="gif"):
        draw_advice(asked, tmp_path / "new.gif")


# -- names -----------------------------------------------------------------------------------------------


def test_a_full_disk_is_said_with_the_files_name(tmp_path: Path) -> None:
    (tmp_path / "m.svg").symlink_to("/dev/full")
    with pytest.raises(OSError, match=r"No space left on device: '.*m\.svg'"):
        save_as(Figure(), tmp_path / "m.svg")
    assert Path("/dev/full").exists()


def test_a_split_is_named_by_its_mesh_and_by_what_tells_it_apart() -> None:
    def split(strategy: str, sizes: dict[str, int], **cell: Any) -> dict[str, Any]:
        return ran(strategy=strategy, sizes=sizes, model="bert-large", batch=64, seq_len=2048, **cell)

    nested, rsa, both = "megatron_sp+ring_self_attention", "ring_self_attention", {"dp": 2, "sp": 4}
    rows = [split(nested, {"tp": 4, "sp": 16}), split(nested, {"tp": 4, "sp": 16}, mesh=["sp", "tp"])]
    assert split_names(rows) == [
        f"{sizes}, Megatron-SP + RSA" for sizes in (f"tp 4 {TIMES} sp 16", f"sp 16 {TIMES} tp 4")
    ]
    rows = [
        split(rsa, both, training={"backend": "zero1"}),
        split(rsa, both, training={"backend": "zero1", "micro_batches": 4}),
        split(rsa, both, training={"backend": "zero3"}, model_options={"checkpointing": True}),
    ]
    assert split_names(rows) == [
        f"dp 2 {TIMES} sp 4, RSA, {text}" for text in ("ZeRO-1", "4 micro-batches", "ZeRO-3, recomputed")
    ]


def test_orders_of_the_mesh_are_told_apart() -> None:
    rows = [searched("ring_self_attention", 8, 1000) for _ in range(2)]
    for row, mesh in zip(rows, (None, ["sp", "dp"]), strict=True):
        row["cell"] |= {"sizes": {"dp": 2, "sp": 8}, "mesh": mesh}
    text = differing_settings(rows)
    assert [text(row) for row in rows] == ["mesh default", "mesh sp dp"]


# -- files -----------------------------------------------------------------------------------------------

SEARCHES = [searched("tensor_parallel", n, 100 * n) for n in (4, 8)]


@pytest.mark.slow
def test_files_are_the_same_each_time_and_from_a_csv_file(tmp_path: Path) -> None:
    claims = table(compared("a ratio", 2.0, 2.0, SEARCHES[1]["key"], SEARCHES[0]["key"]))
    claims.to_csv(tmp_path / "comparison.csv", index=False)
    first, second = (
        draw_max_seqlen(SEARCHES, comparison, tmp_path / folder)
        for folder, comparison in (("a", claims), ("b", pd.read_csv(tmp_path / "comparison.csv")))
    )
    assert_valid(first, tmp_path / "a", "max_seqlen")
    for one, other in zip(first, second, strict=True):
        assert one.read_bytes() == other.read_bytes()
    assert b"<dc:date>" not in first[1].read_bytes()


@pytest.mark.parametrize("scenario", ["A scenario", {"title": "A scenario"}])
def test_the_scenarios_title_stands_above(scenario: object) -> None:
    rows = [{**row, "scenario": scenario} for row in SEARCHES]
    title = draw_max_seqlen.figure(rows, pd.DataFrame()).get_suptitle().replace("\n", " ")
    assert title == "A scenario (piz-daint-p100, fp16, first-steps, virtual ranks)"


@pytest.mark.parametrize(
    ("figure", "rows", "of"),
    [
        (draw_max_seqlen, [], "searches for the largest seq_len"),
        (draw_methods, SEARCHES, "measurements at a given sequence length"),
    ],
)
def test_a_figure_of_nothing_is_an_error_without_files(
    tmp_path: Path, figure: Drawing, rows: list[dict[str, Any]], of: str
) -> None:
    with pytest.raises(NothingToDraw, match=f"no cell here has what it shows: {of}"):
        figure(rows, pd.DataFrame(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_drawing_needs_neither_torch_nor_the_harness() -> None:
    code = (
        "import sys\n"
        "from spbench.plots import communication, dsp, largest, lasp, rsa, splits\n"
        "print([name for name in ('torch', 'spbench.bench') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
