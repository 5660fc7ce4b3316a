"""Whether what logs say can be: they are of one card, that of the cluster they are put into, and nothing in
them is faster than its datasheet. All kinds of logs are held to this, those of plug-ins too."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.cluster import Cluster, cluster_names, load_cluster
from spbench.bench.tools.calibrate.log_findings import Findings
from spbench.impls.traffic import WIRE_SHARE

#: a speed above the datasheet's by more than rounding is another card's, or was written by hand
ROUNDING = 1.02
#: a switch that adds what passes it (NVLink SHARP) saves ranks half of the bytes that a ring sends
_IN_SWITCH = 2.0
#: attention kernels run on these
_HALF = ("fp16", "bf16")

_WORD = re.compile(r"[A-Z0-9]+")
#: as H100, L40S, 4090, GB200, MI300X
_MODEL = re.compile(r"(?!SXM|HBM|PCIE)[A-Z]{0,4}\d{2,4}[A-Z]?")
_GIGABYTES = re.compile(r"\b(\d+) ?GB\b")


@dataclass(frozen=True)
class _Datasheet:
    """The most that a card can do; None: not known.

    Attributes:
        name: of the cluster that has it.
        flops_per_s: by precision.
        node_link: bytes a second that a card sends within a node.
    """

    name: str
    flops_per_s: Mapping[str, float | None]
    memory_bytes_per_s: float | None
    node_link: float | None = None

    @property
    def half(self) -> float | None:
        """Operations a second in half precision."""
        return max((self.flops_per_s.get(name) or 0.0 for name in _HALF), default=0.0) or None


class _Speed(NamedTuple):
    """A speed of a log beside what the card can do."""

    value: float
    limit: float | None
    unit: str
    what: str


def check_plausible(found: Mapping[str, Findings], base: Cluster | None) -> None:
    """Refuse logs, by the names of their files, that cannot be of one card, or not of the base's.

    Args:
        base: the cluster into which they are put; None: where the logs name a card that a packaged cluster
            has, its datasheet is taken.

    Raises:
        UserError: names the file, what it says, and the limit.
    """
    card = one_card(found)
    if base and card and not is_same_card(card, base.device.name):
        raise UserError(
            f"the logs are of {card}, and {base.name} has {base.device.name}; "
            "--extends a cluster of that card, or leave --extends out"
        )
    datasheet = _of_cluster(base) if base else _of_card(card)
    for path, each in found.items():
        for value in _times(each):
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"{path} ({each.about}): a time of {value:g} s cannot be")
        for speed in _speeds(each, datasheet):
            if speed.limit is not None and speed.value > ROUNDING * speed.limit:
                scale, unit = (1e12, "TFLOP/s") if speed.unit == "FLOP/s" else (1e9, "GB/s")
                raise UserError(
                    f"{path} ({each.about}): {speed.value / scale:.4g} {unit} of {speed.what} is above the "
                    f"{speed.limit / scale:.4g} of {datasheet.name}; is it another card, or another unit?"
                )


def one_card(found: Mapping[str, Findings]) -> str:
    """The card that the logs name; "" where none does.

    Raises:
        UserError: they name several.
    """
    cards = {each.card: path for path, each in found.items() if each.card}
    if len(cards) > 1:
        raise UserError(f"logs of several cards: {', '.join(f'{c} ({path})' for c, path in cards.items())}")
    return next(iter(cards), "")


def is_same_card(a: str, b: str) -> bool:
    """Whether two names can be of one card, as drivers ("NVIDIA A100-SXM4-80GB") and cluster files ("NVIDIA
    A100 SXM4 80 GB") write them: model, memory and form are the same where both say them."""
    one, other = _described(a), _described(b)
    return all(x == y for x, y in zip(one, other, strict=True) if x and y)


def _described(name: str) -> tuple[str, str, str]:
    """Model, gigabytes and form (PCIE or SXM); "" for what the name does not say."""
    upper = name.upper()
    words = _WORD.findall(upper)
    sizes = _GIGABYTES.findall(upper)
    model = next((word for word in words if _MODEL.fullmatch(word) and word not in sizes), "")
    form = next((form for form in ("PCIE", "SXM") if form in upper), "")
    return model, sizes[0] if sizes else "", form


def _of_cluster(cluster: Cluster) -> _Datasheet:
    device = cluster.device
    link = cluster.node_link.bandwidth_bytes_per_s.value if cluster.node_link else None
    peaks = {str(name): each.value for name, each in device.peak_flops_per_s.items()}
    return _Datasheet(cluster.name, peaks, device.memory_bandwidth_bytes_per_s.value, link)


@cache
def _of_card(card: str) -> _Datasheet:
    """That of the first packaged cluster of a card, without its links, which are the cluster's; nothing is
    known of a card that none has."""
    for name in cluster_names() if _described(card)[0] else ():
        cluster = load_cluster(name)
        if _described(cluster.device.name)[0] and is_same_card(card, cluster.device.name):
            of = _of_cluster(cluster)
            return _Datasheet(cluster.device.name, of.flops_per_s, of.memory_bytes_per_s)
    return _Datasheet(card, {}, None)


def _times(found: Findings) -> Iterator[float]:
    for timed in (found.products, found.passes, found.collectives):
        yield from (each.seconds for each in timed)
    yield from (each.flops_per_s for each in found.attention)


def _speeds(found: Findings, datasheet: _Datasheet) -> Iterator[_Speed]:
    """Passes over memory are not among them: caches can be faster, and what is left out is said."""
    for product in found.products:
        limit = datasheet.flops_per_s.get(product.precision)
        yield _Speed(product.flops / product.seconds, limit, "FLOP/s", product.precision)
    for attention in found.attention:
        words = f"{attention.kernel}, {attention.mask}, {attention.direction or 'both'}"
        what = f"{words} at {attention.length} tokens"
        yield _Speed(attention.flops_per_s, datasheet.half, "FLOP/s", what)
    for each in found.collectives:
        value = float(WIRE_SHARE[each.collective](each.ranks)) * each.nbytes / each.seconds
        what = f"{each.collective} of {each.nbytes} bytes on {each.ranks} ranks"
        limits = [datasheet.memory_bytes_per_s]
        if each.nodes == 1 and datasheet.node_link is not None:
            limits.append(_IN_SWITCH * datasheet.node_link)
        yield _Speed(value, min(filter(None, limits), default=None), "B/s", what)
