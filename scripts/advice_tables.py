"""Answer the questions of results/advice/README.md: the best layouts of each, and the seconds of the search.

    python scripts/advice_tables.py [NAME...]

writes results/advice/layouts.csv and questions.csv, in which an answer replaces the earlier lines of its
question, and the table between the marks of that page. No trace is kept between two questions. CPU seconds
are right on any machine; seconds by the clock are kept only if other programs used little of the machine.
"""

import csv
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from spbench.bench.command_line.progress import message
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measured_code import code_digest
from spbench.bench.tools.choose.advice import Advice
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.layout_search import answered
from spbench.bench.tools.choose.question import question
from spbench.plots.axes import length_text

FOLDER = Path("results", "advice")
PAGE = Path("results", "advice", "README.md")
BEGIN, END = "<!-- scripts/advice_tables.py -->", "<!-- end -->"
_K, _M = 2**10, 2**20
#: the precision of questions on clusters that have no rates of bf16, by cluster
PRECISION = {"piz-daint-p100": "fp16"}
#: the questions by name: model, cluster, GPUs, sequence length, tokens of a batch
QUESTIONS: Mapping[str, tuple[str, str, int, int, int]] = {
    "8b-8-8k": ("llama3-8b", "dgx-h100", 8, 8 * _K, _M),
    "8b-8-128k": ("llama3-8b", "dgx-h100", 8, 128 * _K, _M),
    "8b-8-1m": ("llama3-8b", "dgx-h100", 8, _M, _M),
    "8b-64-8k": ("llama3-8b", "dgx-h100", 64, 8 * _K, 4 * _M),
    "8b-64-128k": ("llama3-8b", "dgx-h100", 64, 128 * _K, 4 * _M),
    "8b-64-1m": ("llama3-8b", "dgx-h100", 64, _M, 4 * _M),
    "bert-64": ("bert-large", "piz-daint-p100", 64, 4 * _K, 256 * _K),
    "tnl-64": ("tnl-1b", "dgx-a100", 64, 128 * _K, 4 * _M),
    "st-dit-128": ("st-dit-3b", "dgx-h100", 128, 256 * _K, 4 * _M),
    "70b-64-8k": ("llama3-70b", "dgx-h100", 64, 8 * _K, 4 * _M),
    "70b-64-128k": ("llama3-70b", "dgx-h100", 64, 128 * _K, 4 * _M),
    "8b-512-8k": ("llama3-8b", "dgx-h100", 512, 8 * _K, 16 * _M),
    "70b-512-8k": ("llama3-70b", "dgx-h100", 512, 8 * _K, 16 * _M),
    "8b-8-8k-a100": ("llama3-8b", "dgx-a100", 8, 8 * _K, _M),
    "8b-64-8k-a100": ("llama3-8b", "dgx-a100", 64, 8 * _K, 4 * _M),
    "8b-64-128k-a100": ("llama3-8b", "dgx-a100", 64, 128 * _K, 4 * _M),
    "qwen3-64-32k": ("qwen3-30b-a3b", "dgx-h100", 64, 32 * _K, 4 * _M),
    "qwen3-64-128k": ("qwen3-30b-a3b", "dgx-h100", 64, 128 * _K, 4 * _M),
    "mixtral-128-128k": ("mixtral-8x22b", "dgx-h100", 128, 128 * _K, 8 * _M),
    "deepseek-1024-4k": ("deepseek-v3", "dgx-h100", 1024, 4 * _K, 64 * _M),
    "deepseek-256-32k": ("deepseek-v3", "dgx-h100", 256, 32 * _K, 16 * _M),
}
_COUNTS = (
    *("looked at", "cannot be", "need too much by the estimate"),
    "too slow by the estimate, or too large after traces of their strategy",
    *("cannot be run", "traced with few layers", "of these with all layers"),
)
#: how many layouts of a tie the page names after the best one
_TIES = 1
#: the share of the cores' time that other programs may use on a machine that counts as idle
_IDLE = 0.15


