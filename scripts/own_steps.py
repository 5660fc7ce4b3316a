"""Compare training steps that run as their programs have them with what the programs' authors printed, and
with the suite's own models of the same jobs.

    python scripts/own_steps.py FOLDER [--jobs TEXT ...]

FOLDER gets an environment with torchtitan 0.3.0, transformers and accelerate from the registry, on top of
this one, if FOLDER has none; own_steps/requirements.txt lists the packages. Their models, parallelize
functions and registries are not changed. The jobs are in own_steps/jobs.yaml; ``--jobs`` takes those whose
names have one of the texts.

For each job rank 0 is traced twice: the step of own_steps/, and the cell that ``spbench import`` makes of
the package's registry with the step's settings, or, for transformers, a cell of the same config.json. The
script prints a line of reserved memory, peaks and bytes sent, and under the line every collective and every
kind of tensor at the peak in which the two differ. FOLDER/own_steps.csv keeps the lines.
"""

import argparse
import csv
import importlib.util
import os
import subprocess
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure import expand
from spbench.bench.measure.engines.class_traces import ClassTraces
from spbench.bench.measure.engines.own_steps import StepTraces, step_cell, trace_step
from spbench.bench.measure.engines.virtual import trace_classes
from spbench.bench.measure.steps.step_file import OwnStep
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from spbench.bench.tools.jobs.torchtitan import read
from spbench.bench.yaml_files import read_yaml

STEPS = Path(__file__).with_suffix("")
CLUSTER = "h100-sxm-96gb"
SEGMENTS = "expandable_segments:True"
GIB, MIB = 2**30, 2**20
#: differences that are left out: of a collective's bytes (numbers, such as norms), and of a kind at the peak
LEAST_MIB, LEAST_GIB = 0.1, 0.005
COLUMNS = (
    *("job", "source", "printed_gib", "reserved_gib", "reserved_error_pct", "peak_gib", "own_peak_gib"),
    *("peak_difference_pct", "sent_mib", "own_sent_mib", "own_reserved_gib"),
)


@dataclass(frozen=True)
class Job:
    """A line of own_steps/jobs.yaml.

    Attributes:
        step: FILE:FUNCTION in own_steps.
        registry: MODULE:FUNCTION of the package, which makes the job's configuration; "": see ``cell``.
        sets: what the step sets in this configuration: expressions by attribute.
        cell: a group of a scenario.
        segments: whether the allocator has expandable segments.
        printed: GiB reserved at most, as the authors printed them in ``source``.
    """

    name: str
    step: str
    ranks: int
    registry: str = ""
    sets: Mapping[str, str] = field(default_factory=dict)
    cell: Mapping[str, Any] = field(default_factory=dict)
    segments: bool = True
    printed: float | None = None
    source: str = ""

    def traced(self) -> ClassTraces:
        """The trace of rank 0 of the step."""
        cell = self._allocating(step_cell(f"{STEPS / self.step}", self.ranks, CLUSTER))
        trace = trace_step(OwnStep.of(cell), cell, 0)
        return StepTraces.of(cell, [trace], [[*range(self.ranks)]], [0])

    def modelled(self) -> ClassTraces:
        """The traces of the suite's own cell."""
        return trace_classes(self._allocating(self._imported() if self.registry else self._of_scenario()))

    def _allocating(self, cell: Cell) -> Cell:
        training = {**cell.training.model_dump(), "cuda_alloc_conf": SEGMENTS if self.segments else None}
        return Cell.model_validate({**cell.model_dump(), "training": training})

    def _of_scenario(self) -> Cell:
        (cell,) = expand({}, [{**self.cell, "cluster": CLUSTER, "engine": "virtual"}], {}, "", STEPS)
        return cell

    def _imported(self) -> Cell:
        """The cell of the registry's function, in a copy of its file with a function that sets ``sets``."""
        module, _, function = self.registry.partition(":")
        found = importlib.util.find_spec(module)
        assert found is not None
        assert found.origin is not None
        lines = "".join(f"    config.{name} = {value}\n" for name, value in self.sets.items())
        own = (
            f"def {function}_job() -> Trainer.Config:\n    config = {function}()\n{lines}    return config\n"
        )
        text = f"{Path(found.origin).read_text(encoding='utf-8')}\n\n{own}"
        file = JobFile(Path(found.origin), text.encode(), f"{function}_job")
        job = read(JobFiles([file], self.ranks, CLUSTER, {}))
        assert job is not None
        return job.cell()


