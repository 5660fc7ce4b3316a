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
    of_all_gather_kv,
    of_dsp,
    of_experts,
    of_lasp,
    of_ring_attention,
    of_ring_self_attention,
    of_tensor_parallel,
    of_ulysses,
    of_usp,
)
from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle
from torch.distributed.device_mesh import DeviceMesh

import spbench
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
#: what a bar of a pipeline's timeline is
PHASES: dict[str, dict[str, Any]] = {
    "forward": {"fc": "#30437e"},
    "backward": {"fc": "#e59a3c"},
    "optimizer": {"fc": "#c4c4c4"},
}
WIDTH_INCHES, DPI = 5.0, 150


def draw_held(of_rank: Callable[[DeviceMesh], Iterator[Held]], sizes: dict[str, int]) -> Figure:
    """A row of panels for each moment, a panel for each rank of a mesh of these sizes."""
    by_rank = LockstepRanks().run(sizes, _listed, of_rank)
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
        sizes: of the mesh on which its ranks lie.
        held: by the name of the picture, what a rank holds.
        traced: by the name of the picture, the options that choose a cell of the page's scenario.
        stages: whether the timeline is that of a pipeline: the whole step, by phase.
    """

    sizes: dict[str, int]
    held: dict[str, Callable[[DeviceMesh], Iterator[Held]]] = field(default_factory=dict)
    traced: dict[str, list[str]] = field(default_factory=dict)
    stages: bool = False


_SP = {"sp": RANKS}
_PLACED = "strategy_options.placement="
CHAPTERS = {
    "tensor_parallelism": Chapter(
        {"tp": RANKS}, {"tensor_parallelism": of_tensor_parallel}, {"tensor_parallelism": []}
    ),
    "ring_self_attention": Chapter(_SP, {"rsa": of_ring_self_attention}, {"rsa": []}),
    "ring_attention": Chapter(
        _SP,
        {name: partial(of_ring_attention, placement=name) for name in ("contiguous", "zigzag")},
        {name: ["--where", _PLACED + name] for name in ("contiguous", "zigzag")},
    ),
    "all_gather_kv": Chapter(_SP, {"all_gather_kv": of_all_gather_kv}, {"all_gather_kv": []}),
    "ulysses": Chapter(_SP, {"ulysses": of_ulysses}, {"ulysses": []}),
    "usp": Chapter({"cp": 2, "sp": 2}, {"usp": of_usp}, {"usp": []}),
    "lasp": Chapter(
        _SP, {"lasp": of_lasp}, {"lasp": ["--strategy", "lasp"], "lasp2": ["--strategy", "lasp2"]}
    ),
    "dsp": Chapter(_SP, {"dsp": of_dsp}, {"dsp": ["--strategy", "dsp"]}),
    "fsdp_and_pipelines": Chapter(
        {"pp": RANKS}, traced={"pipeline": ["--where", "training.micro_batches=8"]}, stages=True
    ),
    "experts": Chapter(_SP, {"experts": of_experts}, {"experts": ["--variant", "skewed"]}),
}


def traced(page: Path, options: list[str]) -> list[dict[str, Any]]:
    """The events of all ranks in the simulated step of a cell of the page's last scenario."""
    *_, scenario = re.findall(r'```yaml title="[\w.]+"\n(.+?)```', page.read_text(), re.DOTALL)
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
    return _with_legend(figure, BARS)


def draw_stages(events: list[dict[str, Any]]) -> Figure:
    """A step of a pipeline on all ranks: which micro-batch goes forward or backward when."""
    figure, ax = plt.subplots(figsize=(WIDTH_INCHES, 2.4), layout="constrained")
    worked = [e for e in events if e["ph"] == "X" and e["cat"] == "compute" and _kind(e) != "waiting"]
    start = min(event["ts"] for event in worked)
    for event in worked:
        left, width = (event["ts"] - start) / 1e3, event["dur"] / 1e3
        look = PHASES.get(event["args"]["phase"], PHASES["optimizer"])
        ax.add_patch(Rectangle((left, event["pid"] + 0.1), width, 0.8, lw=0, **look))
    ax.set(xlim=(0, max(e["ts"] + e["dur"] - start for e in worked) / 1e3), ylim=(RANKS, 0))
    ax.set_yticks([rank + 0.5 for rank in range(RANKS)], [f"stage {rank}" for rank in range(RANKS)])
    ax.tick_params(labelsize=9, length=0)
    ax.set_title("One step (milliseconds)", fontsize=10, loc="left")
    ax.spines[["top", "right", "left"]].set_visible(False)
    return _with_legend(figure, PHASES)


