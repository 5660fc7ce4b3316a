"""The pictures of docs/learn: which rank holds what, and when each rank computes and sends.

    python docs/learn/pictures.py [CHAPTER ...]

Who holds what is asked of the strategies themselves: four ranks in turns in this process run their code on
numbers of positions. Timelines are those of ``spbench trace`` for the scenario in the chapter's page. Both
are written into docs/learn/images.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
import torch
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.engines import tracing  # noqa: F401  registers the fake groups of single ranks
from spbench.bench.measure.processes.lockstep_ranks import LockstepRanks
from spbench.impls.axes import Place
from spbench.impls.collectives import Ring, ring
from spbench.impls.dispatchers.all_to_all import AllToAll
from spbench.impls.dispatchers.dispatcher import Counts
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.routing import RoutingPlan
from spbench.impls.strategies.dsp import DynamicSequenceParallel
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ring_self_attention import RingSelfAttention
from spbench.impls.strategies.tensor_parallel import TensorParallel
from spbench.impls.strategies.ulysses import HEADS, Ulysses

HERE = Path(__file__).parent
RANKS, POSITIONS, HEAD_COUNT = 4, 8, 4
#: a colour for each rank, from dark to light so that they differ in grey too, and one for what all ranks have
COLORS, SHARED = ("#30437e", "#2f8a8f", "#e59a3c", "#f7dfa0"), "#d9d9d9"
#: what a bar of a timeline is, from dark to light, and how it is filled
BARS: dict[str, dict[str, Any]] = {
    "matmul": {"fc": "#30437e"},
    "attention": {"fc": "#e59a3c"},
    "other work": {"fc": "#c4c4c4"},
    "waiting": {"fc": "white", "hatch": "....", "ec": "#999999"},
    "sending": {"fc": "#2f8a5b", "hatch": "//////", "ec": "#d5e8dd"},
}
WIDTH_INCHES, DPI = 5.0, 150
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


def draw_held(of_rank: Callable[[DeviceMesh], Iterator[Held]], axis: str) -> Figure:
    """A row of panels for each moment, a panel for each rank."""
    by_rank = LockstepRanks().run({axis: RANKS}, _listed, of_rank)
    moments, heights = len(by_rank[0]), [len(held.text) for held in by_rank[0]]
    around = 0.68 if by_rank[0][0].note else 0.48
    size = WIDTH_INCHES, sum(0.13 * height + around for height in heights) + 0.25
    figure, panels = plt.subplots(
        moments, RANKS, figsize=size, squeeze=False, layout="constrained", height_ratios=heights
    )
    for rank, moments_of_rank in enumerate(by_rank):
        for held, ax in zip(moments_of_rank, panels[:, rank], strict=True):
            _draw_panel(ax, held)
            ax.set_title(f"\nrank {rank}", fontsize=9, loc="left", linespacing=1.7)
            if rank == 0:
                ax.set_ylabel(held.sides[0], fontsize=8)
                # a line above the ranks, for which the title has room
                above = ax.annotate(held.moment, (0, 1), (0, 17), "axes fraction", "offset points")
                above.set(in_layout=False, fontweight="bold", fontsize=9.5)
            ax.set_xlabel(held.note or (held.sides[1] if held is moments_of_rank[-1] else ""), fontsize=8)
    return figure


def _listed(mesh: DeviceMesh, of_rank: Callable[[DeviceMesh], Iterator[Held]]) -> list[Held]:
    return [*of_rank(mesh)]


def _draw_panel(ax: Axes, held: Held) -> None:
    rows, columns = len(held.text), len(held.text[0])
    for row in range(rows):
        for column in range(columns):
            color, text = "white", held.text[row][column]
            if text:
                home = held.home(row, column)
                color = SHARED if home is None else COLORS[home]
            strength = 1.0 if held.strength is None else float(held.strength[row, column])
            alpha = 0.25 + 0.75 * strength if text else 1.0
            ax.add_patch(Rectangle((column, row), 1, 1, fc=color, alpha=alpha, ec="none"))
            ax.add_patch(Rectangle((column, row), 1, 1, fc="none", ec="#bbbbbb", lw=0.4))
            if text:
                dark = color in COLORS[:2] and alpha > 0.6
                middle = {"ha": "center", "va": "center", "fontsize": 7}
                ax.text(column + 0.5, row + 0.54, text, color="white" if dark else "#222222", **middle)
    ax.set(xlim=(0, columns), ylim=(rows, 0), xticks=[], yticks=[], aspect="equal")


@dataclass
class Chapter:
    """What is drawn of a page.

    Attributes:
        axis: of the mesh, along which its ranks lie.
        held: by the name of the picture, what a rank holds.
        traced: by the name of the picture, the options that choose a cell of the page's scenario.
    """

    axis: str
    held: dict[str, Callable[[DeviceMesh], Iterator[Held]]] = field(default_factory=dict)
    traced: dict[str, list[str]] = field(default_factory=dict)


_PLACED = "strategy_options.placement="
CHAPTERS = {
    "tensor_parallelism": Chapter(
        "tp", {"tensor_parallelism": of_tensor_parallel}, {"tensor_parallelism": []}
    ),
    "ring_self_attention": Chapter("sp", {"rsa": of_ring_self_attention}, {"rsa": []}),
    "ring_attention": Chapter(
        "sp",
        {name: partial(of_ring_attention, placement=name) for name in ("contiguous", "zigzag")},
        {name: ["--where", _PLACED + name] for name in ("contiguous", "zigzag")},
    ),
    "ulysses": Chapter("sp", {"ulysses": of_ulysses}, {"ulysses": []}),
    "lasp": Chapter(
        "sp", {"lasp": of_lasp}, {"lasp": ["--strategy", "lasp"], "lasp2": ["--strategy", "lasp2"]}
    ),
    "dsp": Chapter("sp", {"dsp": of_dsp}, {"dsp": ["--strategy", "dsp"]}),
    "experts": Chapter("sp", {"experts": of_experts}, {"experts": ["--variant", "skewed"]}),
}


def traced(page: Path, options: list[str]) -> list[dict[str, Any]]:
    """The events of all ranks in the simulated step of a cell of the page's scenario."""
    (scenario,) = re.findall(r'```yaml title="[\w.]+"\n(.+?)```', page.read_text(), re.DOTALL)
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "page.yaml").write_text(scenario)
        command = [sys.executable, "-m", "spbench", "trace", "page.yaml", "--quiet", "--ranks", "0,1,2,3"]
        subprocess.run([*command, *options], cwd=folder, check=True, stdout=subprocess.DEVNULL)
        return json.loads((Path(folder) / "trace.json").read_text())["traceEvents"]


