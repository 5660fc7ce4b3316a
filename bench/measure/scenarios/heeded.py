"""Settings that do nothing in a cell: those that its engine does not heed, or that belong to another step.

A setting is refused where none of the cells heeds it that it is given to: those of a group, or of all groups.
Others, of a group with several engines or sizes, may leave it unheeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.engine import heeded

Path_ = tuple[str, ...]


def _by_engine(name: str) -> Callable[[Cell], str]:
    def problem(cell: Cell) -> str:
        if name in heeded(cell.engine):
            return ""
        return f"the engine {cell.engine} does not heed it"

    return problem


def _of_learning(cell: Cell) -> str:
    return "a training run gives losses alone, and does not heed it" if cell.learning is not None else ""


def _of_pipelines(cell: Cell) -> str:
    return "" if cell.sizes.pp > 1 else "there are no pipeline stages to schedule"


def _of_training(cell: Cell) -> str:
    return "" if cell.training.step == "training" else "an inference step has no optimizer"


#: what keeps a cell from heeding a setting, by the setting's path; "" where it heeds it
_PROBLEMS: Mapping[Path_, Sequence[Callable[[Cell], str]]] = {
    ("rank",): (_by_engine("rank"), _of_learning),
    ("timing",): (_by_engine("timing"), _of_learning),
    ("meters",): (_by_engine("meters"), _of_learning),
    ("training", "schedule"): (_of_pipelines,),
    ("training", "stage_layers"): (_of_pipelines,),
    ("training", "moments"): (_by_engine("training.moments"), _of_training),
    ("training", "steps"): (_by_engine("training.steps"), _of_learning),
    ("training", "batch_on_device"): (_by_engine("training.batch_on_device"),),
    ("training", "alloc_retries"): (_by_engine("training.alloc_retries"), _of_learning),
}
_DEFAULTS = Cell(model="", strategy="", batch=1, seq_len=1)


def ignored(cells: Sequence[Cell]) -> Iterator[tuple[Path_, str]]:
    """The settings that some of the cells have and none of them heeds, each with why and what to do."""
    for path, problems in _PROBLEMS.items():
        given = [cell for cell in cells if _at(cell, path) != _at(_DEFAULTS, path)]
        reasons = [next(filter(None, (problem(cell) for problem in problems)), "") for cell in given]
        if given and all(reasons):
            yield path, f"{reasons[0]}; leave it out"
    for cell in cells:
        if cell.rank is not None and cell.rank >= cell.sizes.world:
            yield ("rank",), f"there is no rank {cell.rank}: give one from 0 to {cell.sizes.world - 1}"
            break


def _at(cell: Cell, path: Path_) -> object:
    found: object = cell
    for name in path:
        found = getattr(found, name)
    return found
