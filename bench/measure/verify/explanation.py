"""Why a case is RED: the first wrong tensor in the order of execution, on which ranks and positions, and the
collectives that ranks call unequally. Each explanation runs the case once more.

Collectives are logged before they run, because Gloo aborts processes whose ranks call different ones.
"""

import json
import sys
import sysconfig
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from spbench.bench.measure.processes.rank_pool import Ranks
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.trace.meter import communication_of
from spbench.bench.measure.trace.torch_internals import TorchDispatchMode
from spbench.bench.measure.verify.judged import Finding, Judged, judged, relative_errors
from spbench.bench.measure.verify.oracle import BothRuns, both_runs
from spbench.bench.measure.verify.verified_run import SITE_DIM, Case
from spbench.impls import PRECISIONS, ModelPart

#: the number of blocks of positions, which are the columns of a map of errors
BLOCKS = 8
#: how many wrong tensors are named after the first
NAMED = 4
#: the time limit in seconds of the second run of a case whose ranks have failed
AGAIN_S = 15.0
#: folders of code that calls collectives for its caller: of this package, of Python and of torch
_PASSED = (Path(__file__).parents[2], Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent)
#: messages between two ranks, of which one calls send and the other recv
_PAIRED = ("send", "recv")


def explain_values(pool: Ranks, case: Case, sizes: Mapping[str, int], device: str, backend: str) -> str:
    """Lines of text on a case whose values are wrong; "" where only its messages are wrong."""
    try:
        by_rank = pool.run(sizes, observed, case, device=device, backend=backend)
    except RankError as error:  # a fault that comes and goes
        return f"run once more, it failed: {error.reason}"
    every = sorted(judged(PRECISIONS[case.dtype].parameters, by_rank), key=lambda each: each.finding.place)
    wrong = [each for each in every if each.excess > 1]
    names = list(dict.fromkeys(each.finding.tensor for each in wrong))
    if not names:
        return ""
    first = [each for each in every if each.finding.tensor == names[0]]
    worst = max((each for each in first if each.excess > 1), key=lambda each: each.finding.discrepancy.error)
    before = (each.finding for each in every if each.finding.place < worst.finding.place)
    right = [each.tensor for each in before if each.tensor not in names]
    lines = [
        f"first wrong in the order of execution: {worst}",
        *([f"right before it: {right[-1]}"] if right else ["nothing that is compared comes before it"]),
        *_map(first, worst.limit, case.seq_len),
    ]
    if others := names[1:]:
        more = [f"{len(others) - NAMED} more"] if len(others) > NAMED else []
        lines.append(f"wrong after it: {', '.join([*others[:NAMED], *more])}")
    return "\n".join(lines)


def explain_failure(pool: Ranks, case: Case, sizes: Mapping[str, int], device: str, backend: str) -> str:
    """A line on the collectives that ranks call unequally, in a case in which a rank raised, died or did not
    answer; "" where all ranks call the same."""
    with tempfile.TemporaryDirectory(prefix="spbench-calls-") as folder:
        with suppress(RankError):
            pool.run(
                sizes, logged, both_runs, case, folder, timeout_s=AGAIN_S, device=device, backend=backend
            )
        return unequal_calls(Path(folder))


def observed(mesh: DeviceMesh, case: Case) -> list[Finding]:
    """A finding for each tensor that this rank compares, and for each tensor at its attention sites."""
    runs = both_runs(mesh, case, watch=True)
    at_sites, tensors = runs.sites(), runs.tensors()
    expected, got = {**at_sites.expected, **tensors.expected}, {**at_sites.got, **tensors.got}
    observations = []
    for name, (each, noise) in {**at_sites.discrepancies(), **tensors.discrepancies()}.items():
        dim = SITE_DIM if name in at_sites.got else _sequence_dim(runs.checked.part, name)
        blocks = () if dim is None else _blocks(runs, expected.get(name), got.get(name), dim, case.seq_len)
        place = _place(name, runs.checked.sites.order)
        observations.append(Finding(name, each, noise, place=place, blocks=blocks))
    return observations


def _sequence_dim(part: ModelPart, name: str) -> int | None:
    """The sequence dim of an output or of an input's gradient; None for other tensors and for grids."""
    kind, _, key = name.rpartition(" ")
    dims = {"output": part.output_dims, "gradient of input": part.sequence_dims}.get(kind, {})
    dim = dims.get(key)
    return dim if isinstance(dim, int) else None


