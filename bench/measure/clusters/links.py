"""Links of a cluster: latencies, bandwidths, and what collectives were measured to reach on them."""

from __future__ import annotations

from typing import Any, Literal, Self

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, field_validator, model_validator

from spbench.bench.measure.clusters.sourced import Sourced
from spbench.bench.published_number import InferredSetting
from spbench.bench.yaml_files import StrictModel

#: collectives whose rates can be given; "any" stands for those that are not
RatedCollective = Literal[
    "any", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"
]
#: how the time of a collective is computed; see :mod:`measure.simulator.costs`
CollectiveModel = Literal["ring", "measured", "nccl"]
#: how NCCL's tables of constants call the generations of NVIDIA's devices
Generation = Literal["volta", "ampere", "hopper", "blackwell"]
NcclAlgorithm = Literal["ring", "tree"]
NcclProtocol = Literal["ll", "ll128", "simple"]


class BusRate(StrictModel):
    """What a collective reaches: seconds = latency + wire bytes / bus bandwidth, as nccl-tests reports it.

    Attributes:
        ranks: the group's size that it was measured at; None: it holds for all sizes.
        latency_s: of the smallest message.
        latency_per_rank_s: added for each rank of the group beyond the first.
        bandwidth_bytes_per_s: the bus bandwidth of large messages, one way.
    """

    ranks: PositiveInt | None = None
    latency_s: Sourced[NonNegativeFloat]
    latency_per_rank_s: Sourced[NonNegativeFloat] = Sourced(value=0.0, source="in latency_s")
    bandwidth_bytes_per_s: Sourced[PositiveFloat]

    def latency(self, ranks: int) -> float:
        """Seconds of the smallest message in a group of that many ranks."""
        return (self.latency_s.value or 0.0) + (self.latency_per_rank_s.value or 0.0) * (ranks - 1)


class Link(StrictModel):
    """A link, one way.

    Attributes:
        latency_s: of the smallest message.
        bandwidth_bytes_per_s: of large messages.
        collectives: what collectives reach on it, one entry a size of the group, in ascending order. Where a
            kind is missing, the entries of ``any`` stand for it. null takes away those of an extended file.
    """

    latency_s: Sourced[NonNegativeFloat]
    bandwidth_bytes_per_s: Sourced[PositiveFloat]
    collectives: dict[RatedCollective, list[BusRate]] = {}

    @field_validator("collectives", mode="before")
    @classmethod
    def _none(cls, declared: Any) -> Any:
        return {} if declared is None else declared

    @model_validator(mode="after")
    def _in_order(self) -> Self:
        for kind, rates in self.collectives.items():
            sizes = [rate.ranks for rate in rates]
            known = [size for size in sizes if size is not None]
            if not rates or known != sorted(set(known)) or (len(rates) > 1 and len(known) < len(rates)):
                raise ValueError(
                    f"collectives.{kind}: give one rate, or one a number of ranks in ascending order"
                )
        return self

    def rate_of(self, kind: str, ranks: int) -> BusRate | None:
        """The rate of a collective in a group of that many ranks: that of the largest size measured which is
        not larger, else of the smallest; None: none is known."""
        by_kind = {str(name): rates for name, rates in self.collectives.items()}
        rates = by_kind.get(kind, by_kind.get("any", []))
        fitting = [rate for rate in rates if rate.ranks is None or rate.ranks <= ranks]
        return next(iter([*reversed(fitting), *rates]), None)


class Network(Link):
    """The links of a node to the others.

    Attributes:
        latency_s, bandwidth_bytes_per_s: of one network card.
        nics_per_node: how many cards the devices of a node share.
        one_card_a_part: a group on several nodes that has only some of a node's devices leaves it by one
            card, however many devices it has there; without it, by a card a device as far as there are any.
            A hypothesis: no measurement of such a group was found.
        inferred_from: the published numbers by which one of these was chosen, if it was.
    """

    nics_per_node: PositiveInt = 1
    one_card_a_part: bool = False
    inferred_from: list[InferredSetting] = []


class NcclSettings(StrictModel):
    """What NCCL's tuning model needs to know beside the links; see :mod:`measure.simulator.nccl`.

    Attributes:
        generation: of the devices, which chooses the constants.
        cpu: maker of the nodes' processors, on which the rate of LL between nodes depends.
        channels: of NCCL's rings and trees; null: no limit by channels.
        algorithms, protocols: those that NCCL may choose from (NCCL_ALGO and NCCL_PROTO).
    """

    generation: Generation
    cpu: Literal["intel", "amd"] = "intel"
    channels: Sourced[PositiveInt] = Sourced(value=None, source="not known")
    algorithms: list[NcclAlgorithm] = ["ring", "tree"]
    protocols: list[NcclProtocol] = ["ll", "ll128", "simple"]
