"""What is drawn is what rows and published numbers say: for each figure the points and bars by their ids, the
legend, titles, axes and notes."""

import numpy as np
import pytest
from matplotlib.figure import Figure
from pandas import read_csv

from spbench.plots import measured
from spbench.plots.claims import claims_of, legend_entries
from spbench.plots.convergence import draw as draw_convergence
from tests.docs.blocks import ROOT
from tests.plots.cases_of_sizes import BARS, LARGEST
from tests.plots.cases_over_gpus import OVER_GPUS, OVER_LENGTHS
from tests.plots.figure_cases import RSA, Case, Row
from tests.plots.rows import artists, below_zero, compared, data, drawn, legend, notes, ran, table


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
    "curves and deviations from one device": Case(
        draw_convergence,
        CURVES,
        data={"deviation language LASP on 4 ranks, fp32": [DEVIATIONS]},
        absent=["deviation language one device, fp32"],
        legend=["one device, fp32", "LASP on 4 ranks, fp32", "one device, fp64"],
    ),
    "another device takes the place of one without losses": Case(
        draw_convergence,
        [{**CURVES[0], "status": "failed", "reason": "a reason", "measurement": {}}, *CURVES[1:]],
        absent=["deviation language one device, fp64"],
        notes=["TransNormerLLM mini, one device, fp32: failed (a reason)"],
    ),
    "many backends": Case(
        draw_convergence,
        [*(learned("lasp", 1e-7 * n, backend=name) for n, name in enumerate(BACKENDS)), *CURVES[::2]],
        data={f"language LASP on 4 ranks, fp32, {name}": [...] for name in BACKENDS.values()},
    ),
    "measured and ours by source and role": Case(
        measured.draw,
        [],
        REAL,
        titles=["Peak memory (GiB)", "Step time (ms)"],
        data={
            "reproduced b200 inferred": [[(40.0, 40.1), (60.0, 59.7)]],
            "reproduced goldens predicted": [[(100.0, 60.0)]],
            "relative_error b200 calibrated": [[(800.0, 840 / 800 - 1)]],
        },
        notes=["1 measured numbers have no number of ours"],
    ),
    "a panel a source of published times": Case(
        measured.draw_field,
        [],
        TIMED,
        titles=["USP: 10.0%", "a layer: 1.0%"],
        data={"reproduced a-layer inferred": [[(19.6, 19.8)]]},
    ),
}

CASES = {**OVER_LENGTHS, **OVER_GPUS, **LARGEST, **BARS, **OTHERS}


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
            each is ... or np.allclose(one, each) for one, each in zip(shown, expected, strict=True)
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
