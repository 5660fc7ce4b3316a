"""The figure of elements sent by sequence length: lines are metered, markers the formulas."""

from typing import Any

import pandas as pd

from spbench.plots.lasp import draw_lasp_communication
from tests.plots.drawn import artists, drawn, legend, points
from tests.plots.rows import ran, table

Row = dict[str, Any]
LENGTHS = [2048, 65536]
STATE = 131072.0


def at(strategy: str, length: int, count: int = 8, engine: str = "virtual") -> Row:
    return ran(
        model="linear-transformer-0.4b",
        strategy=strategy,
        sizes={"sp": count},
        batch=1,
        seq_len=length,
        engine=engine,
        model_options={"layers": 2},
    )


def formula(row: Row, claim: str, number: float, metered: float | None) -> dict[str, Any]:
    engine, count = row["cell"]["engine"], row["cell"]["sizes"]["sp"]
    return {
        "claim": f"{claim}, {count} GPUs, {engine}",
        "cell": row["key"],
        "strategy": row["cell"]["strategy"],
        "quantity": "sent_elements",
        "published": number,
        "reproduced": metered,
        "relative_error": None if metered is None else metered / number - 1,
        "status_published": "",
    }


LASP = [at("lasp", n) for n in LENGTHS]
RING = [at("ring_attention", n) for n in LENGTHS]
SMALL = [at("lasp", 96, 2, engine) for engine in ("virtual", "distributed")]
COMPARISON = table(
    *(formula(row, "lasp-table1", STATE, STATE) for row in [*LASP, *SMALL]),
    *(formula(row, "ring-attention-table1", 7.0, 14.0 * n) for row, n in zip(RING, LENGTHS, strict=True)),
    *(formula(r, "ring-attention-wire", 14.0 * n, 14.0 * n) for r, n in zip(RING, LENGTHS, strict=True)),
    {**formula(LASP[0], "closed form of lasp", 1.0, 1.0), "quantity": "sent_bytes"},
)


def test_lasp_does_not_grow_and_the_formula_is_what_is_metered() -> None:
    figure = drawn(draw_lasp_communication, [*RING, *LASP, *SMALL], COMPARISON)
    (ax,) = figure.axes[:-1]
    assert ax.get_title() == "linear-transformer-0.4b, 8 GPUs"
    assert points(figure, "ours sent_elements LASP") == [(n, STATE) for n in LENGTHS]
    assert points(figure, "ours sent_elements ring attention") == [(n, 14 * n) for n in LENGTHS]
    # the exact count, not the paper's
    assert points(figure, "published sent_elements ring attention") == [(n, 14 * n) for n in LENGTHS]
    assert points(figure, "published sent_elements LASP") == [(n, STATE) for n in LENGTHS]
    assert legend(figure) == ["ring attention", "LASP", "formula"]


def test_other_counts_than_the_formulas_are_told() -> None:
    (notes,) = artists(drawn(draw_lasp_communication, [*LASP, *SMALL, *RING], COMPARISON), "notes")
    assert notes.get_text().splitlines() == [
        "engine virtual: metered as by the formula in 5 of 5 cells",
        "engine distributed: metered as by the formula in 1 of 1 cells",
    ]
    wrong = pd.concat([COMPARISON, table(formula(at("lasp2", 96), "lasp2-wire", 10.0, 20.0))])
    (notes,) = artists(drawn(draw_lasp_communication, LASP, wrong), "notes")
    assert "engine virtual: metered as by the formula in 5 of 6 cells" in notes.get_text()


def test_what_is_sent_is_known_of_runs_out_of_memory() -> None:
    figure = drawn(draw_lasp_communication, [LASP[0], {**LASP[1], "status": "oom"}], COMPARISON)
    assert points(figure, "ours sent_elements LASP") == [(n, STATE) for n in LENGTHS]
    assert [x for x, _ in points(figure, "ours oom LASP")] == [LENGTHS[1]]


def test_rows_that_did_not_run_have_no_number() -> None:
    lost = table(*(formula(row, "lasp-table1", STATE, None) for row in LASP))
    figure = drawn(draw_lasp_communication, LASP, lost)
    assert points(figure, "ours sent_elements LASP") == []
    assert points(figure, "published sent_elements LASP") == [(n, STATE) for n in LENGTHS]
