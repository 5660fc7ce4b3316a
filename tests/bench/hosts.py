"""What tests of processes stand on: two hosts for torchrun (network namespaces with a cable between them, or
this machine's loopback twice), workers in this process, which of the processes that a test has started are
left, and a disk that runs full."""

import os
import resource
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.run_cell import Run, measure
from spbench.bench.measurement import Outcome


class Host:
    """One of two hosts.

    Args:
        namespace: of its network; "" for this machine's own.
        interface, address: by which the other host reaches it.
        first: whether the hosts meet at it.
    """

    def __init__(self, namespace: str, interface: str, address: str, first: bool):
        self.namespace, self.interface, self.address, self.first = namespace, interface, address, first
        self.processes: list[subprocess.Popen[str]] = []

    def torchrun(
        self, rendezvous: str, arguments: Sequence[str], environment: Mapping[str, str], log: Path
    ) -> subprocess.Popen[str]:
        """Start this host's torchrun of a job of two hosts, each with two processes: ``-m`` with these
        arguments."""
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node"]
        command += ["2", "--rdzv-backend", "c10d", "--rdzv-endpoint", rendezvous]
        # torchrun would look for the rendezvous's address among those that the name of this machine has
        is_host = f"is_host={int(self.first)}"
        command += ["--rdzv-id", "two-hosts", "--rdzv-conf", is_host, "--local-addr", self.address]
        command += ["-m", *arguments]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(sys.path),
            "GLOO_SOCKET_IFNAME": self.interface,
            **environment,
        }
        prefix = ["ip", "netns", "exec", self.namespace] if self.namespace else []
        with log.open("w") as file:
            process = subprocess.Popen(
                [*prefix, *command],
                env=environment,
                stdout=file,
                stderr=file,
                text=True,
                start_new_session=True,
            )
        self.processes.append(process)
        return process

    def pids(self) -> list[int]:
        """The processes that run on it."""
        if self.namespace:
            found = _ip("netns", "pids", self.namespace)
            return [int(word) for word in found.split()]
        return [pid for process in self.processes for pid in _of_session(process.pid)]

    def vanish(self) -> None:
        """Nothing of it is reached any more: its cable is cut, or all of its processes die at once."""
        if self.namespace:
            _ip("-n", self.namespace, "link", "set", self.interface, "down")
        else:
            self.clear()

    def clear(self) -> None:
        """End everything on it."""
        for pid in self.pids():
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.processes:
            process.wait(10)


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Two hosts, on which nothing is left afterwards."""
    hosts = _namespaces() or (Host("", "lo", "127.0.0.1", True), Host("", "lo", "127.0.0.1", False))
    try:
        yield hosts
    finally:
        for host in hosts:
            host.clear()
            if host.namespace:
                _ip("netns", "delete", host.namespace)


def _namespaces() -> tuple[Host, Host] | None:
    """None where this user may not make them."""
    if shutil.which("ip") is None:
        return None
    mark = uuid.uuid4().hex[:6]
    hosts = (
        Host(f"spa{mark}", f"va{mark}", "10.77.0.1", True),
        Host(f"spb{mark}", f"vb{mark}", "10.77.0.2", False),
    )
    made = []
    try:
        for host in hosts:
            _ip("netns", "add", host.namespace)
            made.append(host)
        first, second = hosts
        cable = ["link", "add", first.interface, "netns", first.namespace, "type", "veth"]
        _ip(*cable, "peer", "name", second.interface, "netns", second.namespace)
        for host in hosts:
            _ip("-n", host.namespace, "address", "add", f"{host.address}/24", "dev", host.interface)
            for interface in ("lo", host.interface):
                _ip("-n", host.namespace, "link", "set", interface, "up")
    except (OSError, subprocess.CalledProcessError):
        for host in made:
            _ip("netns", "delete", host.namespace)
        return None
    return hosts


def _ip(*arguments: str) -> str:
    return subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True).stdout


def _of_session(leader: int) -> list[int]:
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            words = stat.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        if words[0] != "Z" and int(words[3]) == leader:
            found.append(int(stat.parent.name))
    return found


class CrewHere:
    """In place of :class:`Crew`: runs each cell in this process when its outcome is asked for."""

    def outcomes(
        self, tasks: Iterable[tuple[Cell, Run]], at_once: int, *, enough: Callable[[], bool]
    ) -> Iterator[tuple[Cell, Outcome]]:
        for cell, run in tasks:
            if enough():
                return
            yield cell, measure(run, cell)

    def dismiss(self) -> None:
        pass


needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc to see processes")


def left_of(log: Path) -> list[int]:
    """Those of the processes in a file, one number a line, that are not gone; a zombie is."""
    found = []
    for pid in {int(line) for line in log.read_text().split()}:
        try:
            os.kill(pid, 0)
            state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
        except OSError:
            continue
        if state != "Z":
            found.append(pid)
    return found


#: seconds after which a test gives up on another process
PATIENCE_S = 180.0


def until(what: Callable[[], bool], otherwise: str = "waited in vain") -> None:
    """Wait until something is so; an error if it never is."""
    deadline = time.monotonic() + PATIENCE_S
    while not what():
        assert time.monotonic() < deadline, otherwise
        time.sleep(0.05)


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """Let this process write no file beyond that size: what is over it fails with EFBIG, as a full disk does
    with ENOSPC, after the bytes that fit have been written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