def _with_legend(figure: Figure, looks: dict[str, dict[str, Any]]) -> Figure:
    figure.legend(
        handles=[Patch(label=kind, lw=0.3, **{"ec": "white", **look}) for kind, look in looks.items()],
        loc="outside lower center",
        ncols=len(looks),
        fontsize=8,
        frameon=False,
        columnspacing=1,
        handlelength=1.5,
    )
    return figure


#: of the picture of memory: strategies with their axis, and lengths
KEPT = {"tensor_parallel": "tp", "megatron_sp": "tp", "ring_attention": "sp"}
LENGTHS = (8192, 16384, 32768, 65536)


def draw_memory() -> Figure:
    """What a rank holds at its peak, by length and strategy."""
    cells = [
        spbench.Cell(
            model="causal-transformer-1b", strategy=strategy, sizes={axis: RANKS}, batch=1, seq_len=length,
            precision="bf16", cluster="dgx-a100",
        )
        for length in LENGTHS
        for strategy, axis in KEPT.items()
    ]  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        spbench.run(cells, output=folder, jobs=0)
        rows = [json.loads(line) for line in (Path(folder) / "cells.jsonl").read_text().splitlines()]
    of_cell = {(row["cell"]["seq_len"], row["cell"]["strategy"]): row["measurement"] for row in rows}
    figure, ax = plt.subplots(figsize=(WIDTH_INCHES, 2.6), layout="constrained")
    for number, (strategy, color) in enumerate(zip(KEPT, COLORS, strict=False)):
        for group, length in enumerate(LENGTHS):
            held = of_cell[length, strategy]["peak_held"]
            states = sum(held[name] for name in ("parameters", "gradients", "optimizer_state")) / 2**30
            at = {"x": group + 0.27 * number - 0.4, "width": 0.25, "align": "edge", "color": color}
            ax.bar(height=sum(held.values()) / 2**30, label=None if group else strategy, **at)
            ax.bar(height=states, hatch="////", ec="white", lw=0, **at)
    ax.set_xticks(range(len(LENGTHS)), [f"{length:,}" for length in LENGTHS])
    ax.set_xlabel("positions", fontsize=9)
    ax.set_ylabel("GiB on a rank", fontsize=9)
    ax.tick_params(labelsize=9, length=0)
    ax.spines[["top", "right"]].set_visible(False)
    states = Patch(fc="#c4c4c4", ec="white", hatch="////", lw=0, label="weights, gradients, optimizer")
    ax.legend(handles=[*ax.get_legend_handles_labels()[0], states], fontsize=8, frameon=False)
    return figure


def save(figure: Figure, name: str) -> None:
    figure.savefig(HERE / "images" / f"{name}.png", dpi=DPI)
    plt.close(figure)


def main(chapters: list[str]) -> None:
    mpl.use("agg")
    mpl.rcParams |= {"font.family": "DejaVu Sans", "hatch.linewidth": 0.7}
    if not chapters:
        save(draw_memory(), "memory_by_length")
    for name in chapters or CHAPTERS:
        chapter = CHAPTERS[name]
        for picture, held in chapter.held.items():
            save(draw_held(held, chapter.sizes), f"{picture}_held")
        for picture, options in chapter.traced.items():
            draw = draw_stages if chapter.stages else draw_timeline
            save(draw(traced(HERE / f"{name}.md", options)), f"{picture}_timeline")


if __name__ == "__main__":
    main(sys.argv[1:])