def jobs(texts: list[str]) -> list[Job]:
    """The jobs whose names have one of the texts; all without texts."""
    every = read_yaml(STEPS / "jobs.yaml")["jobs"]
    asked = (name for name in every if not texts or any(text in name for text in texts))
    return [Job(name, **every[name]) for name in asked]


def sent_mib(traces: ClassTraces) -> dict[str, float]:
    """The MiB that a rank sends in a step, by collective."""
    sent: defaultdict[str, float] = defaultdict(float)
    for entry in traces.memory_measurement().communication:
        sent[f"{entry['collective']} in {entry['phase']}"] += entry["sent_bytes"] / MIB
    return dict(sent)


def held_gib(traces: ClassTraces) -> dict[str, float]:
    """The GiB at the peak, by kind of tensor."""
    log = traces.worst().memory
    held: defaultdict[str, float] = defaultdict(float)
    for kind, _, nbytes, _ in log.parts_at_peak():
        held[log.CATEGORIES[kind].replace("_", " ")] += nbytes / GIB
    return dict(held)


def differences(one: Mapping[str, float], other: Mapping[str, float], least: float) -> Iterator[str]:
    """A line for each part in which the step and the suite's own cell differ by at least ``least``."""
    for name in sorted({*one, *other}):
        ours, theirs = other.get(name, 0.0), one.get(name, 0.0)
        if abs(ours - theirs) >= least:
            yield f"{name}: {theirs:,.2f} in the step, {ours:,.2f} in the cell ({ours - theirs:+,.2f})"


def compared(job: Job) -> tuple[dict[str, Any], list[str]]:
    """A row of the table, and the lines in which the step differs from the suite's own cell."""
    step, cell = job.traced(), job.modelled()
    measured, own = step.memory_measurement(), cell.memory_measurement()
    sent, own_sent = sent_mib(step), sent_mib(cell)
    reserved, peak = measured.reserved_memory_bytes or 0, measured.peak_memory_bytes or 0
    own_peak = own.peak_memory_bytes or 0
    row = {
        "job": job.name,
        "source": job.source,
        "printed_gib": job.printed,
        "reserved_gib": round(reserved / GIB, 2),
        "reserved_error_pct": job.printed and round(100 * (reserved / GIB / job.printed - 1), 1),
        "peak_gib": round(peak / GIB, 2),
        "own_peak_gib": round(own_peak / GIB, 2),
        "peak_difference_pct": round(100 * (own_peak / peak - 1), 2),
        "sent_mib": round(sum(sent.values())),
        "own_sent_mib": round(sum(own_sent.values())),
        "own_reserved_gib": round((own.reserved_memory_bytes or 0) / GIB, 2),
    }
    lines = [f"MiB sent, {line}" for line in differences(sent, own_sent, LEAST_MIB)]
    lines += [f"GiB at the peak, {line}" for line in differences(held_gib(step), held_gib(cell), LEAST_GIB)]
    return row, lines


def environment(folder: Path) -> Path:
    """The Python of an environment in ``folder`` that has this environment's packages and those of
    own_steps/requirements.txt, which is made if it does not exist."""
    python = folder / "bin" / "python"
    ready = folder / "ready"
    if not ready.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        query = [python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])"]
        inner = subprocess.run(query, check=True, capture_output=True, text=True).stdout.strip()
        Path(inner, "project.pth").write_text(f"{sysconfig.get_paths()['purelib']}\n", encoding="utf-8")
        install = [python, "-m", "pip", "install", "--quiet", "--no-deps", "-r", STEPS / "requirements.txt"]
        subprocess.run(install, check=True)
        ready.touch()
    return python


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="gets the environment and own_steps.csv")
    parser.add_argument("--jobs", nargs="*", default=[], metavar="TEXT", help="jobs whose names have a TEXT")
    asked = parser.parse_args()
    if Path(sys.prefix).resolve() != asked.folder.resolve():
        python = environment(asked.folder)
        # torch.compile and its like would start while modules are imported
        environ = {**os.environ, "TORCHDYNAMO_DISABLE": "1"}
        raise SystemExit(subprocess.run([python, *sys.argv], env=environ).returncode)
    with (asked.folder / "own_steps.csv").open("w", newline="", encoding="utf-8") as file:
        table = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        table.writeheader()
        for job in jobs(asked.jobs):
            row, lines = compared(job)
            table.writerow(row)
            file.flush()
            print("| " + " | ".join(str("" if row[name] is None else row[name]) for name in COLUMNS) + " |")
            print(*(f"  {line}" for line in lines), sep="\n", flush=True)


if __name__ == "__main__":
    main()
