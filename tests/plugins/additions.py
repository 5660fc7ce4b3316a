"""The examples of this folder as additions to spbench: as plug-ins, or as files of the package."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = Path(__file__).parent / "examples"


@dataclass(frozen=True)
class Addition:
    """One thing that is added.

    Attributes:
        file: of the examples; the only file that it takes.
        group: the group of entry points that offers it to spbench.
        room: the folder of the package in which it could be as well.
        entry: of the entry point; "" for the module itself.
    """

    file: str
    group: str
    room: str
    entry: str = ""

    def entry_points(self) -> str:
        """The content of entry_points.txt of a distribution that has it."""
        module = Path(self.file).stem
        return f"[{self.group}]\n{self.entry or f'{module} = {module}'}\n"


ADDITIONS = (
    Addition("gathered_attention.py", "spbench.strategies", "impls/strategies"),
    Addition("one_layer_lm.py", "spbench.models", "impls/models"),
    Addition("two_step_lm.py", "spbench.models", "impls/models"),
    Addition("unbucketed.py", "spbench.backends", "impls/backends"),
    Addition("closed_form.py", "spbench.engines", "bench/measure/engines"),
    Addition("flops.py", "spbench.meters", "bench/measure/trace"),
    Addition("vocabulary.py", "spbench.searches", "bench/measure/engines"),
    Addition("bounds.py", "spbench.answers", "bench/tools/papers/answers"),
    Addition("as_yaml.py", "spbench.forms", "bench/command_line/forms", "yaml = as_yaml:show"),
    Addition(
        "to_prometheus.py", "spbench.exports", "bench/tools/changes", "prometheus = to_prometheus:export"
    ),
    Addition(
        "from_osu_latency.py", "spbench.logs", "bench/tools/calibrate", "osu-latency = from_osu_latency:read"
    ),
    Addition("sizes.py", "spbench.jobs", "bench/tools/jobs", "sizes = sizes:read"),
    Addition("to_sizes.py", "spbench.flags", "bench/tools/jobs", "sizes = to_sizes:flags"),
    Addition("peaks_command.py", "spbench.commands", "bench/tools/run", "peaks = peaks_command:command"),
    Addition("peak_bars.py", "spbench.figures", "plots", "peak_bars = peak_bars:draw"),
)


@dataclass
class Installation:
    """A spbench to which things were added, and a folder to work in.

    Attributes:
        path: of Python: what PYTHONPATH says.
        added: by the example's file: the files that adding it took.
    """

    folder: Path
    path: list[Path]
    added: dict[str, list[Path]] = field(default_factory=dict)

    def spbench(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command spbench, with these arguments, in the folder."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self.path))}
        command = [sys.executable, "-m", "spbench", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300
        )


def as_plugins(folder: Path) -> Installation:
    """Each addition in a distribution of its own, as pip would lay it out."""
    installation = Installation(folder / "work", [ROOT])
    installation.folder.mkdir()
    for addition in ADDITIONS:
        site, name = folder / "site" / addition.file, Path(addition.file).stem
        metadata = site / f"{name}-1.dist-info"
        metadata.mkdir(parents=True)
        (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
        (metadata / "entry_points.txt").write_text(addition.entry_points())
        shutil.copy(EXAMPLES / addition.file, site)
        installation.path.append(site)
        installation.added[addition.file] = list(site.glob("*.py"))
    return installation


def as_files(folder: Path) -> Installation:
    """Each addition as one more file in its room of a copy of the package."""
    installation = Installation(folder / "work", [folder / "copy"])
    installation.folder.mkdir()
    package = folder / "copy" / "spbench"
    ignored = shutil.ignore_patterns("__pycache__", "*.png", "*.svg", "*.pdf", "*.jsonl")
    shutil.copytree(ROOT / "spbench", package, ignore=ignored)
    for addition in ADDITIONS:
        before = set(package.rglob("*"))
        shutil.copy(EXAMPLES / addition.file, package / addition.room)
        installation.added[addition.file] = list(set(package.rglob("*")) - before)
    return installation
