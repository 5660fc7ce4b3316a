"""Clusters with figures changed: what changes, what stays, and what cannot be."""

from pathlib import Path

import pytest
import yaml

from spbench.bench.errors import UserError
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.clusters.cluster import Cluster, cluster_names, load_cluster
from spbench.bench.tools.choose.asked import changed_cluster, is_figure, swept_figures
from spbench.bench.yaml_files import validate

BANDWIDTH = "network.bandwidth_bytes_per_s"


@pytest.fixture(autouse=True)
def _kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path))


def values(name: str) -> dict[str, object]:
    return {path: each.value for path, each in load_cluster(name).sourced}


def test_a_factor_changes_one_figure() -> None:
    before, after = values("dgx-h100"), values(changed_cluster("dgx-h100", {BANDWIDTH: "x2"}))
    assert after[BANDWIDTH] == 2 * before[BANDWIDTH]  # type: ignore[operator]
    assert {path for path in before if before[path] != after[path]} == {BANDWIDTH}


def test_what_collectives_reach_on_a_link_changes_with_it() -> None:
    name = "node_link.bandwidth_bytes_per_s"
    before, after = values("dgx-h100"), values(changed_cluster("dgx-h100", {name: "x0.5"}))
    changed = {path for path in before if before[path] != after[path]}
    assert len(changed) > 1
    assert all(path.startswith("node_link.") and path.endswith(".bandwidth_bytes_per_s") for path in changed)
    for path in changed:
        assert after[path] == 0.5 * before[path]  # type: ignore[operator]


def test_numbers_and_counts_can_be_given() -> None:
    path = changed_cluster("dgx-h100", {"network.nics_per_node": "4", "device.memory_total_bytes": "1e11"})
    made = load_cluster(path)
    assert made.network.nics_per_node == 4
    assert made.device.memory_total_bytes.value == 10**11
    assert made.about == "dgx-h100 with network.nics_per_node 4, device.memory_total_bytes 1e11"


def test_the_same_change_is_the_same_file() -> None:
    first = changed_cluster("dgx-h100", {BANDWIDTH: "x2"})
    assert changed_cluster("dgx-h100", {BANDWIDTH: "x2"}) == first
    assert changed_cluster("dgx-h100", {BANDWIDTH: "x4"}) != first


@pytest.mark.one_in(3)
@pytest.mark.parametrize("name", cluster_names())
def test_the_content_of_a_cluster_is_a_file_of_it(name: str) -> None:
    """Also with whole numbers as keys, which JSON has not."""
    cluster = load_cluster(name)
    content = yaml.safe_load(yaml.safe_dump(cluster.content))
    assert validate(Cluster, {**content, "name": name}, name) == cluster


@pytest.mark.parametrize(
    ("cluster", "figure", "text", "problem"),
    [
        ("dgx-h100", "network.bandwith_bytes_per_s", "x2", f"did you mean '{BANDWIDTH}'"),
        ("dgx-h100", BANDWIDTH, "fast", "give a number, or a factor as x2"),
        ("dgx-h100", BANDWIDTH, "-1", "give a number from 0 on"),
        ("dgx-h100", BANDWIDTH, "x0", "greater than 0"),
        ("dgx-h100", "network.nics_per_node", "0", "greater than 0"),
        ("piz-daint-p100", "node_link.latency_s", "x2", "cluster piz-daint-p100 has no such figure"),
        ("piz-daint-p100", "device.launch_overhead_s", "x2", "has no number there to multiply; give one"),
    ],
)
def test_what_cannot_be_changed(cluster: str, figure: str, text: str, problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        changed_cluster(cluster, {figure: text})


def test_a_range_is_doublings() -> None:
    assert swept_figures([(BANDWIDTH, "x0.5..x4"), ("network.nics_per_node", "4")]) == [
        {BANDWIDTH: factor, "network.nics_per_node": "4"} for factor in ("x0.5", "x1", "x2", "x4")
    ]
    assert swept_figures([]) == [{}]
    for wrong in ("x4..x1", "x0..x4"):
        with pytest.raises(UserError, match="the smaller first"):
            swept_figures([(BANDWIDTH, wrong)])
    with pytest.raises(UserError, match="given twice"):
        swept_figures([(BANDWIDTH, "x1"), (BANDWIDTH, "x2")])


def test_names_of_figures() -> None:
    assert is_figure(BANDWIDTH)
    assert not is_figure("training.backend")
    assert not is_figure("device")  # of a cell
