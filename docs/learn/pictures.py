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
from held import (
    RANKS,
    Held,
    of_dsp,
    of_experts,
    of_lasp,
    of_ring_attention,
    of_ring_self_attention,
    of_tensor_parallel,
    of_ulysses,
)
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.engines import tracing  # noqa: F401  registers the fake groups of single ranks
from spbench.bench.measure.processes.lockstep_ranks import LockstepRanks

HERE = Path(__file__).parent
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
