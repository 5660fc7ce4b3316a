"""What devices of a node share: sends and collectives over a link between two sockets, by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from spbench.bench.measure.clusters.cluster import Calibration, Cluster
from spbench.bench.measure.simulator.costs import Costs
from spbench.bench.measure.simulator.message_matching import owners
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.simulate import Simulator, smallest_shifts
from spbench.bench.measure.simulator.steps import Steps
from spbench.bench.measure.simulator.substitutes import transfer_substitutes
from tests.measure.simulator.step_programs import cluster, everyone, ring


def node(devices: int = 8, **link: Any) -> Cluster:
    """Nodes of so many devices, whose links move a byte a second, with other figures of that link."""
    content = cluster(devices=devices, bandwidth=1e300).content
    content["node_link"] |= link
    return Cluster.model_validate({**content, "name": "made-up"})


def crossing(devices: int, bandwidth: float, **words: str) -> dict[str, Any]:
    figure = {"value": bandwidth, "source": "made up", **words}
    return {"devices": devices, "path": "SYS", "bandwidth_bytes_per_s": figure}


def costs(*crossings: dict[str, Any]) -> Costs:
    return Costs(node(crossings=list(crossings)), Calibration())


def test_sends_share_the_way_out_of_their_part() -> None:
    """In a ring of eight one send leaves each socket; where all ranks send to the other, four do."""
    on, ranks = costs(crossing(4, 0.5)), range(8)
    neighbours = on.transfers(ranks, [(r + 1) % 8 for r in ranks], 1)[1]
    assert neighbours.tolist() == [1, 1, 1, 2, 1, 1, 1, 2]
    assert on.transfers(ranks, [(r + 4) % 8 for r in ranks], 1)[1].tolist() == [8.0] * 8
    # a way out that is wider than all links together slows nothing down
    assert set(costs(crossing(4, 100.0)).transfers(ranks, [(r + 4) % 8 for r in ranks], 1)[1]) == {1.0}


def test_collectives_take_at_least_what_leaves_a_part_takes() -> None:
    whole, halves, pairs = [list(range(8))], [[0, 1, 2, 3], [4, 5, 6, 7]], [[r, r + 4] for r in range(4)]
    free, on = costs(), costs(crossing(4, 0.5))
    for kind in ("all_reduce", "all_gather", "all_to_all", "broadcast"):
        assert on.collectives(kind, 8.0, halves) == free.collectives(kind, 8.0, halves), kind
    # 4 x 4 pieces of one byte each leave a socket, at half a byte a second
    assert on.collectives("all_to_all", 8.0, whole) == [32.0]
    # a ring of all eight leaves each socket once: 7 bytes a hop
    assert on.collectives("all_gather", 8.0, whole) == [14.0]
    assert on.collectives("broadcast", 8.0, whole) == [16.0]
    # four rings of two share it: 4 bytes a hop each
    assert on.collectives("all_gather", 8.0, pairs) == [32.0] * 4


def test_the_narrowest_of_several_crossings_counts() -> None:
    below, above = crossing(2, 0.25), crossing(4, 4.0)
    assert costs(below, above).collectives("all_gather", 8.0, [list(range(8))]) == [28.0]
    assert costs(above).collectives("all_gather", 8.0, [list(range(8))]) == [7.0]


def test_a_world_is_not_folded_over_a_crossing() -> None:
    """All ranks of a ring do the same, yet the send between sockets takes longer than the others."""
    on = node(crossings=[crossing(4, 0.1)])
    programs, ranks = [ring(8, 1.0, 1.0, overlap=False)], [range(8)]
    assert smallest_shifts(programs, owners(programs, ranks), node()) == (1, 1, 1, 1)
    assert smallest_shifts(programs, owners(programs, ranks), on) == (1, 1, 1, 4)
    folded, whole = (Simulator(programs, ranks, on, fold=fold)().step_time_s for fold in (True, False))
    assert folded == whole > Simulator(programs, ranks, node())().step_time_s


def names(on: Cluster) -> set[tuple[str, str, str]]:
    b = ProgramBuilder((1, 1, 1, 8))
    b.wait(b.collective("all_gather", 8.0, everyone(8)))
    b.wait(b.send(1.0, (0, 0, 0, 1)))  # the first rank's peer is in its part; that of the fourth is not
    b.wait(b.recv(1.0, (0, 0, 0, -1)))
    ranks = np.arange(8)
    found = transfer_substitutes(Costs(on, Calibration()), Steps(b.program(), ranks, ranks))
    return {tuple(each) for each, _ in found if each.by != "the bandwidth of a send"}


def test_what_is_not_known_of_crossings_is_named() -> None:
    assert names(node()) == names(node(crossings=[crossing(4, 1.0)])) == set()
    unknown = "links that no devices share"
    assert names(node(crossings=None)) == {
        ("send intra-node", unknown, "extrapolated"),
        ("all_gather intra-node", unknown, "extrapolated"),
    }
    others = node(crossings=[crossing(4, 1.0, substitute="another machine's")])
    assert names(others) == {
        ("send intra-node (SYS)", "another machine's", "substituted"),
        ("all_gather intra-node (SYS)", "another machine's", "substituted"),
    }


@pytest.mark.parametrize("devices", [(3,), (8,), (4, 4), (4, 2)])
def test_parts_divide_each_other_and_the_node(devices: tuple[int, ...]) -> None:
    with pytest.raises(ValidationError, match=r"node_link.crossings: parts of .* do not divide a node of 8"):
        node(crossings=[crossing(each, 1.0) for each in devices])