def _blocks(
    runs: BothRuns, expected: Tensor | None, got: Tensor | None, dim: int, length: int
) -> tuple[float | None, ...]:
    """The relative error in each block of positions, None for a block without positions on this rank."""
    if expected is None or got is None or expected.shape != got.shape:
        return ()
    places = runs.checked.strategy.shard(torch.arange(length, device=got.device), 0)
    if len(places) != got.shape[dim]:
        return ()
    errors: list[float | None] = []
    for block in range(min(BLOCKS, length)):
        here = (places * BLOCKS // length == block).nonzero().flatten()
        both = (x.index_select(dim, here) for x in (expected, got))
        errors.append(relative_errors({"": next(both)}, {"": next(both)})[""] if len(here) else None)
    return tuple(errors)


def _place(name: str, order: Mapping[str, int]) -> tuple[int, float]:
    """The place of a tensor in the order of execution, as a sort key: tensors of forward, then gradients of
    weights in the reverse order of forward, and gradients of inputs last."""
    if not name.startswith("gradient of "):
        return 0, order.get(name, float("inf"))
    of = name.removeprefix("gradient of ")
    if of.startswith("input "):
        return 2, 0.0
    return 1, -order.get(of, order.get(of.rpartition(".")[0], 0))


def _map(first: Sequence[Judged], limit: float, length: int) -> list[str]:
    """Lines with the errors of one tensor by rank, and by block of positions if the tensor has positions."""
    if not any(each.finding.blocks for each in first):
        said = [f"rank {each.rank} {_error(each.finding.discrepancy.error, limit)}" for each in first]
        return [f"its error by rank (. is right): {', '.join(said)}"]
    edges = [-(-block * length // BLOCKS) for block in range(min(BLOCKS, length) + 1)]
    heads = [f"{low}-{high - 1}" for low, high in pairwise(edges)]
    rows = [
        [f"rank {e.rank}", *("" if error is None else _error(error, limit) for error in e.finding.blocks)]
        for e in first
    ]
    table = [["positions", *heads], *rows]
    widths = [max(map(len, column)) for column in zip(*table, strict=False)]
    title = "its error by rank and positions (. is right, blank: not on that rank):"
    return [title, *("  ".join(map(str.ljust, row, widths)).rstrip() for row in table)]


def _error(error: float, limit: float) -> str:
    return "." if error <= limit else f"{error:.0e}"


def logged(mesh: DeviceMesh, run: Callable[..., Any], case: Any, folder: str) -> None:
    """Run a case on this rank with :func:`logging_calls` into the folder."""
    with logging_calls(folder):
        run(mesh, case)


@contextmanager
def logging_calls(folder: str | Path) -> Iterator[None]:
    """Within the context, this rank writes each collective into its file of the folder before the call. The
    file's last line says that the context has ended without an error."""
    with Path(folder, str(dist.get_rank())).open("w", buffering=1, encoding="utf-8") as file:
        with _Log(file):
            yield
        file.write("{}\n")


class _Log(TorchDispatchMode):
    """Logs each collective: its name, payload bytes, ranks, and the line of code that calls it."""

    def __init__(self, file: Any):
        super().__init__()
        self.file = file

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:  # which communicates by further calls
            return NotImplemented
        call = None
        with suppress(NotImplementedError):  # a call whose bytes are not known
            call = communication_of(func, args)
        if call is not None:
            ranks = dist.get_process_group_ranks(call.group)
            line = {"name": call.collective, "bytes": call.payload_bytes, "ranks": ranks, "at": _caller()}
            self.file.write(json.dumps(line) + "\n")
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """FILE:LINE of the code of a strategy, model or backend that calls a collective: the innermost frame
    outside :data:`_PASSED`; "" where there is none, for example if autograd calls from C++."""
    frame = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if not any(folder in file.parents for folder in _PASSED) and file.name != "collectives.py":
            return f"{file.name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def unequal_calls(folder: Path) -> str:
    """A sentence on the first collective in which the ranks of a group differ; "" if none does."""
    calls = {int(file.name): _read(file) for file in folder.iterdir()}
    by_group: dict[tuple[int, ...], dict[int, list[Mapping[str, Any]]]] = defaultdict(
        lambda: defaultdict(list)
    )
    for rank, of_rank in calls.items():
        for call in of_rank:
            if call and call["name"] not in _PAIRED:
                by_group[tuple(call["ranks"])][rank].append(call)
    for group, of_group in by_group.items():
        lists = {rank: of_group[rank] for rank in group if rank in calls}
        for number in range(max(map(len, lists.values()))):
            at = {rank: of_rank[number] if number < len(of_rank) else None for rank, of_rank in lists.items()}
            if len({call and (call["name"], call["bytes"]) for call in at.values()}) > 1:
                what = [f"rank {rank} {_said(call, calls[rank])}" for rank, call in at.items()]
                where = f"call {number + 1} of ranks {', '.join(map(str, group))}"
                return f"unequal collectives ({where}): {', '.join(what)}"
    return ""


def failed_calls(folder: Path) -> str:
    """A sentence on the collectives in which ranks differ, or on each rank's last; "" if there is none."""
    last = {int(file.name): calls for file in sorted(folder.iterdir()) if (calls := _read(file))}
    ends = [f"rank {rank} {_said(calls[-1] or None, calls)}" for rank, calls in sorted(last.items())]
    return unequal_calls(folder) or (f"last calls: {', '.join(ends)}" if ends else "")


def _read(file: Path) -> list[Mapping[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _said(call: Mapping[str, Any] | None, every: Sequence[Mapping[str, Any]]) -> str:
    """A phrase on what a rank does where other ranks call a collective."""
    if call is not None:
        return f"is in {_spelled(call)}"
    if not every:
        return "has called none"
    return (
        "has come to its end" if not every[-1] else f"does not come to it: its last is {_spelled(every[-1])}"
    )


def _spelled(call: Mapping[str, Any]) -> str:
    where = f" at {call['at']}" if call["at"] else ""
    return f"{call['name']} of {call['bytes']} bytes{where}"
