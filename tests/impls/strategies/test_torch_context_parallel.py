"""Our context parallelism beside torch's own (torch.distributed.tensor.experimental): the same positions on
each rank, and the same messages, for each rotate method, with load balancing and without."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.distributed.tensor.experimental._context_parallel._load_balancer import _HeadTailLoadBalancer

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.tracing import trace
from spbench.impls.place import Place
from spbench.impls.registries import strategy_class

N, LENGTH = 4, 48
#: torch's rotate method and, of ours, the strategy that sends what it sends
OURS: dict[str, tuple[str, dict[str, str]]] = {
    "allgather": ("all_gather_kv", {"gradients": "ring"}),
    "alltoall": ("ring_attention", {}),
}


@pytest.mark.parametrize("strategy", ["ring_attention", "all_gather_kv"])
@pytest.mark.parametrize("balanced", [True, False])
def test_a_rank_has_the_positions_that_torch_gives_it(strategy: str, balanced: bool) -> None:
    positions = torch.arange(LENGTH)
    if balanced:
        positions = positions[_HeadTailLoadBalancer(LENGTH, N, "cpu")._generate_indices()[0].long()]
    placement = "zigzag" if balanced else "contiguous"
    for rank, theirs in enumerate(positions.chunk(N)):
        place = Place({"sp": N}, {"sp": rank})
        ours = strategy_class(strategy).configured(place, {"placement": placement})
        assert torch.equal(ours.shard(torch.arange(LENGTH)[None], 1)[0], theirs)


def messages(strategy: str, **options: str) -> Counter[tuple[str, bool, int]]:
    """How many messages of how many bytes of payload, by phase and by whether each is an all-gather; an
    all-to-all of torch's ring goes to one rank whole, as a send does."""
    cell = Cell.model_validate(
        {
            "model": "causal-transformer-tiny-gqa",
            "strategy": strategy,
            "strategy_options": options,
            "sizes": {"sp": N},
            "batch": 2,
            "seq_len": LENGTH,
            "precision": "bf16",
        }
    )
    found: Counter[tuple[str, bool, int]] = Counter()
    for operation, count in trace(cell, N - 1).communication.counts.items():
        if operation.collective in ("all_gather", "all_to_all", "send"):
            gathers = operation.collective == "all_gather"
            found[operation.phase, gathers, operation.payload_bytes] += count
    return found


@pytest.mark.covering(1)
@pytest.mark.parametrize("rotate", OURS)
@pytest.mark.parametrize("placement", ["contiguous", "zigzag"])
def test_messages_are_those_of_torch(rotate: str, placement: str) -> None:
    strategy, options = OURS[rotate]
    ours: Any = messages(strategy, placement=placement, **options)
    theirs = messages("torch_context_parallel", placement=placement, rotate=rotate)
    assert ours == theirs
    assert ours
