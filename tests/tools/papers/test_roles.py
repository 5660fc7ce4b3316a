"""Roles: what was fitted, what was looked at to choose a setting, and what is left as a prediction. Numbers
of a rank and of a step beside published ones, and several measurements of one cell."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import cluster_names, load_cluster
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.tools.papers.answer import answers_of, compare, load_scenario
from spbench.bench.tools.papers.answers.tables import PublishedTable
from spbench.bench.tools.papers.comparison import Comparison, frame_of
from spbench.bench.tools.papers.paper_findings import PaperFindings, distinct
from spbench.bench.yaml_files import packaged
from tests.grid import data, tabled
from tests.tools.packaged import packaged_scenario

PUBLISHED = data(__file__)["PUBLISHED"]
SCENARIO: dict[str, Any] = data(__file__)["SCENARIO"]


def inferred(**changes: Any) -> dict[str, Any]:
    return {"setting": "layers", "answers": ["t"], "reason": "it fits"} | changes


def loaded(folder: Path, cluster: dict[str, Any] | None = None, **changes: Any) -> Scenario:
    """The scenario, on a cluster of its own."""
    (folder / "t.csv").write_text(PUBLISHED)
    path = folder / "mine.yaml"
    path.write_text(yaml.safe_dump({"extends": "dgx-a100", "about": "-", **(cluster or {})}))
    content = {**SCENARIO, **changes}
    content["defaults"] = content["defaults"] | {"cluster": str(path), "precision": "bf16"}
    (folder / "s.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return load_scenario(str(folder / "s.yaml"))


def compared(scenario: Scenario, variant: str = "all") -> list[Comparison]:
    return compare(scenario, Narrowing(variant=variant).declared(scenario), {})


def roles(scenario: Scenario) -> dict[str, list[str]]:
    """By quantity, the roles of the rows."""
    found = compared(scenario) if len(scenario.cells) > 1 else compare(scenario, scenario.cells[""], {})
    return {q: [c.role[:4] for c in found if c.quantity == q] for q in ("memory", "speed", "longest")}


NOTHING = {"memory": ["pred"] * 3, "speed": ["pred"] * 3, "longest": ["pred"] * 3}


def test_without_declarations_all_is_predicted(tmp_path: Path) -> None:
    assert roles(loaded(tmp_path)) == NOTHING


def test_calibrated_follows_from_what_the_scalars_were_fitted_on(tmp_path: Path) -> None:
    cell = loaded(tmp_path).cells[""][1]
    fitted = {"compute_efficiency": 0.5, "fitted_on": [cell.key]}
    # the speed alone: memory does not know of the cluster's scalars
    expected = NOTHING | {"speed": ["pred", "cali", "pred"]}
    assert roles(loaded(tmp_path, {"calibration": {"bf16": fitted}})) == expected
    # scalars of another precision do not time this cell
    assert roles(loaded(tmp_path, {"calibration": {"fp16": fitted}})) == NOTHING
    # the same cell with any other setting is another cell
    variants = loaded(tmp_path, {"calibration": {"bf16": fitted}}, variants={"a": {}, "b": {}})
    assert roles(variants)["speed"] == ["pred"] * 6


def test_figures_that_were_fitted_count_too(tmp_path: Path) -> None:
    keys = [cell.key for cell in loaded(tmp_path).cells[""]]
    rate = {"value": 1e12, "source": "-", "fitted_on": keys[:1]}
    total = {"value": 2**34, "source": "-", "fitted_on": keys[2:]}
    device = {"memory_bandwidth_bytes_per_s": rate, "memory_total_bytes": total}
    assert roles(loaded(tmp_path, {"device": device})) == {
        "memory": ["pred"] * 3,
        "speed": ["cali", "pred", "pred"],
        "longest": ["pred", "pred", "cali"],
    }


@tabled(__file__, "inferred_is_what_was_looked_at")
def test_inferred_is_what_was_looked_at(tmp_path: Path, changes: Any, expected: Any) -> None:
    assert roles(loaded(tmp_path, inferred_from=[inferred(**changes)])) == NOTHING | expected
    # declared in the cluster's file, beside a figure or beside the number of cards: the same
    network: dict[str, Any] = {"nics_per_node": 1, "inferred_from": [inferred(**changes)]}
    assert roles(loaded(tmp_path, {"network": network})) == NOTHING | expected
    figure = {"latency_s": {"value": 1e-6, "source": "-", "inferred_from": [inferred(**changes)]}}
    assert roles(loaded(tmp_path, {"network": figure})) == NOTHING | expected


def test_a_variant_is_inferred_where_it_was_chosen(tmp_path: Path) -> None:
    variants = {"a": {"precision": "fp16"}, "b": {}}
    scenario = loaded(tmp_path, variants=variants, inferred_from=[inferred(variants=["b"])])
    assert {(c.variant, c.role) for c in compared(scenario)} == {("a", "predicted"), ("b", "inferred")}


def test_calibrated_has_precedence_over_inferred(tmp_path: Path) -> None:
    key = loaded(tmp_path).cells[""][0].key
    cluster = {"calibration": {"bf16": {"compute_efficiency": 0.5, "fitted_on": [key]}}}
    found = roles(loaded(tmp_path, cluster, inferred_from=[inferred()]))
    assert found["speed"] == ["cali", "infe", "infe"]


def test_a_ratio_is_calibrated_if_one_of_its_cells_is(tmp_path: Path) -> None:
    key = loaded(tmp_path).cells[""][0].key
    (tmp_path / "c.csv").write_text("claim,published\nr,2\n")
    claim: dict[str, Any] = {"claim": "r", "published": {"file": "c.csv"}, "quantity": "tokens_per_s"}
    claim |= {"cells": {"two": {"world": 2}, "one": {"world": 1}}, "ours": "two / one"}
    cluster = {"calibration": {"bf16": {"compute_efficiency": 0.5, "fitted_on": [key]}}}
    scenario = loaded(tmp_path, cluster, values=[claim])
    assert compare(scenario, scenario.cells[""], {})[0].role == "calibrated"


def test_the_same_number_has_the_same_source_in_every_variant_and_scenario(tmp_path: Path) -> None:
    scenario = loaded(tmp_path, variants={"a": {}, "b": {"precision": "fp16"}})
    found = compared(scenario)
    assert len(found) == 18
    assert len({c.source for c in found}) == 9
    assert found[0].source == "t.csv:1:memory"


# -- what is committed -----------------------------------------------------------------------------------


def packaged_roles(name: str, quantity: str, variant: str | None = None) -> set[str]:
    scenario = packaged_scenario(name)
    found = compare(scenario, Narrowing(variant=variant).declared(scenario), {})
    return {c.role for c in found if c.quantity == quantity and c.published is not None}


def test_settings_chosen_by_a_papers_numbers_are_declared() -> None:
    assert packaged_roles("rsa_table4", "memory_mb") == {"inferred"}
    assert packaged_roles("rsa_table4", "throughput_tokens_per_s") == {"calibrated", "predicted"}
    assert packaged_roles("max_batch", "ratio") == {"inferred"}
    assert packaged_roles("max_batch", "ratio", "all-steps") == {"predicted"}
    assert packaged_roles("max_seqlen", "max_seq_len") == {"predicted"}
    assert packaged_roles("max_seqlen", "max_seq_len", "all-steps") == {"inferred"}
    assert packaged_roles("lasp_scalability", "memory_gb") == {"inferred"}
    assert packaged_roles("lasp_scalability", "throughput_tokens_per_s") == {"calibrated", "inferred"}
    assert packaged_roles("dsp_throughput", "throughput_samples_per_s") == {"calibrated", "inferred"}
    assert packaged_roles("dsp_inference", "latency_s") == {"calibrated", "inferred", "predicted"}
    assert packaged_roles("lasp2_scalability", "memory_gb") == {"inferred"}
    assert packaged_roles("lasp2_scalability", "throughput_tokens_per_s") == {"predicted"}


def test_the_cells_that_packaged_clusters_were_fitted_on_are_the_calibrated_ones() -> None:
    """A key that no cell of any scenario has any more would silently make its number a prediction."""
    clusters = [load_cluster(name) for name in cluster_names()]
    fitted = {key for cluster in clusters for c in cluster.calibration.values() for key in c.fitted_on}
    fitted |= {key for cluster in clusters for _, figure in cluster.sourced for key in figure.fitted_on}
    found = set()
    for name in packaged("spbench.scenarios"):
        scenario = packaged_scenario(name)
        for cells in scenario.cells.values():
            found |= {c.cell for c in compare(scenario, cells, {}) if c.role == "calibrated"}
    # hosts of Megatron-LM's tests are also fitted on cases that no scenario has (scripts/host_figures.py)
    assert fitted - {key for key in fitted if "-megatron-tests/" in key} <= found <= fitted


def test_what_packaged_clusters_were_inferred_from_is_there() -> None:
    """A cluster's file cannot be checked against the scenarios when it is loaded."""
    inferences = [i for name in cluster_names() for i in load_cluster(name).inferences]
    assert inferences
    numbers = {}
    for name in packaged("spbench.scenarios"):
        scenario = packaged_scenario(name)
        numbers |= {
            table.table: table.numbers(scenario.path.parent) for table in answers_of(scenario, PublishedTable)
        }
    for inference in inferences:
        for answer in inference.answers:
            assert any(inference.covers(answer, number, "") for number in numbers[answer]), inference


