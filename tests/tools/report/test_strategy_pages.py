"""The pages of strategies: what is drawn and listed is what was simulated, metered and verified."""

import copy
import dataclasses
import gzip
import re
from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.run_cell import measure
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.sweep.results import read_rows
from spbench.bench.measure.sweep.sweep import as_row, digest
from spbench.bench.tools.papers.reproductions import read_trace, write_kept
from spbench.bench.tools.report.drawings import bars_of, layer_figure, layer_table, messages
from spbench.bench.tools.report.gathered import CellResult, Gathered
from spbench.bench.tools.report.page import docstring, html_of
from spbench.bench.tools.report.pages import strategies_page as pages_of_strategies
from spbench.bench.tools.report.pages.strategies_page import (
    formula_lines,
    memory_lines,
    scenario_lines,
    verdict_lines,
)
from spbench.bench.verdicts import kept_verdicts, verified_code
from tests.cells import make_cell
from tests.tools.commands.test_list import GREEN, MADE, RED

FIELDS = {"model_options": {"layers": 1}, "cluster": "dgx-a100-datasheet"}
LASP = make_cell("tnl-tiny", "lasp", {"sp": 4}, 4, 96, **FIELDS)


def kept_rows(results: Path) -> list[dict[str, Any]]:
    """The rows that are kept below a folder of results."""
    return read_rows(results / "reproduction" / "strategies" / "side_by_side" / "cells.jsonl")[0]


def page_of(
    results: Path, *cells: CellResult, rows: list[dict[str, Any]] | None = None, name: str = "strategy-lasp"
) -> str:
    """One of the pages of strategies as HTML."""
    shown = kept_rows(results) if rows is None else rows
    gathered = Gathered(results, results / "baseline", None, [], cells, shown)
    (page,) = (each for each in pages_of_strategies.pages(gathered) if each.path == f"{name}.html")
    return str(page.rendered()[page.path])


