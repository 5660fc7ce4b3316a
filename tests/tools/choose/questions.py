"""Questions about a model whose traces take moments, and cards of a chosen size."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measurement import Outcome
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.asking import Task
from spbench.bench.tools.choose.question import Question, question
from spbench.bench.tools.choose.references import Depths, Reference

MODEL = "causal-transformer-tiny"
#: settings that save memory, and what one sample takes with them, both made up
SAVINGS: dict[str, dict[str, Any]] = {"": {}, '{"recompute": "full"}': {"recompute": "full"}}
REFERENCES = {
    "": Reference(Depths(0.09, 0.12), Depths(3.5 * 2**30, 5.0 * 2**30)),
    '{"recompute": "full"}': Reference(Depths(0.1, 0.14), Depths(2.1 * 2**30, 2.2 * 2**30)),
}


def asked(gpus: int, cluster: str = "dgx-a100", seq_len: int = 256, batch: int = 16, **more: Any) -> Question:
    """A question about the tiny model.

    Args:
        more: of :func:`question`, ``settings`` by dotted name, and ``model`` in place of it.
    """
    settings = {"seq_len": seq_len, "batch": batch, **more.pop("settings", {})}
    return question((more.pop("model", MODEL),), Asked(cluster, gpus, None, settings), **more)


def small_cards(folder: Path, mib: int) -> str:
    """A cluster of A100 with that many usable MiB; returns its path."""
    path = folder / f"small-{mib}.yaml"
    path.write_text(
        f"""
about: for tests
extends: dgx-a100
device:
  memory_total_bytes: {{value: {(mib + 10) * 2**20}, source: made up}}
  memory_context_bytes: {{value: {10 * 2**20}, source: made up}}
"""
    )
    return str(path)


def measured(step_s: float = 1.0, nbytes: int = 2**30, usable: int = 2**31, **more: Any) -> dict[str, Any]:
    """A measurement, made up, of a cell whose step takes so long and whose tensors need so many bytes."""
    made_up = {
        "status": "ok" if nbytes <= usable else "oom",
        "step_time_s": step_s,
        "tokens_per_s": 4096 / step_s,
        "mfu": 0.4,
        "peak_memory_bytes": nbytes,
        "usable_memory_bytes": usable,
        "by_class": [],
        "formula": [],
        "breakdown": {"exposed_communication_s": 0.0, "bubble_s": 0.0},
        "parts": {},
        "bound": "matmul",
        "rates": "sourced",
    }
    return made_up | more


class Answers:
    """In place of :class:`Asking`: each cell has the measurement that a function says.

    Attributes:
        cells: those that were looked at.
    """

    jobs = 2

    def __init__(self, measurement_of: Callable[[Cell], Mapping[str, Any]]):
        self.measurement_of, self.cells = measurement_of, list[Cell]()

    def __call__(
        self, tasks: Sequence[Task], enough: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[Task, Outcome]]:
        for task in tasks:
            if enough():
                return
            self.cells.append(task.cell)
            measurement = self.measurement_of(task.cell)
            yield task, Outcome(measurement["status"], measurement=measurement)