GIB = 2**30

#: two runs of one cell in two containers, and one on another machine; bytes, a JSON object by rank, seconds
PUBLISHED_OF_RANKS = data(__file__)["PUBLISHED_OF_RANKS"]
CONTENT: dict[str, Any] = data(__file__)["CONTENT"]


def entry(rank: int, ranks: int, stage: int, step: int, gib: float) -> dict[str, Any]:
    """An entry of Measurement.by_class; twice as much is reserved as allocated."""
    peak = int(gib * GIB)
    sizes = {"peak_memory_bytes": peak, "reserved_memory_bytes": 2 * peak, "allocated_bytes": peak // 2}
    return {"rank": rank, "ranks": ranks, "stage": stage, "step": step, **sizes}


#: two stages of two ranks, two steps
CLASSES = [entry(0, 2, 0, 1, 0.5), entry(2, 2, 1, 1, 1.0), entry(0, 2, 0, 2, 0.75), entry(2, 2, 1, 2, 1.5)]


def loaded_of_ranks(folder: Path, **changes: Any) -> Scenario:
    """The scenario, with keys of its table replaced."""
    content = {**CONTENT, "tables": [{**CONTENT["tables"][0], **changes}]}
    (folder / "goldens.csv").write_text(PUBLISHED_OF_RANKS)
    (folder / "s.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    return load_scenario(str(folder / "s.yaml"))


def of_ranks(scenario: Scenario, **measured: Any) -> list[Comparison]:
    cells: list[Cell] = [*scenario.cells[""]]
    key = cells[0].key
    row = {"key": key, "cell": {}, "status": "ok", "reason": "", "measurement": measured}
    return compare(scenario, cells, {key: row})


def test_a_number_is_of_its_rank_and_step(tmp_path: Path) -> None:
    found = of_ranks(loaded_of_ranks(tmp_path), by_class=CLASSES, step_time_s=0.55, peak_memory_bytes=9 * GIB)
    assert [(c.table, c.quantity, c.published, c.reproduced) for c in found] == [
        ("goldens: tp2_pp2, dev_a100, last rank, first step", "peak_memory_gib", 1.0, 1.0),
        ("goldens: tp2_pp2, lts_a100, last rank, first step", "peak_memory_gib", pytest.approx(1.1), 1.0),
        ("goldens: tp2_pp2, dev_a100, last rank, last step", "peak_memory_gib", 2.0, 1.5),
        ("goldens: tp2_pp2, lts_a100, last rank, last step", "peak_memory_gib", 2.0, 1.5),
        ("goldens: tp4_pp1, dev_a100, last rank, last step", "peak_memory_gib", 4.0, None),
        # the second of its stage, of which the first is traced
        ("goldens: tp2_pp2, dev_a100, rank 0", "by_rank", 1.0, 1.5),
        ("goldens: tp2_pp2, dev_a100, rank 3", "by_rank", 2.0, 3.0),
        ("goldens: tp2_pp2, dev_a100", "step_time_ms", 500.0, 550.0),
        ("goldens: tp2_pp2, lts_a100", "step_time_ms", 600.0, 550.0),
    ]
    assert len({c.claim for c in found}) == len({c.source for c in found}) == len(found)
    assert found[6].source == "goldens.csv:1:by_rank:3"
    assert found[2].relative_error == -0.25


def test_rows_can_be_told_apart_by_their_micro_batches(tmp_path: Path) -> None:
    """The cells have micro-batches as a number, 2 of a replica's 8 / 2 samples."""
    table = """
table: t
published: {file: t.csv}
match: {ranks: world, micro_batch: micro_batch}
named_by: [micro_batch]
quantities: {step_ms: {field: step_time_s, unit: 0.001, note: slow}}
"""
    content = CONTENT | {"defaults": CONTENT["defaults"] | {"batch": 8}, "tables": [yaml.safe_load(table)]}
    content["groups"] = [{"sizes": {"dp": 2}, "training": {"micro_batches": n}} for n in (2, 1)]
    (tmp_path / "t.csv").write_text("ranks,micro_batch,step_ms\n2,2,100\n2,4,200\n")
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(content, sort_keys=False))
    scenario = load_scenario(str(tmp_path / "s.yaml"))
    found = of_ranks(scenario, step_time_s=0.15)
    assert [(c.table, c.published, c.reproduced, c.note) for c in found] == [
        ("t: micro_batch 2", 100.0, 150.0, "slow"),
        ("t: micro_batch 4", 200.0, None, "slow; was not run"),
    ]


def test_without_its_class_a_number_is_missing(tmp_path: Path) -> None:
    first, *_, last = of_ranks(loaded_of_ranks(tmp_path), peak_memory_bytes=GIB)
    assert (first.reproduced, first.note) == (None, "has no peak_memory_bytes")
    assert last.note == "has no step_time_s"


def test_the_largest_over_classes_where_no_rank_is_named(tmp_path: Path) -> None:
    quantities = {"peak_first": {"field": "peak_memory_bytes", "unit": GIB, "published_unit": 1, "step": 1}}
    scenario = loaded_of_ranks(tmp_path, quantities=quantities)
    rows = [entry(0, 2, 0, 1, 4.0), entry(2, 2, 1, 1, 1.0), entry(0, 2, 0, 2, 8.0)]
    assert [c.reproduced for c in of_ranks(scenario, by_class=rows)] == [4.0, 4.0]


def test_a_peak_is_the_largest_so_far(tmp_path: Path) -> None:
    """CUDA's allocator goes on counting from step to step; what is left at a step's end is of that step."""
    rows = [entry(2, 2, 1, 1, 3.0), entry(2, 2, 1, 2, 2.0)]
    sizes = {"unit": GIB, "published_unit": 1, "rank": "last", "step": "last"}
    for field, ours in (("peak_memory_bytes", 3.0), ("reserved_memory_bytes", 6.0), ("allocated_bytes", 1.0)):
        scenario = loaded_of_ranks(tmp_path, quantities={"peak_last": {"field": field, **sizes}})
        assert of_ranks(scenario, by_class=rows)[0].reproduced == ours


def test_a_step_that_was_not_traced_has_no_number(tmp_path: Path) -> None:
    quantities = {"peak_last": {"field": "allocated_bytes", "step": 3}}
    assert of_ranks(loaded_of_ranks(tmp_path, quantities=quantities), by_class=CLASSES)[0].reproduced is None


def test_each_measurement_is_counted_and_listed(tmp_path: Path) -> None:
    found = of_ranks(loaded_of_ranks(tmp_path), by_class=CLASSES, step_time_s=0.55)
    records = frame_of(replace(one, scenario="s") for one in found)
    assert len(distinct(records)) == len(records) == 9
    runs = [{"scenario": "s", "cells": "2", "ok": "2", "oom": "0", "unsupported": "0", "failed": "0"}]
    blocks = dict(PaperFindings("measured", records, runs).blocks("s"))
    assert [title.partition(":")[0] for title in blocks] == [
        *("goldens, peak_memory_gib", "goldens, by_rank", "goldens, step_time_ms")
    ]
    (peaks, *_) = blocks.values()
    assert peaks[0]["measured"] == "tp2_pp2, dev_a100, last rank, first step"


@tabled(__file__, "mistakes_are_one_line")
def test_mistakes_are_one_line(tmp_path: Path, key: str, value: Any, message: str) -> None:
    with pytest.raises(UserError, match=r"^[^\n]*$") as caught:
        loaded_of_ranks(tmp_path, **{key: value})
    assert message in str(caught.value)


def test_a_number_where_a_phase_ends(tmp_path: Path) -> None:
    """The largest over classes, in the last step unless another is named; as the source prints it there."""
    ends = [{"forward": {"allocated": n * GIB, "reserved": 2 * n * GIB}} for n in (1, 2, 3)]
    rows = [entry(0, 2, 0, 1, 9.0), entry(0, 2, 0, 2, 9.0), entry(2, 2, 1, 2, 9.0)]
    rows = [row | {"phase_ends": of_one} for row, of_one in zip(rows, ends, strict=True)]
    at_end = {"unit": GIB, "published_unit": 1, "phase": "forward"}
    for field, step, ours in (("allocated_bytes", "last", 3), ("reserved_memory_bytes", 1, 2)):
        asked = loaded_of_ranks(tmp_path, quantities={"peak_last": {"field": field, "step": step, **at_end}})
        first = of_ranks(asked, by_class=rows)[0]
        assert (first.table.split(", ")[-1], first.reproduced) == ("end of forward", ours)
    no_such = at_end | {"field": "allocated_bytes", "phase": "sync"}
    asked = loaded_of_ranks(tmp_path, quantities={"peak_last": no_such})
    assert of_ranks(asked, by_class=rows)[0].reproduced is None
    with pytest.raises(UserError, match="unknown quantity 'peak_memory_bytes'"):
        loaded_of_ranks(tmp_path, quantities={"peak_last": {"field": "peak_memory_bytes", **at_end}})
