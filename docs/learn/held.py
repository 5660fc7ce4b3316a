"""Which rank holds what: four ranks in turns run the strategies' own code on numbers of positions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.engines import tracing  # noqa: F401  registers the fake groups of single ranks
from spbench.impls.collectives import Ring, ring
from spbench.impls.dispatchers.all_to_all import AllToAll
from spbench.impls.dispatchers.dispatcher import Counts
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.place import Place
from spbench.impls.routing import RoutingPlan
from spbench.impls.strategies.all_gather_kv import AllGatherKV, gathered
from spbench.impls.strategies.dsp import DynamicSequenceParallel
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.nesting import nesting
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ring_self_attention import RingSelfAttention
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import HEADS, Ulysses

RANKS, POSITIONS, HEAD_COUNT = 4, 8, 4
#: rows and columns of the panels of experts
SIDES = ("expert", "position")


@dataclass
class Held:
    """What a rank holds at one moment, in rows and columns.

    Attributes:
        moment: what it is and when; the same on all ranks.
        text: of each cell, the number of its position; "" where the rank does not hold it.
        home: of each cell, the rank that held it first, for its colour; None: all ranks hold the same.
        strength: of each cell, from 0 to 1.
        note: below the cells.
        sides: what rows and columns are.
    """

    moment: str
    text: list[list[str]]
    home: Callable[[int, int], int | None]
    strength: Tensor | None = None
    note: str = ""
    sides: tuple[str, str] = ("head", "position")


def _cells(held: Callable[[int, int], bool], rows: int = HEAD_COUNT, columns: int = POSITIONS) -> Any:
    return [[str(column) if held(row, column) else "" for column in range(columns)] for row in range(rows)]


def _home(row: int, position: int) -> int:
    """The rank whose contiguous chunk has a position."""
    return position // (POSITIONS // RANKS)


def _of_positions(moment: str, positions: Tensor, home: Any = _home, **more: Any) -> Held:
    """All heads of these positions."""
    mine = set(positions.flatten().tolist())
    return Held(moment, _cells(lambda _, position: position in mine), home, **more)


def of_tensor_parallel(mesh: DeviceMesh) -> Iterator[Held]:
    strategy = TensorParallel(Place.on(mesh))
    positions = strategy.shard(torch.arange(POSITIONS), 0)
    yield _of_positions("Hidden states between blocks: the same on all ranks", positions, lambda *_: None)
    # a layer whose features are the heads says which of them this rank projects to
    layer = strategy.linear_in(HEAD_COUNT, HEAD_COUNT)
    heads = set(layer.weight.spbench_shard.of(torch.arange(HEAD_COUNT)).tolist())
    cells = _cells(lambda head, _: head in heads)
    yield Held("Q, K and V inside attention: some heads, all positions", cells, lambda head, _: head)


def of_ring_self_attention(mesh: DeviceMesh) -> Iterator[Held]:
    strategy = RingSelfAttention(Place.on(mesh))
    own = strategy.shard(torch.arange(POSITIONS), 0)
    yield _of_positions("Queries: they stay", own)
    for step, (_, keys) in enumerate(ring(own, strategy.group)):
        yield _of_positions(f"Keys at step {step}", keys)
    rows = set(own.tolist())
    scores = [[str(key) if query in rows else "" for key in range(POSITIONS)] for query in range(POSITIONS)]
    yield Held("Scores after the round: own queries, all keys", scores, _home, sides=("query", "key"))


def of_ring_attention(mesh: DeviceMesh, placement: str) -> Iterator[Held]:
    strategy = RingAttention.configured(Place.on(mesh), {"placement": placement})
    whole = torch.arange(POSITIONS)
    own, homes = strategy.shard(whole, 0), {}
    for rank in range(RANKS):
        other = RingAttention.planned(RANKS, rank, {"placement": placement})
        homes |= dict.fromkeys(other.shard(whole, 0).tolist(), rank)
    meetings = strategy.meetings(own.view(1, 1, -1, 1), placement)
    assert strategy.group is not None
    for step, (owner, (keys,)) in enumerate(Ring(strategy.group).round(own)):
        seen, pairs = torch.zeros(POSITIONS), 0
        if (met := meetings.of(owner)) is not None:
            mine, theirs, causal = met
            queries, visible = len(own[mine]), keys[theirs]
            seen[visible] = 1.0
            pairs = queries * (queries + 1) // 2 if causal else queries * len(visible)
        yield _of_positions(
            f"Keys at step {step}" + (": its own, as its queries" if step == 0 else ""),
            keys,
            lambda _, position: homes[position],
            strength=seen.expand(HEAD_COUNT, -1),
            note=f"{pairs} pairs" if pairs else "nothing to do",
        )


def of_all_gather_kv(mesh: DeviceMesh) -> Iterator[Held]:
    strategy = AllGatherKV.configured(Place.on(mesh), {"placement": "zigzag"})
    whole, homes = torch.arange(POSITIONS), {}
    for rank in range(RANKS):
        other = AllGatherKV.planned(RANKS, rank, {"placement": "zigzag"})
        homes |= dict.fromkeys(other.shard(whole, 0).tolist(), rank)
    own = strategy.shard(whole, 0)
    assert strategy.group is not None
    rows = own.view(1, 1, -1, 1).float()
    keys = gathered(rows, rows, strategy.group)[..., 0].flatten().int()
    seen = [int((keys <= query).sum()) for query in own]
    for moment, positions, note in (
        ("Queries: they stay", own, ""),
        ("Keys after the all-gather", keys, f"{sum(seen)} pairs"),
    ):
        yield _of_positions(moment, positions, lambda _, position: homes[position], note=note or " ")


def of_usp(mesh: DeviceMesh) -> Iterator[Held]:
    usp = nesting("ulysses+ring_attention")
    options, numbers = {"placement": "zigzag"}, torch.arange(POSITIONS)
    places = [Place.of_rank({"cp": 2, "sp": 2}, rank) for rank in range(RANKS)]
    chunks = [usp.configured(place, options).shard(numbers, 0) for place in places]
    homes = {int(position): rank for rank, chunk in enumerate(chunks) for position in chunk}

    def held(moment: str, heads: range, positions: Tensor) -> Held:
        mine = set(positions.tolist())
        cells = _cells(lambda head, position: head in heads and position in mine)
        return Held(moment, cells, lambda _, position: homes[position])

    strategy = usp.configured(Place.on(mesh), options)
    assert isinstance(strategy, Ulysses)
    assert isinstance(strategy.within, RingAttention)
    assert strategy.within.group is not None
    own = strategy.shard(numbers, 0)
    rows = own.view(1, 1, -1, 1).expand(1, HEAD_COUNT, -1, 1).contiguous()
    swapped = strategy.to_heads(rows)
    yield held("Q, K and V after the projections", range(HEAD_COUNT), own)
    half = range(HEAD_COUNT // 2 * strategy.rank, HEAD_COUNT // 2 * (strategy.rank + 1))
    yield held("Q during attention: it stays", half, swapped[0, 0, :, 0])
    for step, (_, (keys,)) in enumerate(Ring(strategy.within.group).round(swapped[0, 0, :, 0].contiguous())):
        yield held(f"Keys at step {step} of the ring", half, keys)


def of_ulysses(mesh: DeviceMesh) -> Iterator[Held]:
    strategy = Ulysses(Place.on(mesh))
    numbers = torch.arange(HEAD_COUNT * POSITIONS).view(1, HEAD_COUNT, POSITIONS, 1)
    own = strategy.shard(numbers, 2)
    swapped = strategy.to_heads(own)
    for moment, x in (
        ("Q, K and V after the projections", own),
        ("Q, K and V during attention", swapped),
        ("Output after the last all-to-all", strategy.to_positions(swapped, own.shape[HEADS])),
    ):
        mine = set(x.flatten().tolist())
        yield Held(moment, _cells(lambda h, position: h * POSITIONS + position in mine), _home)  # noqa: B023


class _WatchedLasp(Lasp):
    """LASP that remembers the state that it receives."""

    state: Tensor | None = None

    def receive(self, peer: int, k: Tensor, v: Tensor) -> Tensor | None:
        self.state = super().receive(peer, k, v)
        return self.state


def of_lasp(mesh: DeviceMesh) -> Iterator[Held]:
    strategy = _WatchedLasp(Place.on(mesh))
    own = strategy.shard(torch.arange(POSITIONS), 0)
    yield _of_positions("Q, K and V: they stay", own)
    # keys that say their position, values of one: the state's row says how much of a position it has
    keys = torch.nn.functional.one_hot(own, POSITIONS).float().view(1, 1, -1, POSITIONS)
    values, rate = torch.ones(1, 1, len(own), 1), torch.tensor([0.25])
    strategy.linear_attention(keys, keys, values, DecayMask(rate))
    received = torch.zeros(POSITIONS) if strategy.state is None else strategy.state.flatten()
    yield _of_positions(
        "The state it receives: a sum over these positions",
        received.nonzero(),
        strength=received.expand(HEAD_COUNT, -1),
        note="D x A a head" if received.any() else "none",
    )


def of_dsp(mesh: DeviceMesh) -> Iterator[Held]:
    strategy, sizes = DynamicSequenceParallel(Place.on(mesh)), (RANKS, POSITIONS)
    numbers = torch.arange(sizes[0] * sizes[1]).view(1, *sizes, 1)
    grid = strategy.split(numbers, strategy.grid_dim)
    names = {1: "Spatial attention (along the rows)", 0: "Temporal attention (along the columns)"}
    stages = [1, 0]
    for stage, cut in zip(stages, strategy.plan_grid(stages, sizes), strict=True):
        grid = strategy.along(grid, stage, cut)
        mine = set(grid.x.flatten().tolist())
        cells = _cells(lambda t, s: t * sizes[1] + s in mine, *sizes)  # noqa: B023
        yield Held(names[stage], cells, lambda time, _: time, sides=("time", "place"))


def of_experts(mesh: DeviceMesh) -> Iterator[Held]:
    """Four experts, one a rank, of which each position goes to two."""
    place = Place.on(mesh, {"sp": RANKS, "ep": RANKS})
    plan = RoutingPlan("zipf:1:3", HEAD_COUNT, per_token=2)
    experts = torch.from_numpy(plan.of_positions(POSITIONS))
    chosen = torch.zeros(POSITIONS, HEAD_COUNT, dtype=torch.bool).scatter_(1, experts, value=True)
    parts = torch.arange(POSITIONS).chunk(RANKS)
    sent = np.stack([chosen[part].sum(0).numpy() for part in parts])
    own = Ulysses(place).shard(torch.arange(POSITIONS), 0)
    dispatcher, x = AllToAll(place, HEAD_COUNT, "plain"), own[:, None].float()
    there = dispatcher.dispatch(x, torch.ones(len(own), HEAD_COUNT), chosen[own], Counts(sent))

    def panel(moment: str, held: Callable[[int, int], bool], note: str) -> Held:
        return Held(moment, _cells(held), lambda _, position: _home(0, position), note=note, sides=SIDES)

    mine, rows = set(own.tolist()), set(there.rows.flatten().int().tolist())
    yield panel(
        "What the router chooses for own positions: two experts each",
        lambda expert, position: position in mine and bool(chosen[position, expert]),
        f"sends {2 * len(own)} rows",
    )
    yield panel(
        "After dispatch: the rows of the rank's own expert",
        lambda expert, position: expert == dispatcher.ep_rank and position in rows,
        f"{len(there.rows)} row{'s' * (len(there.rows) != 1)}",
    )
    back = dispatcher.to_tokens(
        dispatcher.send_back(dispatcher.to_ranks(there.rows, there.state), there.state), there.state
    )
    home = set((back / 2).flatten().int().tolist())
    cells = _cells(lambda _, position: position in home, rows=1)
    sides = ("", "position")
    yield Held("After they are back: the sums for own positions", cells, _home, note=" ", sides=sides)
