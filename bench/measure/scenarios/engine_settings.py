"""Settings that not every cell heeds: on which device its tensors are, which rank is played where an engine
plays one alone, and those that do nothing as its engine does not heed them or they belong to another step.

A setting is refused where none of the cells heeds it that it is given to: those of a group, or of all groups.
Others, of a group with several engines or sizes, may leave it unheeded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import reduce
from typing import Literal

import torch

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.engine import engine_class

Path_ = tuple[str, ...]


def _by_engine(name: str) -> Callable[[Cell], str]:
    def problem(cell: Cell) -> str:
        if name in engine_class(cell.engine).heeds:
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
    return reduce(getattr, path, cell)


#: "available": CUDA where this machine has it, else the CPU
Asked = Literal["cpu", "cuda", "available"]


def on_device(cells: Sequence[Cell], asked: Asked) -> list[Cell]:
    """The cells on the device that is asked for; those of engines that use no device of this machine stay on
    the CPU. UserError if CUDA is asked for, and there is none, or no cell could use it."""
    real = [engine_class(cell.engine).on_devices for cell in cells]
    if asked == "cuda" and cells and not any(real):
        engines = ", ".join(dict.fromkeys(cell.engine for cell in cells))
        raise UserError(f"--device cuda: the engine {engines} uses no device; name one that does by --engine")
    device = chosen_device(asked) if any(real) else "cpu"
    return [
        cell.model_copy(update={"device": device if uses else "cpu"})
        for cell, uses in zip(cells, real, strict=True)
    ]


def chosen_device(asked: Asked) -> Literal["cpu", "cuda"]:
    """The device that is asked for; UserError if CUDA is asked for, and there is none."""
    if asked != "cpu" and torch.cuda.is_available():
        return "cuda"
    if asked != "cuda":
        return "cpu"
    built = "sees no GPU" if torch.version.cuda else "is built for the CPU alone"
    raise UserError(f"--device cuda: torch {torch.__version__} {built}; leave out --device, or use cpu")


def playing_rank(cells: Sequence[Cell], rank: int | None) -> list[Cell]:
    """The cells with the rank that is asked for, which each of them must have; UserError if a cell's engine
    plays all of its ranks, or there is no such rank."""
    if rank is None:
        return list(cells)
    for cell in cells:
        if "rank" not in engine_class(cell.engine).heeds:
            raise UserError(f"--rank {rank}: the engine {cell.engine} does not play one alone; leave it out")
        if rank >= cell.sizes.world:
            raise UserError(
                f"--rank {rank}: {cell.key} has ranks 0 to {cell.sizes.world - 1}; "
                "name one of these, or more ranks by --world-size"
            )
    return [cell.model_copy(update={"rank": rank}) for cell in cells]