@pytest.fixture(scope="module")
def layer(kept: Path) -> Mapping[str, Any]:
    """A step of one layer of LASP, of which ranks differ and wait for each other."""
    trace = read_trace(kept / "reproduction" / "strategies", LASP)
    assert trace is not None
    return trace


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Results with rows and a trace of LASP alone."""
    results = tmp_path_factory.mktemp("kept")
    row = row_of(LASP)
    write_kept({"side_by_side": [row], "layers": [row]}, results / "reproduction" / "strategies")
    return results


def row_of(cell: Cell) -> dict[str, Any]:
    """The row of a cell as it is kept."""
    row = as_row(cell, measure(VirtualEngine().measure, cell))
    return row | {"digest": digest(cell), "time": "2026-01-02T03:04:05", "provenance": {"commit": "abc"}}


# -- the drawing -----------------------------------------------------------------------------------------


def test_bars_of_a_rank_add_up_to_what_the_simulator_says_of_it(layer: Mapping[str, Any]) -> None:
    bars = bars_of(layer)
    for rank in range(4):
        spent: Counter[str] = Counter()
        for bar in bars:
            if bar["rank"] == rank:
                of = "wait" if bar["kind"] == "wait" else "compute" if bar["lane"] == 0 else "network"
                spent[of] += bar["duration"]
        told = {name: seconds * 1e3 for name, seconds in layer["otherData"]["by_rank"][rank].items()}
        assert spent["compute"] == pytest.approx(told["compute_s"], rel=1e-7)
        end = max(bar["end"] for bar in bars if bar["rank"] == rank and bar["lane"] == 0)
        waits = (
            told["exposed_communication_s"]
            + told["bubble_s"]
            - (layer["otherData"]["step_time_s"] * 1e3 - end)
        )
        assert spent["wait"] == pytest.approx(waits, abs=1e-5)
        assert spent["network"] > 0


def test_the_page_of_a_ring_shows_a_staircase_and_level_bars(tmp_path: Path) -> None:
    """Contiguous, each rank has a block more to attend to than the one before; zigzag all have as much."""
    folder = tmp_path / "reproduction" / "strategies"
    changes = {"model": "causal-transformer-tiny", "strategy": "ring_attention", "seq_len": 2**15}
    ring = LASP.model_copy(update=changes)
    zigzag = ring.model_copy(update={"strategy_options": {"placement": "zigzag"}})
    rows = [row_of(ring), row_of(zigzag)]
    write_kept({"side_by_side": rows[:1], "layers": rows}, folder)
    attention = [Counter[int](), Counter[int]()]
    for cell, busy in zip((ring, zigzag), attention, strict=True):
        trace = read_trace(folder, cell)
        assert trace is not None
        for bar in bars_of(trace):
            if bar["kind"] == "attention":
                busy[bar["rank"]] += 1
    stairs, level = ([busy[rank] for rank in range(4)] for busy in attention)
    assert [after - before for before, after in pairwise(stairs)] == [2, 2, 2]  # forward and backward
    assert level == [level[0]] * 4
    page = page_of(tmp_path, name="strategy-ring_attention")
    assert 'id="phases"' in page
    assert 'id="phases-zigzag"' in page
    assert "One layer on 4 ranks, placement zigzag" in page


def test_messages_go_from_the_sender_to_where_they_are_received(layer: Mapping[str, Any]) -> None:
    bars = bars_of(layer)
    lines = list(messages(bars))
    assert Counter((line["from"], line["to"]) for line in lines) == Counter(
        {
            **{(f"rank {r} network", f"rank {r + 1} network"): 1 for r in range(3)},
            **{(f"rank {r + 1} network", f"rank {r} network"): 1 for r in range(3)},
        }
    )
    sent = {(bar["row"], bar["start"], bar["end"]) for bar in bars if bar["kind"] == "send"}
    assert {(line["from"], line["start"], line["end"]) for line in lines} == sent
    # forward, a rank sends after it has received
    forward = [bar for bar in bars if bar["phase"] == "forward"]
    (received,) = (bar["end"] for bar in forward if bar["row"].startswith("rank 1") and bar["kind"] == "recv")
    (sends,) = (bar["start"] for bar in forward if bar["row"].startswith("rank 1") and bar["kind"] == "send")
    assert received < sends


def test_bars_of_a_row_do_not_overlap(layer: Mapping[str, Any]) -> None:
    by_row: dict[str, list[tuple[float, float]]] = {}
    for bar in bars_of(layer):
        by_row.setdefault(bar["row"], []).append((bar["start"], bar["end"]))
    for spans in by_row.values():
        spans.sort()
        for (_, end), (start, _) in pairwise(spans):
            assert end <= start + 1e-6


def test_a_drawing_and_its_table_show_the_same_events(layer: Mapping[str, Any]) -> None:
    table = layer_table(layer, "lasp", "phases", "a model")
    lines = [*messages(table.rows)]
    figure = layer_figure(table.rows, lines)
    assert [panel.get_title() for panel in figure.axes] == ["forward", "backward"]
    drawn = {(panel.get_title(), line.get_gid()): line for panel in figure.axes for line in panel.lines}
    kinds = {(row["phase"], row["kind"]) for row in table.rows}
    assert drawn.keys() - kinds == {("forward", "message"), ("backward", "message")}
    ends = [
        end
        for panel in figure.axes
        for line in panel.lines
        if line.get_gid() != "message"
        for end in line.get_xdata()
    ]
    assert len(ends) == 3 * len(table.rows) > 300  # begin, end, and a gap
    assert {*ends} >= {row["start"] for row in table.rows} | {row["end"] for row in table.rows}
    assert (
        sum(line.get_gid() == "message" for panel in figure.axes for line in panel.lines) == len(lines) == 6
    )
    assert table.drawn is not None
    assert "rank 0: " in table.drawn.alt
    assert {kind for _, kind in kinds} <= {*re.findall(r">([a-z-]+)</text>", table.drawn.content.decode())}


# -- bytes -----------------------------------------------------------------------------------------------


def test_closed_form_beside_meter_is_what_the_row_says(kept: Path) -> None:
    (row,) = kept_rows(kept)
    measured, lines = row["measurement"], formula_lines(row)
    assert [line["difference"] for line in lines] == [0] * len(lines)
    for column, entries in (("closed form (bytes)", "formula"), ("metered (bytes)", "communication")):
        total = sum(entry["sent_bytes"] for entry in measured[entries])
        assert sum(line[column] for line in lines) == total > 0
    (held,) = memory_lines([row])
    assert held["in all"] * 2**30 == pytest.approx(measured["peak_memory_bytes"])
    assert sum(v for k, v in held.items() if k not in ("strategy", "in all")) == pytest.approx(held["in all"])


def test_a_page_shows_rows_and_a_trace_and_when_they_were_made(kept: Path) -> None:
    page = page_of(kept)
    assert '<strong class="good">Every entry is equal, exactly.</strong>' in page
    assert page.count("From commit <code>abc on 2026-01-02</code>.") == 2
    assert 'id="phases"' in page


def test_rows_of_earlier_code_are_not_green(kept: Path) -> None:
    (row,) = kept_rows(kept)
    old = row | {"digest": row["digest"] | {"code": "other"}}
    page = page_of(kept, rows=[old])
    assert "since then there have been changes of: code" in page
    assert '<strong class="unjudged">Every entry is equal, exactly.</strong>' in page


def test_a_wrong_closed_form_is_red(kept: Path) -> None:
    row = copy.deepcopy(kept_rows(kept)[0])
    row["measurement"]["formula"][0]["sent_bytes"] += 1
    page = page_of(kept, rows=[row | {"status": "mismatch"}])
    assert f'<strong class="bad">1 of {len(formula_lines(row))} entries differ.</strong>' in page
    assert "Every entry is equal" not in page


# without the time, or else two workers that collect in different seconds find different tests
@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "content", [None, b"", b"\x1f\x8b", *(gzip.compress(text, mtime=0) for text in (b"[]", b"{"))]
)
def test_what_is_not_there_is_one_line(tmp_path: Path, content: bytes | None) -> None:
    if content is not None:
        (tmp_path / "reproduction/strategies/layers").mkdir(parents=True)
        (tmp_path / "reproduction/strategies/layers/lasp.json.gz").write_bytes(content)
    page = page_of(tmp_path)
    assert "No layer of this strategy is traced" in page
    assert "This strategy is not compared with other strategies" in page
    assert "No result uses this strategy" in page


def test_another_rank_that_differs_has_a_line() -> None:
    entry = {"phase": "forward", "collective": "send", "axis": "sp"}
    row: dict[str, Any] = {
        "measurement": {
            "formula": [entry | {"purpose": "state", "sent_bytes": 8}],
            "communication": [entry | {"sent_bytes": 8}],
            "formula_difference": [entry | {"rank": 3, "formula_bytes": 0, "metered_bytes": 8}],
        }
    }
    assert [(line["purpose"], line["difference"]) for line in formula_lines(row)] == [
        ("state", 0),
        ("on rank 3", 8),
    ]


# -- verification, cells, text ---------------------------------------------------------------------------


def test_verdicts_are_shown_with_their_commit_and_red_ones_first(tmp_path: Path) -> None:
    worse = dataclasses.replace(GREEN, error=3e-14, size=4)
    with kept_verdicts(tmp_path / "verification", MADE | {"code": verified_code()}) as found:
        found += map(dataclasses.asdict, (GREEN, worse, RED))
    page = page_of(tmp_path)
    assert '<strong class="bad">1 red</strong>' in page
    assert "3.0e-14" in page
    assert "<code>abc</code>; the strategies, models and kernels are the same now" in page
    assert '<strong class="bad">1 red</strong>' in page_of(tmp_path, name="strategies")


def test_of_several_cases_the_worst_is_shown() -> None:
    rows = [dataclasses.asdict(row) | MADE for row in (GREEN, dataclasses.replace(GREEN, error=9e-11), RED)]
    red, green = verdict_lines(rows)
    assert (red["part"], red["red"], red["where"]) == (
        "model",
        1,
        "output y on sp2 is 0.5 times the reference",
    )
    assert (green["part"], green["green"], green["largest error"]) == ("block", 2, 9e-11)


def test_cells_link_to_their_filter(tmp_path: Path) -> None:
    rows = [("gate", "lasp", "ok"), ("gate", "lasp", "oom"), ("four_d", "tensor_parallel+lasp", "ok")]
    cells = [
        CellResult(
            scenario, "runs", {"key": f"{n}", "cell": {"strategy": name}, "status": status, "measurement": {}}
        )
        for n, (scenario, name, status) in enumerate(rows)
    ]
    lines = {line["link"]: line["of which"] for line in scenario_lines(cells)}
    assert lines == {
        "cells.html#scenario=four_d&strategy=tensor_parallel%2Blasp": "1 ok",
        "cells.html#scenario=gate&strategy=lasp": "1 ok, 1 oom",
    }
    page = page_of(tmp_path, *cells)
    assert 'href="cells.html#scenario=gate&amp;strategy=lasp"' in page
    assert "spbench verify --strategy lasp --output" in page


def test_docstrings_become_html() -> None:
    text = "As :class:`Lasp` (arXiv 2404.02882) <b>.\n\n- one\n  line\n- ``two``\n\nSee github.com/a/b."
    assert html_of(docstring(text)) == (
        '<p>As <code>Lasp</code> (<a href="https://arxiv.org/abs/2404.02882">arXiv 2404.02882</a>)'
        " &lt;b&gt;.</p>\n<ul>\n<li>one\nline</li>\n<li><code>two</code></li>\n</ul>\n"
        '<p>See <a href="https://github.com/a/b">github.com/a/b</a>.</p>\n'
    )
