"""The trace of a rank: the real training step of one rank of N, on fake tensors and a fake process group.

Tensors have no data, so a laptop plays any rank of any world at the paper's full shapes. The measurements
come from the same meters that watch real ranks.

Pipeline stages whose modules have the same form do the same work in an action of the same kind
(:mod:`measure.engines.rank_turns`), however many micro-batches they hold. So a short step of one such stage
is traced, and the other stages' traces are put together from its parts (:mod:`measure.engines.turn_parts`).
"""

import gc
import logging
import os
import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from math import prod

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.cell_schedule import puts_off, turns_of
from spbench.bench.measure.engines.deepened_traces import DeepTrace, Effort, few_layers
from spbench.bench.measure.engines.listed import NotAlike
from spbench.bench.measure.engines.plan import RankClass, check_sizes, plan, stage_module
from spbench.bench.measure.engines.rank_turns import RankTurns
from spbench.bench.measure.engines.setup import record_step, workspace_bytes
from spbench.bench.measure.engines.traces import Trace, kept_trace
from spbench.bench.measure.engines.turn_parts import program_of, put_together
from spbench.bench.measure.processes.starting import MEET, environment_with
from spbench.bench.measure.trace import torch_internals
from spbench.bench.measure.trace.meter import meter_classes
from spbench.bench.measure.trace.recorder import FastRecorder, Recorder
from spbench.impls import Turns, Unsupported, backend_class, device_mesh, whole_mesh

#: environment variable: if set and not empty, every operator takes the plain path of :class:`Recorder`, every
#: layer, step of a ring and stage of a pipeline is run, no trace is read from disk, and every
#: rank is simulated (:mod:`measure.simulator.simulate`)
PLAIN_TRACE = "SPBENCH_PLAIN_TRACE"

_log = logging.getLogger(__name__)


