"""The pool: results in order, errors with their rank, no process left behind."""

import os
import resource
import signal
import time
from collections.abc import Collection
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.files import write_whole
from spbench.bench.measure.processes import rank_pool
from spbench.bench.measure.processes.child import Child
from spbench.bench.measure.processes.rank_pool import RankError, RankPool, Rendezvous, loopback_store
from spbench.bench.measure.processes.stacks import GRACE_S, STACKS_FOLDER, STACKS_S, RankAnswer, collect
from spbench.impls.axes import MESH_AXES
from spbench.impls.place import Place
from tests.bench.hosts import left_of, needs_proc, until


def sum_of_ranks(mesh: DeviceMesh, axis: str, offset: int) -> tuple[int, int, list[int]]:
    x = torch.tensor(mesh.get_group(axis).rank() + offset)
    dist.all_reduce(x, group=mesh.get_group(axis))
    return dist.get_rank(), int(x), [size for size in mesh.shape if size > 1]


def raises_on_rank_1(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        raise ArithmeticError("planted")
    dist.barrier()


def dies_on_rank_1(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        signal.raise_signal(signal.SIGKILL)
    dist.barrier()


def never_answers(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        signal.pause()
    dist.barrier()


def connects_for_ever_on_rank_1(mesh: DeviceMesh) -> None:
    """From the next job on."""
    if dist.get_rank() == 1:
        rank_pool.device_mesh = lambda *_: signal.pause()  # type: ignore[assignment]
    dist.barrier()


def returns_a_lambda(mesh: DeviceMesh) -> object:
    return lambda: None


def does_nothing(mesh: DeviceMesh) -> None:
    pass


def process_id(mesh: DeviceMesh) -> int:
    return os.getpid()


def says_so_and_waits(mesh: DeviceMesh, log: Path) -> None:
    write_whole(log, str(os.getpid()))
    time.sleep(3600)


@pytest.mark.parametrize("axis", MESH_AXES)
def test_results_in_the_order_of_ranks(pool: RankPool, axis: str) -> None:
    for n in (4, 1, 3):
        shape = [n] if n > 1 else []
        total = sum(range(n)) + 5 * n
        assert pool.run({axis: n}, sum_of_ranks, axis, 5) == [(rank, total, shape) for rank in range(n)]


def test_workers_are_kept(pool: RankPool) -> None:
    first = pool.run({"sp": 4}, process_id)
    assert pool.run({"tp": 4}, process_id) == first
    assert len(set(first)) == 4


def test_error_names_rank_and_cause_and_the_pool_goes_on(pool: RankPool) -> None:
    with pytest.raises(
        RankError, match=r"(?s)rank 1: .*raises_on_rank_1.*ArithmeticError: planted"
    ) as raised:
        pool.run({"sp": 3}, raises_on_rank_1)
    assert raised.value.rank == 1
    assert pool.run({}, sum_of_ranks, "sp", 0) == [(0, 0, [])]


def test_result_that_cannot_be_pickled_is_an_error(pool: RankPool) -> None:
    with pytest.raises(RankError, match="rank 0"):
        pool.run({}, returns_a_lambda)


def test_job_that_does_not_fit(pool: RankPool) -> None:
    with pytest.raises(ValueError, match="pool of 4"):
        pool.run({"sp": 5}, process_id)
    with pytest.raises(ValueError, match="axis"):
        pool.run({"sp": 0}, process_id)
    with pytest.raises(ValueError, match="axis"):
        pool.run({"xp": 2}, process_id)


def test_dead_and_silent_workers_are_replaced() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankError, match=r"rank 1: .*killed by SIGKILL") as raised:
            pool.run({"sp": 2}, dies_on_rank_1)
        assert raised.value.rank == 1
        with pytest.raises(RankError, match="no answer"):
            pool.run({"sp": 2}, never_answers, timeout_s=1)
        assert pool.run({"sp": 2}, sum_of_ranks, "sp", 0) == [(r, 1, [2]) for r in range(2)]
        pool.close()
        assert pool.run({"sp": 2}, sum_of_ranks, "sp", 0) == [(r, 1, [2]) for r in range(2)]


def test_no_rank_ends_while_another_connects() -> None:
    """Its end would fail the other: "connection closed by peer"."""
    with RankPool(2) as pool:
        pool.run({"sp": 2}, connects_for_ever_on_rank_1)
        with pytest.raises(RankError) as raised:
            pool.run({"sp": 2}, does_nothing, timeout_s=1)
        assert raised.value.silent == [0, 1]


def test_what_a_rank_wrote_as_it_hung_is_not_taken_for_the_next_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And ranks that have no part in a job are not waited for."""
    monkeypatch.setenv(STACKS_FOLDER, str(tmp_path))
    with RankPool(3) as pool:
        pool.run({"sp": 2}, sum_of_ranks, "sp", 0)  # processes that have started
        start = time.monotonic()
        with pytest.raises(RankError, match="no answer") as raised:
            pool.run({"sp": 2}, never_answers, timeout_s=1)
        assert time.monotonic() - start < 1 + 2 * STACKS_S  # of both signals
        assert raised.value.log.count("-- last collectives of rank") == 2
        pool.run({"sp": 2}, sum_of_ranks, "sp", 0)
        assert [file for file in tmp_path.rglob("*") if file.is_file() and file.stat().st_size] == []


def test_after_a_failure_the_others_have_little_time() -> None:
    """A rank that waits for the one that failed may wait as long as the job."""
    given: list[float] = []

    def next_answer(waiting: Collection[int], timeout_s: float) -> RankAnswer | None:
        given.append(timeout_s)
        return RankAnswer(1, status="failed", text="planted") if len(given) == 1 else None

    with pytest.raises(RankError, match="rank 1: planted") as raised:
        collect(2, 3600.0, next_answer)
    assert given[0] > GRACE_S >= given[1]
    assert raised.value.silent == {0}


def listening_addresses(port: int) -> list[str]:
    """Local addresses of the sockets that listen at a port, as /proc has them."""
    lines = [
        line.split() for name in ("tcp", "tcp6") for line in Path("/proc/net", name).read_text().splitlines()
    ]
    return [line[1] for line in lines if line[1].endswith(f":{port:04X}") and line[3] == "0A"]


@needs_proc
def test_ranks_of_this_machine_meet_on_loopback() -> None:
    """The store unpickles what it is sent, so nobody else may reach it."""
    store, port = loopback_store()
    assert listening_addresses(port) == [f"0100007F:{port:04X}"]
    Rendezvous("127.0.0.1", port).store().set("key", "value")
    assert dist.PrefixStore("spbench", store).get("key") == b"value"


def runs_a_pool(connection: Connection, log: Path) -> None:
    with RankPool(1) as pool:
        pool.run({}, says_so_and_waits, log)


@needs_proc
def test_workers_end_with_their_parent(tmp_path: Path) -> None:
    log = tmp_path / "log"
    parent = Child(runs_a_pool, log)
    until(log.exists)
    assert left_of(log)
    parent.end()
    until(lambda: not left_of(log))


def threads_with_groups(mesh: DeviceMesh, fail: bool) -> int:
    """The threads of this process, once those of earlier groups have had time to end, with a group over
    several axes that refers to itself."""
    place = Place.on(mesh)
    group = place.group("dp", "sp")
    if fail:
        raise ValueError(f"with {group} in sight")
    counts = []
    for _ in range(30):
        counts.append(len(os.listdir("/proc/self/task")))
        time.sleep(0.01)
    return min(counts)


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux does")
def test_no_thread_of_a_process_group_is_left_behind(pool: RankPool) -> None:
    sizes = {"dp": 2, "sp": 2}
    first = pool.run(sizes, threads_with_groups, False)
    with pytest.raises(RankError):
        pool.run(sizes, threads_with_groups, True)
    assert pool.run(sizes, threads_with_groups, False) == first


def leaves_few_files(mesh: DeviceMesh) -> None:
    """From now on this process may open three files more than it has, with this job's group, open."""
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 3, most))


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts files as Linux does")
def test_the_files_of_the_last_job_are_closed_before_they_are_missed() -> None:
    with RankPool(3) as few:
        for _ in range(4):
            few.run({"sp": 3}, leaves_few_files)
