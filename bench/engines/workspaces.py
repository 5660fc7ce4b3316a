"""Workspaces that libraries keep for ever: what they take of a cell's cards."""

from __future__ import annotations

from spbench.bench.cell import Cell
from spbench.bench.clusters.cluster import load_cluster
from spbench.impls.layout import Unsupported


def workspace_bytes(cell: Cell) -> dict[str, int]:
    """Bytes of each workspace on the cell's cluster, by the name that :attr:`Device.workspaces` has for the
    library; cuBLAS's as ``training.cublas_workspace`` says, if it does."""
    figures = load_cluster(cell.cluster).device.workspaces
    found: dict[str, int] = {name: figure.value or 0 for name, figure in figures.items()}
    config = cell.training.cublas_workspace
    return found if config is None else {**found, "cublas": configured_bytes(config)}


def configured_bytes(config: str) -> int:
    """Bytes of a CUBLAS_WORKSPACE_CONFIG, pairs of KiB and count as in ":4096:2:16:8", as torch adds them
    up."""
    numbers = [int(number) for number in config.split(":")[1:]]
    return sum(kib * 2**10 * count for kib, count in zip(numbers[::2], numbers[1::2], strict=True))


def refuse_workspace_config(cell: Cell) -> None:
    """Raise :class:`Unsupported` if a cell that runs on real devices sets cuBLAS's workspace, which its
    processes read from their environment."""
    if cell.training.cublas_workspace is not None:
        raise Unsupported(
            f"the engine {cell.engine} does not set training.cublas_workspace",
            "leave it out, and set CUBLAS_WORKSPACE_CONFIG in the environment",
        )