@contextmanager
def no_cyclic_collection() -> Iterator[None]:
    """Within the context, Python collects no reference cycles, because tensors in a trace must die by the
    program, and because the collector would often walk over millions of live objects and free none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def only_plain_traces() -> AbstractContextManager[None]:
    """Within the context, this process and its child processes take the plain path (:data:`PLAIN_TRACE`)."""
    return environment_with({PLAIN_TRACE: "1"})


def takes_plain_path() -> bool:
    """Whether this process takes the plain path; see :data:`PLAIN_TRACE`."""
    return bool(os.environ.get(PLAIN_TRACE))


@contextmanager
def fake_mesh(
    sizes: Mapping[str, int], rank: int, device: str = "cpu", backend: str = "fake"
) -> Iterator[DeviceMesh]:
    """Yields the device mesh of ``rank`` in a world of fake ranks.

    Args:
        sizes: the number of ranks along each axis, in the order of the mesh; an absent axis has 1 rank.
        device: the type of the tensors' device.
        backend: a backend of torch.distributed whose groups need no other process.
    """
    if dist.is_initialized():
        raise RuntimeError("a process group exists already; the virtual engine makes its own")
    ranks, hook = prod(whole_mesh(sizes).values()), sys.excepthook
    with environment_with({MEET: "0"}):  # nobody else comes to the store
        dist.init_process_group(backend, rank=rank, world_size=ranks, store=torch_internals.FakeStore())
        try:
            yield device_mesh(sizes, device)
        finally:
            dist.destroy_process_group()
            sys.excepthook = hook  # torch's, which names the rank, would stay


def trace(
    cell: Cell,
    rank: int = 0,
    *,
    events: bool = False,
    effort: Effort = "proved",
    checked: bool = False,
    turns: Turns | None = None,
) -> Trace:
    """Run the steps of ``rank`` on fake tensors and return the trace, with the workspaces of the cell's
    cluster; with ``events`` also the order of operators and communication, which a step time needs.

    Args:
        effort: how many layers are run. "whole": all layers. "proved": models of 3, 4 and 5 layers, from
            which the trace is put together if the proof holds; else all layers. "guess": models of 3 and 5
            layers, from which the trace is put together without a proof if possible; else all layers. "few":
            in place of a guess the trace of 3 layers, which suffices to tell which program runs. Further
            meters and the plain path (:data:`PLAIN_TRACE`) always run all layers.
        checked: whether the cell was planned before; planning takes as long as building all its modules.
        turns: see :func:`record_step`.

    Raises:
        Unsupported: the strategy cannot run these sizes.
    """
    if not checked:
        plan(cell)
    if cell.meters or takes_plain_path():
        rank_trace = _traced(cell, rank, events, turns)
    else:
        # a trace that is put together is not kept on disk: writing takes longer than putting it together
        together = _put_together(cell, rank, events, effort, turns)
        rank_trace = together or _kept(cell, rank, events, turns)
    return replace(rank_trace, memory=rank_trace.memory.with_workspaces(workspace_bytes(cell)))


#: the name of :func:`trace` outside this package, in which ``trace`` is the name of a package
trace_rank = trace


def _put_together(cell: Cell, rank: int, events: bool, effort: Effort, turns: Turns | None) -> Trace | None:
    """The trace put together from the traces of few layers; None if that is not quicker, or not exact."""
    try:
        few = few_layers(cell, rank, effort)
        if few is None:
            return None
        if effort == "few":
            return _kept(few.sources[0], rank, events, turns)
        deep = DeepTrace(*(_kept(each, rank, events, turns) for each in few.sources), grows=few.grows)
        if few.proof is not None:
            ours, theirs = deep.by(1), _kept(few.proof, rank, events, turns)
            if not ours.same(theirs) or ours.memory.places != theirs.memory.places:
                raise NotAlike("what is put together is not what is traced")
        return replace(deep.by(few.more), cell=cell)
    except (NotAlike, Unsupported) as error:
        _log.info("%s is traced with all layers: %s", cell.key, error)
        return None


def _kept(cell: Cell, rank: int, events: bool, turns: Turns | None = None) -> Trace:
    """The trace of a rank with all layers of the cell, read from disk if it is kept there."""
    return kept_trace(_traced, cell, rank, events, turns)


def _traced(cell: Cell, rank: int, events: bool, turns: Turns | None = None) -> Trace:
    torch_internals.check_internals()
    further = meter_classes(cell.meters)
    with fake_mesh(cell.mesh_sizes, rank) as mesh, torch.random.fork_rng(devices=[]), no_cyclic_collection():
        mode = torch_internals.FakeTensorMode()
        recorder: Recorder
        cache: AbstractContextManager[None]
        if further or takes_plain_path():
            recorder, cache = Recorder(mesh, events=events, further=further), nullcontext()
        else:
            # the recorder's memory answers before the mode's own cache, which would only cost time
            recorder = FastRecorder(mode, mesh, events=events)
            cache = torch_internals.disable_fake_tensor_cache(mode)
        with mode, recorder, cache, torch_internals.too_large_unsupported():
            record_step(cell, mesh, recorder, turns=turns)
        return Trace.of(cell, rank, recorder)


#: traces of short steps, by the form of a stage's modules and the turns of the step
ShortSteps = dict[Hashable, dict[RankTurns, Trace]]


def without_one(cell: Cell, classes: Sequence[RankClass], traces: Sequence[Trace]) -> list[Trace]:
    """The traces of rank classes, with programs of one micro-batch less. The missing one is neither the first
    nor the last in any stretch of a step. The memory logs stay those of all micro-batches.

    Raises:
        NotAlike: the schedule is not 1F1B, or the cell has too few micro-batches.
    """
    count, schedule, fewer = cell.training.micro_batches, cell.training.schedule, []
    if schedule != "1f1b" or count < cell.sizes.pp + 2 or puts_off(cell):
        raise NotAlike("turns of several runs of layers, or too few of them")
    for each, traced in zip(classes, traces, strict=True):
        assert traced.program is not None
        program, _ = program_of(traced.program, _turns(cell, each), _turns(cell, each, count - 1))
        fewer.append(replace(traced, program=program))
    return fewer


def stage_traces(
    cell: Cell,
    classes: Sequence[RankClass],
    *,
    events: bool,
    micro_batches: int | None = None,
    short: ShortSteps | None = None,
) -> list[Trace]:
    """The trace of the first rank of each class in ``classes``, for a cell that was planned before.
    ``events``: see :func:`trace`.

    Args:
        micro_batches: the number in the step, if fewer than in the cell; inputs are those of the cell.
        short: the short steps that were traced before, to which further short steps are added.

    Raises:
        NotAlike: no short step determines the trace with fewer micro-batches.
    """
    if cell.sizes.pp == 1 or cell.meters or takes_plain_path():
        return [trace(cell, each.first, events=events, checked=True) for each in classes]
    alike: dict[tuple[Hashable, RankTurns, RankTurns], list[int]] = {}
    for each in classes:
        whole, turns = _turns(cell, each), _turns(cell, each, micro_batches)
        alike.setdefault((_form(cell, each), whole, turns), []).append(each.first)
    short, traces = {} if short is None else short, dict[int, Trace]()
    for (form, whole, turns), ranks in alike.items():
        traced = short.setdefault(form, {})
        made = _from_short_step(turns, whole, traced, cell, ranks[0])
        if made is None:
            if turns != whole:
                raise NotAlike(f"ranks {ranks} are traced whole")
            _log.info("ranks %s of %s are traced whole", ranks, cell.key)
            made = trace(cell, ranks[0], events=events, checked=True)
        made = made if events else replace(made, program=None)
        traces |= {rank: replace(made, rank=rank) for rank in ranks}
    return [traces[each.first] for each in classes]


def trace_of_class(cell: Cell, ranks: RankClass, *, events: bool = False, effort: Effort = "proved") -> Trace:
    """The trace of the first rank of one class; arguments as of :func:`trace`. ``effort`` has no effect on
    pipeline stages, whose traces are always proved."""
    if cell.sizes.pp > 1:
        check_sizes(cell)
        return stage_traces(cell, [ranks], events=events)[0]
    return trace(cell, ranks.first, events=events, effort=effort)


def _turns(cell: Cell, each: RankClass, micro_batches: int | None = None) -> RankTurns:
    backend = backend_class(cell.training.backend)
    shares = (name in (backend.shares_out or ()) for name in ("parameters", "gradients"))
    return RankTurns(turns_of(cell, each.stage, micro_batches), backend.zeroes_in_step, *shares)


def _from_short_step(
    turns: RankTurns, whole: RankTurns, traced: dict[RankTurns, Trace], cell: Cell, rank: int
) -> Trace | None:
    """The trace of a rank with ``turns``, and with events, put together from a step shorter than its
    ``whole`` step; None if no shorter step determines the trace.

    Args:
        traced: the traces of short steps, to which further short steps are added.
    """
    for short in whole.shorter():
        if len(short) > len(whole) or puts_off(cell):
            continue
        if short not in traced:
            # its program says which calls communicate in which turn
            traced[short] = trace(cell, rank, events=True, checked=True, turns=short.of)
        try:
            return put_together(traced[short], short, turns)
        except NotAlike as error:
            _log.info("rank %s of %s is not as %s: %s", rank, cell.key, short.of, error)
    return None


def _form(cell: Cell, each: RankClass) -> Hashable:
    """A key of all that a rank's trace depends on, except the micro-batches of its stage: whether the stage
    is the first or the last, the rank's coordinates, and its modules with their settings."""
    modules = tuple(_settings(module) for module in stage_module(cell, each).modules())
    return each.stage.first, each.stage.last, tuple(each.coordinates.items()), modules


def _settings(module: nn.Module) -> Hashable:
    own = vars(module).items()
    plain = tuple((name, value) for name, value in own if isinstance(value, (bool, int, float, str)))
    shapes = tuple((name, tuple(x.shape), x.dtype) for name, x in module.named_parameters(recurse=False))
    return type(module), plain, shapes
