"""Checks of an installation: those that go wrong are observations, and planted faults are seen."""

import errno
import resource
import shutil
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spbench.bench.tools.doctor import device_checks as ranks
from spbench.bench.tools.doctor import diagnosis as installation
from spbench.bench.tools.doctor.diagnosis import Check, Observation, diagnose
from spbench.bench.tools.doctor.doctor_command import CHECKS
from tests.tools.doctor import planted


def by_subject(found: Any) -> dict[str, Observation]:
    return {line.subject: line for line in found}


def test_checks_that_go_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "child"
    monkeypatch.setenv(planted.CHILD_FILE, str(file))
    found = diagnose(
        {
            "talks": Check(planted.talks),
            "crashes": Check(planted.crashes, is_needed=True),
            "raises": Check(planted.raises),
            "hangs": Check(planted.hangs, limit_s=8),
        }
    )
    assert [(line.subject, line.status, line.found, line.is_needed) for line in found] == [
        ("talk", "ok", "done", False),
        ("crashes", "missing", "crashed with SIGABRT", True),
        ("raises", "missing", "exit code 1: ArithmeticError: planted", False),
        ("hangs", "missing", "no answer within 8 s", False),
    ]
    assert found[2].remedy.startswith("see: python -c 'from tests.tools.doctor.planted import *;")
    assert gone(int(file.read_text()))


def gone(pid: int) -> bool:
    """Whether a process ends within some seconds; one that is dead but not yet reaped counts."""
    for _ in range(200):
        state = Path(f"/proc/{pid}/stat")
        if not state.exists() or state.read_text().rpartition(")")[2].split()[0] == "Z":
            return True
        time.sleep(0.05)
    return False


def test_a_full_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for free, status in ((10 * 2**20, "missing"), (2**30, "warning"), (2**40, "ok")):
        monkeypatch.setattr(shutil, "disk_usage", lambda folder, free=free: SimpleNamespace(free=free))
        assert by_subject(installation.disks())["disk of results"].status == status
    assert by_subject(installation.disks())["disk of results"].found == f"1024.0 GiB free in {tmp_path}"


def test_folders_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SPBENCH_CACHE", "/dev/null/cache")
    cache = by_subject(installation.disks())["disk of the cache"]
    assert (cache.status, cache.found, cache.is_needed) == ("missing", "/dev/null: Not a directory", False)
    assert "SPBENCH_CACHE" in cache.remedy

    def unreadable(folder: Path) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(shutil, "disk_usage", unreadable)
    results = by_subject(installation.disks())["disk of results"]
    assert (results.status, results.is_needed) == ("missing", True)


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    for limits, status in (
        ((256, 4096), "warning"),
        ((4096, 4096), "ok"),
        ((resource.RLIM_INFINITY,) * 2, "ok"),
    ):
        monkeypatch.setattr(resource, "getrlimit", lambda which, limits=limits: limits)
        (found,) = installation.open_files()
        assert found.status == status
        assert ("ulimit" in found.remedy) is (status == "warning")


def test_little_shared_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    docker = SimpleNamespace(free=64 * 2**20, total=64 * 2**20)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: docker)
    (found,) = installation.shared_memory()
    assert (found.status, found.found) == ("warning", "0.1 of 0.1 GiB free in /dev/shm")


@pytest.mark.parametrize(("cores", "status"), [(1, "warning"), (2, "ok")])
def test_ranks_that_share_a_core(cores: int, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(installation, "usable_cores", lambda: cores)
    (found,) = installation.machine()
    assert found.status == status
    assert found.found.startswith(f"{cores} of ")


def test_without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    (found,) = installation.triton()
    assert (found.status, found.is_needed) == ("missing", False)
    assert "pip install triton" in found.remedy


def test_a_package_that_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    declared = ["torch>=2", "absent-one>1; platform_system == 'Linux'", 'absent-two==3; extra == "peers"']
    monkeypatch.setattr(installation, "requires", lambda name: declared)
    found = by_subject(installation.packages())
    assert (found["packages"].status, found["packages"].is_needed) == ("missing", True)
    assert found["packages"].found.startswith("not installed: absent-one; installed: torch 2.")
    extra = found["packages of the extra peers"]
    assert (extra.status, extra.is_needed, extra.remedy) == ("missing", False, "pip install absent-two==3")
    assert found["packages"].remedy == "pip install 'absent-one>1'"


def test_the_interface_of_gloo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks, "_interfaces", lambda: {"lo": "127.0.0.1", "ib0": "10.0.0.7"})
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "ib0")
    assert ranks.gloo_interface() == ("ib0", "10.0.0.7")
    monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    monkeypatch.setattr("socket.gethostbyname", lambda host: "192.0.2.1")  # nobody's: for documentation
    assert ranks.gloo_interface() == ("lo", "127.0.0.1")


def test_every_check_is_found_by_the_child() -> None:
    for name, check in CHECKS.items():
        module = sys.modules[check.look.__module__]
        assert getattr(module, check.look.__qualname__) is check.look, name
