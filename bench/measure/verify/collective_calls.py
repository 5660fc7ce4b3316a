"""Which collectives each rank calls, written down before they run, as ranks that call different ones may die
of it: Gloo aborts the process."""

from __future__ import annotations

import json
import sys
import sysconfig
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.trace.communication import communication_of
from spbench.bench.measure.trace.torch_internals import TorchDispatchMode

#: code that calls collectives for others: this package's, Python's with what is installed, torch's
_PASSED = (Path(__file__).parents[2], Path(sysconfig.get_path("stdlib")), Path(torch.__file__).parent)
#: these meet one other rank, which calls another of them
_PAIRED = ("send", "recv")


def logged(mesh: DeviceMesh, run: Callable[..., Any], case: Any, folder: str) -> None:
    """Run a case on this rank, with each of its collectives written into a file of the folder before it is
    called. Last comes a line that says that the rank has come to the end."""
    with Path(folder, str(dist.get_rank())).open("w", buffering=1, encoding="utf-8") as file, _Log(file):
        run(mesh, case)
        file.write("{}\n")


class _Log(TorchDispatchMode):
    """Writes down each collective: its name, payload, group and the line of code that calls it."""

    def __init__(self, file: Any):
        super().__init__()
        self.file = file

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if (call := communication_of(func, args)) is not None:
            ranks = dist.get_process_group_ranks(call.group)
            line = {"name": call.collective, "bytes": call.payload_bytes, "ranks": ranks, "at": _caller()}
            self.file.write(json.dumps(line) + "\n")
        return func(*args, **(kwargs or {}))


def _caller() -> str:
    """FILE:LINE of the code of a strategy, model or backend that calls a collective: the nearest that is not
    in :data:`_PASSED`; "" where there is none, as where autograd calls it from C++."""
    frame = sys._getframe(2)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if not any(folder in file.parents for folder in _PASSED) and file.name != "collectives.py":
            return f"{file.name}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return ""


def unequal_calls(folder: Path) -> str:
    """The first collectives in which ranks of one group differ, by rank; "" where they call the same."""
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
                return f"unequal collectives (call {number + 1} of ranks {_listed(group)}): {', '.join(what)}"
    return ""


def _read(file: Path) -> list[Mapping[str, Any]]:
    lines = file.read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line.endswith("}")]


def _said(call: Mapping[str, Any] | None, every: Sequence[Mapping[str, Any]]) -> str:
    """What a rank does in the place of a call of the others."""
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


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
