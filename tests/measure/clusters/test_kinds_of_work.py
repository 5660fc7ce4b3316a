"""What is said of a cluster by kind of work: its figures, and the gaps."""

from pathlib import Path
from typing import Any

import pytest

from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Cluster, cluster_names, load_cluster
from spbench.bench.measure.clusters.kinds_of_work import kinds_of_work
from spbench.bench.tools.run.list_command import cluster_output
from tests.measure.simulator.step_programs import cluster


def found(on: Cluster) -> dict[str, str]:
    return {kind.work: kind.figure for kind in kinds_of_work(on)}


def changed(**device: Any) -> Cluster:
    document = cluster(devices=2).model_dump()
    document["device"] |= device
    return Cluster.model_validate(document)


def figure(value: float) -> dict[str, Any]:
    return {"value": value, "source": "made up", "note": "twice"}


def test_a_cluster_of_datasheets_has_gaps_for_all_but_its_links() -> None:
    assert found(changed(launch_overhead_s={"value": None, "source": "unknown"})) == {
        "matmuls, fp32": "not known: they count as at the peak",
        "attention, every kernel": "not known: it counts as matmuls",
        "memory": "not known: it counts as at the datasheet's bandwidth",
        "launch of a kernel": "not known: it takes no time",
        "computing beside a collective": "not known: loses nothing",
        "host": "not known: it launches in no time",
        "copy to or from the host": "not known: it cannot be timed",
        "copy to pageable memory": "not known: as pinned memory",
        "copy from pageable memory": "not known: as pinned memory",
        "update on the host's cores": "not known: it cannot be timed",
        "memory of the host": "not known: it has no limit",
        "send, intra-node": "1e-09 GB/s",
        "other collectives, intra-node": "not known: by latency and bandwidth of a send's hops",
        "send, inter-node": "1e-09 GB/s",
        "other collectives, inter-node": "not known: by latency and bandwidth of a send's hops",
    }


def test_the_host_s_memory_in_words() -> None:
    known = {"total_bytes": figure(2**41), "link_bandwidth_bytes_per_s": figure(52e9), "devices_per_link": 2}
    known["update_bytes_per_s"] = figure(24e10)
    known["pageable_to_host_bytes_per_s"] = figure(1.5e9)
    words = found(Cluster.model_validate(changed().model_dump() | {"host_memory": known}))
    assert words["copy to or from the host"] == "26 GB/s a device, of a link of 2 devices"
    assert words["copy to pageable memory"] == "1.5 GB/s a device"
    assert words["update on the host's cores"] == "240 GB/s a node"
    assert words["memory of the host"] == "2048 GiB a node"


def test_rates_by_kind_of_work_in_words() -> None:
    rate = {"head_size": 64, "mask": "whole", "limit_flops_per_s": figure(2e14), "half_length": figure(300.0)}
    on = changed(
        peak_flops_per_s={"bf16": figure(3e14)},
        matmul={"bf16": {"share": figure(0.8), "bandwidth_bytes_per_s": figure(3e12)}},
        attention={
            "default": "triton",
            "kernels": {"triton": [rate], "cudnn": [rate | {"direction": "forward"}]},
        },
        overlap_loss=figure(0.25),
    )
    words = found(on)
    assert words["matmuls, bf16"] == "0.8 of 300 TFLOP/s, and 3000 GB/s of operands"
    assert words["attention, triton, the default"] == "200 TFLOP/s / (1 + 300 / length), head 64, whole"
    assert words["attention, cudnn"] == "200 TFLOP/s / (1 + 300 / length), head 64, whole, forward"
    assert words["attention, other kernels"] == "not known: it counts as matmuls"
    assert words["computing beside a collective"] == "loses 0.25 s a second"
    assert {kind.source for kind in kinds_of_work(on) if kind.work.startswith("matmul")} == {"made up: twice"}


def test_a_fitted_share_is_said_to_be_fitted() -> None:
    (matmuls,) = (kind for kind in kinds_of_work(load_cluster("a100-lasp")) if kind.work == "matmuls, bf16")
    assert matmuls[1:] == ("0.623 of 312 TFLOP/s", "calibration.bf16, fitted on 3 cells")


def test_a_host_by_kind_of_work() -> None:
    """Grace's own scale, on the figures of the file that its host extends."""
    words = found(load_cluster("gb200-nvl"))
    assert words["host, operator that launches"] == "12.9 us"
    assert words["host, step"] == "not known: it takes no time"
    assert words["host, launches ahead"] == "1024"
    assert words["host, scale of its times"] == "1.08"


def test_a_host_extends_that_of_a_packaged_cluster(tmp_path: Path) -> None:
    own = tmp_path / "ours.yaml"
    start = "extends: dgx-a100\nabout: ours\nhost:\n  extends: "
    own.write_text(start + "h100-sxm\n  scale: {value: 0.5, source: ours}\n")
    ours, theirs = load_cluster(str(own)).host, load_cluster("h100-sxm").host
    assert ours.seconds("operator_s") == 0.5 * theirs.seconds("operator_s")
    own.write_text(start + "h100-smx\n")
    with pytest.raises(UserError, match=r"ours.yaml: host.extends: unknown cluster 'h100-smx'.*h100-sxm"):
        load_cluster(str(own))


@pytest.mark.parametrize("name", cluster_names())
def test_every_figure_has_a_source_and_every_gap_is_named(name: str) -> None:
    output = cluster_output(name)
    assert all(bool(line["source"]) != line["figure"].startswith("not known") for line in output.records)
    assert output.content["gaps"] == [
        line["work"] for line in output.records if line["figure"].startswith("not known")
    ]


def test_a_cluster_that_is_not_there() -> None:
    with pytest.raises(UserError, match="unknown cluster 'l40'"):
        cluster_output("l40")


def test_null_takes_the_collectives_of_an_extended_file_away() -> None:
    link = load_cluster("h800-sxm").node_link
    assert link.collectives == {}
    above = load_cluster("h100-sxm").node_link
    assert "all_reduce" in above.collectives


def test_operators_are_counted() -> None:
    times = {"value": [[100.0, 5.0], [200.0, 7.0]], "source": "made up"}
    on = changed(operators={"gelu": times, "add": times})
    assert found(on)["memory, by operator"] == "2 operators by what they took at 4 sizes"