def main(names: Sequence[str]) -> None:
    """Ask the questions of these names, or all questions if there are no names, and write the results."""
    for name in names or QUESTIONS:
        model, cluster, gpus, length, tokens = QUESTIONS[name]
        with tempfile.TemporaryDirectory() as cache:
            os.environ[CACHE_FOLDER] = cache
            settings = {"seq_len": length, "precision": PRECISION.get(cluster, "bf16")}
            asked = question([model], Asked(cluster, gpus, None, settings), tokens)
            before = _busy_s()
            (answer,) = answered([asked], say=lambda text, share: message(text))
            of_others = _busy_s() - before - answer.cpu_s
        keep(name, answer, idle=of_others < _IDLE * answer.seconds * (os.cpu_count() or 1))
    write_page()


def _busy_s() -> float:
    """The seconds for which the cores were busy since the machine was started, summed over cores."""
    times = psutil.cpu_times()
    return times.user + times.system + getattr(times, "nice", 0.0)


def keep(name: str, answer: Advice, idle: bool) -> None:
    """Put an answer into the files; the answer's seconds by the clock only if the machine was idle."""
    of_question = {
        "name": name,
        **answer.asked,
        "seconds": round(answer.seconds, 1) if idle else "",
        "cpu_s": round(answer.cpu_s, 1),
        "code": code_digest(),
        **{what: answer.result.counts[what] for what in _COUNTS},
        "why": answer.why(),
    }
    FOLDER.mkdir(parents=True, exist_ok=True)
    _replace(FOLDER / "questions.csv", name, [of_question])
    # intervals are left out, because the version that reads the file computes them
    ends = {"step_time_low_s", "step_time_high_s"}
    lines = [{what: value for what, value in line.items() if what not in ends} for line in answer.table()]
    _replace(FOLDER / "layouts.csv", name, [{"name": name, **line} for line in lines])


def _replace(path: Path, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
    kept = [line for line in _read(path) if line["name"] != name]
    order = [*QUESTIONS]
    every = sorted([*kept, *lines], key=lambda line: order.index(line["name"]))
    if every:
        with path.open("w", newline="", encoding="utf-8") as file:
            columns = [*dict.fromkeys(name for line in every for name in line)]
            writer = csv.DictWriter(file, columns, lineterminator="\n")
            writer.writeheader()
            writer.writerows(every)


def _read(path: Path) -> list[dict[str, str]]:
    if not path.exists():
        return []
    with path.open(newline="", encoding="utf-8") as file:
        return [*csv.DictReader(file)]


def write_page() -> None:
    """Write the table of the page from layouts.csv and questions.csv."""
    best: dict[str, dict[str, str]] = {}
    ties: dict[str, list[str]] = {}
    for line in _read(FOLDER / "layouts.csv"):
        best.setdefault(line["name"], line)
        if line["tie"] == "True":
            ties.setdefault(line["name"], []).append(f"{line['strategy']} {line['mesh']}")
    heads = ["model", "GPUs", "length", "best", "tokens/s per GPU", "MFU", "tie with"]
    rows = [f"| {' | '.join(heads)} |", "| --- " * len(heads) + "|"]
    for line in _read(FOLDER / "questions.csv"):
        layout = best.get(line["name"])
        cells = [line["model"], f"{line['gpus']} {line['cluster']}", length_text(int(line["seq_len"]))]
        if layout is None:
            cells += ["nothing fits", *[""] * 3]
        else:
            rate = float(layout["tokens_per_s"]) / int(line["gpus"])
            others = [
                each for each in ties.get(line["name"], []) if not each.startswith(f"{layout['strategy']} ")
            ]
            cells += [
                f"{layout['strategy']} {layout['mesh']}, {layout['backend']}",
                f"{float(f'{rate:.3g}'):,.0f}",
                f"{float(layout['mfu']):.0%}" if layout["mfu"] else "",
                ", ".join([*others[:_TIES], *([f"{len(others) - _TIES} more"] if others[_TIES:] else [])]),
            ]
        rows.append(f"| {' | '.join(cells)} |")
    text = PAGE.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n" + "\n".join(rows) + f"\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
