"""The examples of this folder as additions to spbench: plug-ins, and files of the package."""

import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
EXAMPLES = Path(__file__).parent / "examples"


@dataclass(frozen=True)
class Addition:
    """One thing that is added.

    Attributes:
        file: of the examples; the only file that it takes.
        group: the group of entry points that offers it to spbench; "": it is a file of the package.
        room: the folder of the package in which it is, or could be as well.
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
    Addition("gathered_over_gp.py", "spbench.strategies", "impls/strategies"),
    Addition("one_layer_lm.py", "spbench.models", "impls/models"),
    Addition("two_step_lm.py", "spbench.models", "impls/models"),
    Addition("unbucketed.py", "spbench.backends", "impls/backends"),
    Addition("two_level.py", "spbench.backends", "impls/backends"),
    Addition("closed_form.py", "spbench.engines", "bench/measure/engines"),
    Addition("flops.py", "", "bench/measure/trace"),
    Addition("vocabulary.py", "", "bench/measure/engines"),
    Addition("bounds.py", "", "bench/tools/papers/answers"),
    Addition("as_yaml.py", "", "bench/command_line/forms"),
    Addition("to_influx.py", "", "bench/tools/changes"),
    Addition("from_osu_latency.py", "", "bench/tools/calibrate"),
    Addition("sizes.py", "spbench.jobs", "bench/tools/jobs", "sizes = sizes:read"),
    Addition("plain_trainer.yaml", "", "bench/tools/jobs"),
    Addition("to_sizes.py", "", "bench/tools/jobs"),
    Addition("peaks_command.py", "spbench.commands", "bench/tools/run", "peaks = peaks_command:command"),
    Addition("peak_bars.py", "spbench.figures", "plots", "peak_bars = peak_bars:draw"),
)


@dataclass
class Installation:
    """A spbench to which things were added, and a folder to work in.

    Attributes:
        path: of Python: what PYTHONPATH says.
    """

    folder: Path
    path: list[Path]

    def spbench(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        """The command spbench, with these arguments, in the folder."""
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, self.path))}
        command = [sys.executable, "-m", "spbench", *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=300
        )


def with_additions(folder: Path) -> Installation:
    """A copy of the package with one more file for each addition that has no entry point, and beside it the
    others in a distribution each, as pip would lay them out."""
    installation = Installation(folder / "work", [folder / "copy"])
    installation.folder.mkdir()
    package = folder / "copy" / "spbench"
    ignored = shutil.ignore_patterns("__pycache__", "*.png", "*.svg", "*.pdf", "*.jsonl")
    shutil.copytree(ROOT / "spbench", package, ignore=ignored)
    for addition in ADDITIONS:
        room = package / addition.room
        if addition.group:
            room, name = folder / "site" / addition.file, Path(addition.file).stem
            metadata = room / f"{name}-1.dist-info"
            metadata.mkdir(parents=True)
            (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1\n")
            (metadata / "entry_points.txt").write_text(addition.entry_points())
            installation.path.append(room)
        shutil.copy(EXAMPLES / addition.file, room)
    return installation
