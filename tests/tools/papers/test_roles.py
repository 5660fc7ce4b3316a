"""Roles: what was fitted, what was looked at to choose a setting, and what is left as a prediction."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.measure.clusters.cluster import cluster_names, load_cluster
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.measure.scenarios.select import Narrowing, declared_cells
from spbench.bench.tools.papers.answer import answers_of, compare, load_scenario
from spbench.bench.tools.papers.answers.tables import PublishedTable
from spbench.bench.tools.papers.comparison import Comparison
from spbench.bench.yaml_files import packaged
from tests.tools.packaged import packaged_scenario

PUBLISHED = """ranks,memory,speed,longest
1,2,100,512
2,3,150,1024
4,4,200,2048
"""
SCENARIO: dict[str, Any] = yaml.safe_load("""
title: Roles
defaults: {model: bert-tiny, batch: 4, seq_len: 512, strategy: tensor_parallel}
groups: [{sizes: {tp: [1, 2, 4]}}]
tables:
  - table: t
    published: {file: t.csv}
    match: {ranks: world}
    quantities:
      memory: {field: peak_memory_bytes}
      speed: {field: tokens_per_s}
      longest: {field: answer}
""")


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
    return compare(scenario, declared_cells(scenario, Narrowing(variant=variant)), {})


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


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, {"memory": ["infe"] * 3, "speed": ["infe"] * 3, "longest": ["infe"] * 3}),
        ({"quantities": ["memory"]}, {"memory": ["infe"] * 3}),
        ({"quantities": ["memory"], "rows": [{"ranks": 2}]}, {"memory": ["pred", "infe", "pred"]}),
        (
            {"rows": [{"ranks": 1, "speed": 100}, {"ranks": 4}], "quantities": ["speed"]},
            {"speed": ["infe", "pred", "infe"]},
        ),
    ],
    ids=["all", "a quantity", "a row", "two rows"],
)
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
    found = compare(scenario, declared_cells(scenario, Narrowing(variant=variant)), {})
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
    assert found == fitted


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