def _kind(event: dict[str, Any]) -> str:
    if event["cat"] == "communication":
        return "sending"
    if event["name"].startswith("wait"):
        return "waiting"
    described = event["args"].get("class", "memory")
    return described if described == "attention" else "other work" if "memory" in described else "matmul"


def draw_timeline(events: list[dict[str, Any]]) -> Figure:
    """Forward and backward of the layer on all ranks: computing above, sending below. The part of each phase
    that is drawn is that around its messages."""
    events = [
        each for each in events if each["ph"] == "X" and each["cat"] != "phase" and each["name"] != "recv"
    ]
    figure, panels = plt.subplots(2, 1, figsize=(WIDTH_INCHES, 4.2), layout="constrained")
    for ax, phase in zip(panels, ("forward", "backward"), strict=True):
        of_phase = [each for each in events if each["args"]["phase"] == phase]
        sent = [each for each in of_phase if each["cat"] == "communication"]
        start, end = min(e["ts"] for e in sent), max(e["ts"] + e["dur"] for e in sent)
        margin = max((end - start) * 0.12, 300)
        for event in of_phase:
            bottom = event["pid"] + (0.53 if event["cat"] == "communication" else 0.08)
            left, width = (event["ts"] - start) / 1e3, event["dur"] / 1e3
            look = {"ec": "white", **BARS[_kind(event)]}
            ax.add_patch(Rectangle((left, bottom), width, 0.42, lw=0.3, **look))
        ax.set(xlim=(-margin / 1e3, (end - start + margin) / 1e3), ylim=(RANKS, 0))
        ax.set_yticks([rank + 0.5 for rank in range(RANKS)], [f"rank {rank}" for rank in range(RANKS)])
        ax.tick_params(labelsize=9, length=0)
        ax.set_title(f"{phase.capitalize()} (milliseconds)", fontsize=10, loc="left")
        ax.spines[["top", "right", "left"]].set_visible(False)
    legend = [Patch(label=kind, lw=0.3, **{"ec": "white", **look}) for kind, look in BARS.items()]
    figure.legend(
        handles=legend,
        loc="outside lower center",
        ncols=5,
        fontsize=8,
        frameon=False,
        columnspacing=1,
        handlelength=1.5,
    )
    return figure


def save(figure: Figure, name: str) -> None:
    figure.savefig(HERE / "images" / f"{name}.png", dpi=DPI)
    plt.close(figure)


def main(chapters: list[str]) -> None:
    mpl.use("agg")
    mpl.rcParams |= {"font.family": "DejaVu Sans", "hatch.linewidth": 0.7}
    for name in chapters or CHAPTERS:
        chapter = CHAPTERS[name]
        for picture, held in chapter.held.items():
            save(draw_held(held, chapter.axis), f"{picture}_held")
        for picture, options in chapter.traced.items():
            save(draw_timeline(traced(HERE / f"{name}.md", options)), f"{picture}_timeline")


if __name__ == "__main__":
    main(sys.argv[1:])
