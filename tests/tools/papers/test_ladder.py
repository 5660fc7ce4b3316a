"""The table of the longest sequences: its prices are those of the committed steps."""

from pathlib import Path
from typing import Any

from spbench.bench.tools.papers.comparison import read_records
from spbench.bench.tools.papers.validation import ladder_lines

FIELD = Path(__file__).parents[3] / "results" / "reproduction" / "field.csv"
ALST = {"quantity": "tokens", "published": 1.1e6, "reproduced": 1179648.0}


def price(name: str, ratio: float | None) -> dict[str, Any]:
    return {"table": f"{name}: ulysses sp8", "quantity": "ratio", "published": None, "reproduced": ratio}


def test_a_line_for_each_rung_with_what_its_switch_costs() -> None:
    prices = [
        price("H100, gpus 8, loss + Ulysses over loss, 8 x 128K", 1.0137),
        price("H100, gpus 8, loss + Ulysses over loss, 1M", 0.995),
        price("H100, gpus 8, loss + Ulysses over loss, 2M", None),
        price("H100, gpus 1, all over none, 32K", 1.81),
    ]
    rungs = [{**ALST, "table": f"alst: H100, gpus 8, {rung}"} for rung in ("loss", "loss + Ulysses")]
    assert ladder_lines([*prices, *rungs, {**ALST, "table": "other: H100, gpus 8, loss"}]) == [
        {
            "on": "H100, 8",
            "switches": "loss",
            "longest, published": "1,100,000",
            "ours": "1,179,648",
            "step": "",
        },
        {
            "on": "H100, 8",
            "switches": "loss + Ulysses",
            "longest, published": "1,100,000",
            "ours": "1,179,648",
            "step": "+1.4% (8 x 128K), -0.5% (1M) over loss",
        },
    ]


def test_every_price_of_the_scenario_stands_in_the_table() -> None:
    """A ratio whose name is no rung's would be left out."""
    records = [r for r in read_records(FIELD) if r["scenario"] == "max_seqlen_today"]
    ratios = [r for r in records if r["quantity"] == "ratio"]
    shown = [line["step"] for line in ladder_lines(records)]
    assert len(ratios) == sum(text.count("%") for text in shown) == 8


def test_the_page_on_long_contexts_has_these_prices() -> None:
    page = (FIELD.parents[2] / "docs" / "long_context.md").read_text()
    table = page[page.index("## What the switches save, and cost") :].split("\n\n")[2]
    ratios = [r for r in read_records(FIELD) if r["quantity"] == "ratio" and "gpus 8" in r["table"]]
    lines = [line.split(" | ") for line in table.splitlines()[3:]]
    for column, step in ((-2, "8 x 128K"), (-1, "1M")):
        shown = [line[column].split()[0] for line in lines if line[column].startswith("+")]
        assert shown == [f"{r['reproduced'] - 1:+.1%}" for r in ratios if f", {step}:" in r["table"]]
