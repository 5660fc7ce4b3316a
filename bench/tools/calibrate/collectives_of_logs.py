"""Collectives and sends of logs as a cluster's file has them: within a node, and between nodes by card."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from spbench.bench.measure.clusters.cluster import Cluster
from spbench.bench.measure.clusters.links import Link
from spbench.bench.tools.calibrate.cluster_of_logs import LogCluster, unknown, without_scalar
from spbench.bench.tools.calibrate.log_findings import Findings
from spbench.bench.tools.calibrate.rate_fits import Rate, collective_rates
from spbench.bench.yaml_files import merge

SEND = "send"


def put_collectives(made: LogCluster, found: Mapping[str, Findings], base: Cluster | None) -> None:
    """Put the rates into the file.

    Of what was measured on several nodes, each of the cards that a node's ranks leave it by has its part, and
    the latency is less that of the part within a node, since a group's time is made of both parts.
    """
    rates = collective_rates(found)
    if not rates:
        return
    _put_sizes(made, base, max(ranks // nodes for _, nodes, ranks in rates))
    within: dict[str, dict[int, Rate]] = {}
    between: dict[str, dict[int, tuple[int, Rate]]] = {}
    for (kind, nodes, ranks), rate in rates.items():  # of several worlds on as many nodes the largest remains
        if nodes == 1:
            within.setdefault(kind, {})[ranks] = rate
        else:
            between.setdefault(kind, {})[nodes] = ranks // nodes, rate
    if within and not (base and base.node_link):
        made.put({"node_link": {"latency_s": unknown(), "bandwidth_bytes_per_s": unknown()}})
    for kind, by_ranks in within.items():
        _put_rates(made, "node_link", kind, by_ranks)
    if SEND in between:
        _put_rates(made, "network", SEND, {nodes: rate for nodes, (_, rate) in between.pop(SEND).items()})
    inside, cards = _inside(made, base), _cards(made, base)
    for kind, by_nodes in between.items():
        if kind == "all_to_all":
            made.remarks.append("all_to_all between nodes is timed by sends; that of the logs is left out")
            continue
        parts = {
            nodes: _of_a_card(rate, min(cards, on_a_node), _latency(inside, kind, on_a_node))
            for nodes, (on_a_node, rate) in by_nodes.items()
        }
        _put_rates(made, "network", kind, parts)
    if any(".collectives." in line["figure"] for line in made.fitted):
        made.put({"collective_model": "measured"})
    made.put(without_scalar(base, "link_efficiency"))


def _put_sizes(made: LogCluster, base: Cluster | None, on_a_node: int) -> None:
    if on_a_node > (base.devices_per_node if base else 0):
        made.put({"devices_per_node": on_a_node})
    if base is None:
        made.put({"network": {"nics_per_node": on_a_node}})
        made.remarks.append("network.nics_per_node: one card a device is taken, since no log says how many")


def _of_a_card(rate: Rate, cards: int, latency_within: float) -> Rate:
    """The part of a node's rate that one of its cards has."""
    latency = None if rate.other is None else max(0.0, rate.other - latency_within)
    how = f"{rate.how}; the part of one of {cards} cards" if cards > 1 else rate.how
    return Rate(rate.best / cards, rate.limit / cards, latency, how, rate.source)


def _put_rates(made: LogCluster, link: str, kind: str, by_size: Mapping[int, Rate]) -> None:
    """The rates of a collective, by ranks of a node or by nodes; or that of a send, of the largest size."""
    if kind == SEND:
        made.put({link: _figures(made, link, by_size[max(by_size)])})
        return
    word = "nodes" if link == "network" else "ranks"
    entries = [
        {"ranks": size, **_figures(made, f"{link}.collectives.{kind}, {size} {word}", by_size[size])}
        for size in sorted(by_size)
    ]
    if any("latency_s" not in entry for entry in entries):
        entries = [{"latency_s": {"value": None, "source": "too few sizes"}, **entry} for entry in entries]
    made.put({link: {"collectives": {kind: entries}}})


def _figures(made: LogCluster, where: str, rate: Rate) -> dict[str, Any]:
    latency = {}
    if rate.other is not None:
        latency["latency_s"] = made.figure(f"{where}: latency_s", rate.other, rate.how, rate.source)
    bandwidth = made.figure(f"{where}: bandwidth_bytes_per_s", rate.limit, rate.how, rate.source)
    return {**latency, "bandwidth_bytes_per_s": bandwidth}


def _cards(made: LogCluster, base: Cluster | None) -> int:
    known: int = base.network.nics_per_node if base else made.content["network"]["nics_per_node"]
    return known


def _inside(made: LogCluster, base: Cluster | None) -> Link | None:
    """The link within a node, with what the logs said of it."""
    of_base = base.node_link.model_dump(mode="json") if base and base.node_link else {}
    link = merge(of_base, made.content.get("node_link", {}))
    return Link.model_validate(link) if link else None


def _latency(link: Link | None, kind: str, ranks: int) -> float:
    """Seconds of a collective's latency within a node, which a rate between nodes does not hold."""
    if link is None or ranks == 1:
        return 0.0
    rate = link.rate_of(kind, ranks)
    return (link.latency_s.value or 0.0) if rate is None else rate.latency(ranks)
