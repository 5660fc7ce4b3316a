"""On which device the tensors of cells are, and which rank is played where an engine plays one alone."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.engine import engine_property, heeded

#: "available": CUDA where this machine has it, else the CPU
Asked = Literal["cpu", "cuda", "available"]

#: of NVIDIA's driver, and of what stands for it in Windows' Linux
_DRIVERS = ("/dev/nvidiactl", "/dev/dxg")


def on_device(cells: Sequence[Cell], asked: Asked) -> list[Cell]:
    """The cells on the device that is asked for; those of engines that use no device of this machine stay on
    the CPU. UserError if CUDA is asked for, and there is none, or no cell could use it."""
    real = [engine_property(cell.engine, "on_devices") for cell in cells]
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
    if asked == "cpu" or (asked == "available" and not _may_have_gpu()):
        return "cpu"
    import torch  # takes seconds, which listings do without

    if torch.cuda.is_available():
        return "cuda"
    if asked == "available":
        return "cpu"
    built = "sees no GPU" if torch.version.cuda else "is built for the CPU alone"
    raise UserError(f"--device cuda: torch {torch.__version__} {built}; leave out --device, or use cpu")


def _may_have_gpu() -> bool:
    """Whether CUDA could be here, as far as is known without torch: the driver's files are there."""
    return sys.platform != "linux" or any(Path(file).exists() for file in _DRIVERS)


def playing_rank(cells: Sequence[Cell], rank: int | None) -> list[Cell]:
    """The cells with the rank that is asked for, which each of them must have; UserError if a cell's engine
    plays all of its ranks, or there is no such rank."""
    if rank is None:
        return list(cells)
    for cell in cells:
        if "rank" not in heeded(cell.engine):
            raise UserError(f"--rank {rank}: the engine {cell.engine} does not play one alone; leave it out")
        if rank >= cell.sizes.world:
            raise UserError(
                f"--rank {rank}: {cell.key} has ranks 0 to {cell.sizes.world - 1}; "
                "name one of these, or more ranks by --world-size"
            )
    return [cell.model_copy(update={"rank": rank}) for cell in cells]
