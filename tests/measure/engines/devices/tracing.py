"""Traces on the accelerator beside traces on the fake CPU, in a process of its own, as JSON.

``python -m tests.measure.engines.devices.tracing LIBRARY few|all`` prints {"traces": how many were compared,
"problems": what was not as on the CPU, "planted": for each fault of :mod:`planted` what was raised}.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves_with_path

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import rank_classes
from spbench.bench.measure.engines.setup import record_step
from spbench.bench.measure.engines.traces import Trace
from spbench.bench.measure.engines.tracing import fake_mesh, no_cyclic_collection
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.registries import all_backends, all_models, all_strategies
from spbench.impls.strategies.nesting import all_pairs, nesting
from tests.cells import make_cell
from tests.measure.engines.cells import differing_fields, supported
from tests.measure.engines.devices import accelerator

TINY = [name for name in all_models() if "-tiny" in name]
#: a strategy, a model and a backend; the other backends do what one of these does
FEW = (
    ("ring_self_attention", "bert-tiny", "legacy_ddp"),
    ("lasp2", "tnl-tiny", "zero1"),
    ("tensor_parallel", "causal-transformer-tiny", "zero3"),
    ("dsp", "transformer-2d-tiny", "fsdp_flat"),
)


class ElsewhereError(AssertionError):
    """An operator of the step has a tensor of another device."""


class OneDevice(Recorder):
    """A recorder that raises :class:`ElsewhereError` where an argument or a result of an operator of the step
    is not on the mesh's device. torch itself lets tensors without dims be mixed with those of other devices.
    """

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._check(func, "argument", (args, kwargs))
        result = super()._run(func, args, kwargs)
        self._check(func, "result", result)
        return result

    def _check(self, func: Any, what: str, values: Any) -> None:
        if not self.memory.log.marks:  # inputs are drawn on the CPU, before the step
            return
        for path, x in tree_leaves_with_path(values):
            if isinstance(x, Tensor) and x.device.type != self.memory.device:
                phase, where = self.memory.log.marks[-1][0], "".join(map(str, path))
                raise ElsewhereError(f"{phase}: {func}: {what} {where} {list(x.shape)} is on {x.device}")


def cell_of(strategy: str, model: str, backend: str, pp: int = 1) -> Cell | None:
    """Two ranks along each axis of a strategy, two replicas, loss scaling; None where that cannot be."""
    sizes = {**dict.fromkeys(nesting(strategy).axes, 2), "dp": 2, "pp": pp}
    training = {"backend": backend, "micro_batches": pp}
    cell = make_cell(model, strategy, sizes, 4, 24, "fp16", training=training)
    return cell if supported(cell) else None


def every_combination() -> Iterator[tuple[str, str, str, int]]:
    """Strategy, model, backend and pipeline stages: the whole product, nested strategies on two backends."""
    for model in TINY:
        for strategy in all_strategies():
            yield from ((strategy, model, backend, 1) for backend in all_backends())
            yield from ((strategy, model, name, 2) for name, cls in all_backends().items() if cls.pipelined)
        for pair in all_pairs():
            yield from ((pair.name, model, backend, 1) for backend in ("legacy_ddp", "zero3"))


def covering(combinations: Iterable[tuple[str, str, str, int]]) -> list[tuple[str, str, str, int]]:
    """A fifth of these combinations, in which any two of a strategy, a model and a backend with its stages
    that can be together still are: what leaves a tensor on the CPU is one of them, or between two."""
    possible, seen = [each for each in combinations if cell_of(*each) is not None], set[Any]()
    chosen = []
    for least in (3, 2, 1):  # those first that bring more new pairs
        for each in possible:
            strategy, model, *backend = each
            parts = enumerate([strategy, model, tuple(backend)])
            if len(new := {*itertools.combinations(parts, 2)} - seen) >= least:
                chosen.append(each)
                seen |= new
    return chosen


def traced(cell: Cell, rank: int, device: str) -> Trace:
    """The trace of a rank on fake tensors of that device type."""
    with fake_mesh(cell.mesh_sizes, rank, device) as mesh, no_cyclic_collection():
        recorder = OneDevice(mesh, events=True)
        with FakeTensorMode(), recorder:
            record_step(cell, mesh, recorder)
        return Trace.of(cell, rank, recorder)


def differences(ours: Trace, theirs: Trace) -> list[str]:
    """What is not the same in the steps of two traces: live bytes when it begins, each birth and death in it,
    its peak and what holds that, communication, and the program. Set-ups differ in how inputs are drawn, and
    of streams an event log knows those of the CPU alone, on which virtual ranks are."""
    (held, births), (their_held, their_births) = (_step_memory(trace.memory) for trace in (ours, theirs))
    found = ["held"] * (held != their_held) + ["memory"] * (not np.array_equal(births, their_births))
    found += ["peak"] * (ours.memory.peak() != theirs.memory.peak())
    found += ["communication"] * (ours.communication.counts != theirs.communication.counts)
    return found + ([] if theirs.program.stream.any() else differing_fields(ours.program, theirs.program))


def _step_memory(log: MemoryLog) -> tuple[int, np.ndarray]:
    change = log.signed_bytes()
    return int(change[: log.step_start].sum()), change[log.step_start :]


def compared(cells: Iterable[Cell]) -> tuple[int, list[str]]:
    """The number of ranks of cells that were traced on both devices, one a class, and what was wrong."""
    count, problems = 0, []
    for cell in cells:
        for each in rank_classes(cell):
            count += 1
            name = f"{cell.key} {cell.training.backend} rank {each.first}"
            try:
                found = differences(*(traced(cell, each.first, on) for on in (accelerator.NAME, "cpu")))
            except Exception as error:
                found = [f"{type(error).__name__}: {error}"]
            if found:
                problems.append(f"{name}: {', '.join(found)}")
    return count, problems


def main(library: str, selection: str) -> None:
    """Register the accelerator, trace, and print what was found."""
    from tests.measure.engines.devices import planted

    accelerator.register(Path(library))
    chosen = FEW if selection == "few" else covering(every_combination())
    cells = [cell for combination in chosen if (cell := cell_of(*combination)) is not None]
    count, problems = compared(cells)
    print(json.dumps({"traces": count, "problems": problems, "planted": planted.raised()}))


if __name__ == "__main__":
    main(*sys.argv[1:])
