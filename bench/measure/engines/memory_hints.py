"""What would need less memory than a rank that does not fit: only what the cell could be changed to."""

from __future__ import annotations

from math import prod

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.rank_memory import RankMemory
from spbench.impls.options import set_options
from spbench.impls.registries import backends

_STATES = ("parameters", "gradients", "optimizer_state")


def needs(memory: RankMemory, cell: Cell) -> str:
    """What a rank of the cell that does not fit would need, and what would need less."""
    peak = memory.peak
    if memory.failure is not None and memory.failure.steps_fit:
        steps, setup = (each.nbytes / 2**30 for each in (peak, memory.setup))
        words = f"the steps fit at {steps:.1f} GiB, set-up does not: {setup:.1f} GiB"
        if cell.sizes.pp > 1:
            return words
        return (
            f"{words}; initialise on the meta device, as the backends zero2 and zero3 do (initialize: meta)"
        )
    words = f"the step needs {peak.nbytes / 2**30:.1f} GiB at its peak"
    if sum(peak.held.get(name, 0) for name in _STATES) > peak.nbytes / 2:
        return f"{words}, most of it for model states, {_fewer_states(cell)}"
    if peak.held.get("activations", 0) > peak.nbytes / 2:
        return f"{words}, most of it for activations, of which recomputation keeps fewer"
    return words


def _fewer_states(cell: Cell) -> str:
    """What would hold fewer model states: another backend, where replicas and stages allow it."""
    known, name = backends(), cell.training.backend
    here, sizes = known[name], cell.sizes.by_axis
    replicas = prod(n for axis, n in sizes.items() if axis not in ("pp", "tp"))
    options = set_options(here.options_type(), cell.training.backend_options, name)
    if replicas > 1 and not getattr(options, "distributed_optimizer", True):
        return "of which distributed_optimizer shards the optimizer's over replicas"
    able = [each for each in known.values() if each.searched and (each.pipelined or cell.sizes.pp == 1)]
    most = max(able, key=lambda each: len(each.shares_out or ()))
    if replicas > 1 and here.shares_out is not None and here.shares_out < (most.shares_out or frozenset()):
        return f"which the backend {most.name} shards over replicas"
    return "of which ranks along tp or pp hold fewer"
