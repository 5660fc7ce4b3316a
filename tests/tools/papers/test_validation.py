"""The tables of pages: errors by who measured, errors of all results, and the ladder of longest sequences."""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.tools.papers import validation
from spbench.bench.tools.papers.comparison import frame_of, joined, read_comparisons
from spbench.bench.tools.papers.sources import MEASURED, measured_sources, papers, published_file

ROOT = Path(__file__).parents[3]
FILES = ROOT / "results" / "reproduction"
B200 = "megatron_b200_llama3.csv"


def record(
    source: str, quantity: str, error: float | None, role: str = "predicted", **other: Any
) -> dict[str, Any]:
    """A line of measured.csv, of a cell and row of its own unless given."""
    return {
        "table": f"t: {source}",
        "cell": source,
        "quantity": quantity,
        "published": 10.0,
        "reproduced": None if error is None else 10 * (1 + error),
        "relative_error": error,
        "status_published": "ok",
        "status_reproduced": "ok",
        "role": role,
        "source": source,
        **other,
    }


def test_errors_are_counted_by_source_and_quantity() -> None:
    records = [
        record(f"{B200}:1:peak:0", "peak_memory_gib", 0.001, "inferred"),
        record(f"{B200}:1:peak:1", "peak_memory_gib", -0.004, "inferred"),
        record(f"{B200}:2:peak:0", "peak_memory_gib", None, "inferred"),
        record(f"{B200}:2:real_ms", "step_time_ms", -0.05),
        # the same number in a second variant counts once
        record(f"{B200}:2:real_ms", "step_time_ms", 0.5),
        record("megatron_lm_goldens.csv:4:iter_s", "step_time_ms", 0.2, "calibrated"),
    ]
    goldens, memory, time, *others = validation.validation_lines(frame_of(records))
    assert list(goldens.values()) == [
        *("Megatron-LM's functional tests, 8 A100, H100 or GB200", "step time", 1),
        *("20.0%", "20.0%", "1 calibrated", ""),
    ]
    assert list(memory.values())[1:6] == ["peak memory", 2, "0.25%", "0.4%", "3 inferred"]
    assert list(time.values())[1:6] == ["step time", 1, "5.0%", "5.0%", "1 predicted"]
    assert memory["other predictors"] == "SimuMax 0.31%, worst 0.42%"
    assert time["other predictors"] == "SimuMax 4.6%, worst 11.4%"
    assert [(*line.values(),)[1:] for line in others] == [
        ("peak memory", "", "", "", "", "SimuMax, as it states: mean 0.46%, worst 1.4%"),
        ("step time", "", "", "", "", "SimuMax, as it states: mean 5.6%, worst 13.5%"),
        ("step time", "", "", "", "", "Phantora, as it states: mean 3% to 7%"),
        ("step time", "", "", "", "", "vTrain, as it states: mean 14.7%"),
    ]
    line, *_ = validation.validation_lines(frame_of([record(f"{B200}:2:real_ms", "step_time_ms", None)]))
    assert list(line.values())[1:6] == ["step time", 0, "", "", "1 predicted"]


def test_what_simumax_says_of_the_same_rows_is_computed() -> None:
    others = published_file(validation.PREDICTORS_FILE).rows
    memory, time = (validation.predictor_errors(other) for other in others if other["file"] == B200)
    assert len(time) == len(memory) == 12
    # 828.76 ms for 843.0, 66.44 GiB for 66.55
    assert time[0] == pytest.approx(1 - 828.76 / 843.0)
    assert memory[0] == pytest.approx(1 - 66.44 / 66.55)


def test_every_file_of_measurements_has_its_source() -> None:
    files = {path.name for path in (ROOT / "results" / "measured").glob("*_*.csv")} - {"other_predictors.csv"}
    assert files == {source.file for source in measured_sources()}
    readme = (ROOT / "results" / "measured" / "README.md").read_text()
    for source in measured_sources():
        assert source.commit in readme
        _, columns, rows = published_file(source.file)
        assert rows
        about = readme.partition(f"## {source.file}")[2].partition("\n## ")[0]
        assert [name for name in columns if name not in about] == []
    assert MEASURED in papers()


# -- how far to trust a number -------------------------------------------------------------------------------


def test_formulas_by_a_papers_convention_are_not_counted_as_sent_bytes() -> None:
    """LASP's Table 1 counts other methods by a convention of its own, and is 800% off."""
    (line,) = (line for line in validation.trust_lines(FILES) if line["quantity"].startswith("bytes sent"))
    assert (line["worst"], line["role"]) == ("0%", f"{line['numbers']} formula")
    records = joined(read_comparisons(FILES / f"{paper}.csv") for paper in ("rsa", "lasp", "dsp"))
    assert 0 < line["numbers"] < (records["role"] == "formula").sum()


# -- the ladder ----------------------------------------------------------------------------------------------

FIELD = FILES / "field.csv"
ALST = {"quantity": "tokens", "published": 1.1e6, "reproduced": 1179648.0}


def price(name: str, ratio: float | None) -> dict[str, Any]:
    return {"table": f"{name}: ulysses sp8", "quantity": "ratio", "reproduced": ratio}


def test_a_line_for_each_rung_with_what_its_switch_costs() -> None:
    prices = [
        price("H100, gpus 8, loss + Ulysses over loss, 8 x 128K", 1.0137),
        price("H100, gpus 8, loss + Ulysses over loss, 1M", 0.995),
        price("H100, gpus 8, loss + Ulysses over loss, 2M", None),
        price("H100, gpus 1, all over none, 32K", 1.81),
    ]
    tables = ("alst: H100, gpus 8, loss", "alst: H100, gpus 8, loss + Ulysses", "other: H100, gpus 8, loss")
    assert validation.ladder_lines(frame_of([*prices, *({**ALST, "table": table} for table in tables)])) == [
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
    records = read_comparisons(FIELD).query("scenario == 'max_seqlen_today'")
    ratios = records[records["quantity"] == "ratio"]
    shown = [line["step"] for line in validation.ladder_lines(records)]
    assert len(ratios) == sum(text.count("%") for text in shown) == 8
