"""Checks that run something: a step on virtual ranks, and two real ranks on this machine's CPUs."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

from spbench.bench.tools.doctor.diagnosis import Observation

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from spbench.bench.cell import Cell

_RANKS = 2
#: the request for an interface's address, and its place in the answer; Linux
_SIOCGIFADDR, _ADDRESS = 0x8915, slice(20, 24)


def virtual_ranks() -> Iterator[Observation]:
    """A training step of one of two ranks, on fake tensors."""
    from spbench.bench.measure.engines.virtual import VirtualEngine

    begin = time.perf_counter()
    outcome = VirtualEngine().measure(_cell("virtual"))
    took = time.perf_counter() - begin
    works = outcome.status == "ok"
    text = f"{outcome.status}: {outcome.reason}"
    if works:
        text = f"a step of {_cell('virtual').model} in {took:.1f} s, peak {outcome.peak_memory_bytes:,} B"
    again = "spbench verify --strategy ring_self_attention, and report it"
    yield Observation.judged("virtual ranks", works, text, again, "missing", True)


def real_ranks() -> Iterator[Observation]:
    """Two processes that make a Gloo group, as the engine distributed starts them."""
    from spbench.bench.measure.engines.distributed import launch

    begin = time.perf_counter()
    outcome = launch(_cell("distributed"), _meet)
    took = time.perf_counter() - begin
    meeting = max(seconds for seconds, _ in outcome.values())
    total = sum(range(1, _RANKS + 1))
    if any(result != total for _, result in outcome.values()):
        again = "set GLOO_SOCKET_IFNAME to the interface to use"
        yield Observation("Gloo ranks", "missing", "a sum over two ranks is wrong", again, is_needed=True)
        return
    text = f"{_RANKS} ranks started in {took:.1f} s, a group in {meeting * 1e3:.0f} ms"
    name, address = gloo_interface()
    text += f", through {name} ({address})" if address else f", through {name}"
    others = "" if not address.startswith("127.") else _several_nodes(name)
    yield Observation("Gloo ranks", "ok", text, others)


def _several_nodes(name: str) -> str:
    others = [other for other, address in _interfaces().items() if not address.startswith("127.")]
    if not others:
        return ""
    return f"for several nodes: export GLOO_SOCKET_IFNAME={others[0]}, as {name} reaches this machine alone"


def _cell(engine: str) -> Cell:
    from spbench.bench.cell import Cell, Sizes

    return Cell(
        model="bert-tiny",
        strategy="ring_self_attention",
        sizes=Sizes(sp=_RANKS),
        batch=2,
        seq_len=16,
        engine=engine,
    )


def _meet(mesh: DeviceMesh, cell: Cell) -> tuple[float, int]:
    """Seconds to make a group of all ranks and sum in it, and the sum of their numbers from 1."""
    import torch
    import torch.distributed as dist

    dist.barrier()
    begin = time.perf_counter()
    group = dist.new_group(backend="gloo")
    value = torch.tensor(dist.get_rank() + 1)
    dist.all_reduce(value, group=group)
    return time.perf_counter() - begin, int(value)


def gloo_interface() -> tuple[str, str]:
    """The network interface that Gloo uses in this process and its address ("" if that is unknown).

    As torch chooses it: the one that GLOO_SOCKET_IFNAME names, or else that of the host name's address where
    it can be used, or else the loopback.
    """
    addresses = _interfaces()
    if named := os.environ.get("GLOO_SOCKET_IFNAME"):
        return named, addresses.get(named, "")
    try:
        own = socket.gethostbyname(socket.gethostname())
        with socket.socket() as trial:
            trial.bind((own, 0))
    except OSError:
        own = "127.0.0.1"
    return next((name for name, address in addresses.items() if address == own), "the host name"), own


def _interfaces() -> dict[str, str]:
    """The IPv4 address of each network interface that has one; empty where the system does not say."""
    try:
        import fcntl
    except ImportError:
        return {}
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
            except OSError:  # it has none
                continue
            addresses[name] = socket.inet_ntoa(answer[_ADDRESS])
    return addresses
