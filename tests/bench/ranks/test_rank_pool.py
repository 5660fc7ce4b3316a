"""The pool: results in order, errors with their rank, no process left behind."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.ranks.rank_pool import RankError, RankPool
from spbench.impls.axes import MESH_AXES, Place


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
        os._exit(7)
    dist.barrier()


def never_answers(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        signal.pause()
    dist.barrier()


def returns_a_lambda(mesh: DeviceMesh) -> object:
    return lambda: None


def process_id(mesh: DeviceMesh) -> int:
    return os.getpid()


def says_so_and_waits(mesh: DeviceMesh) -> None:
    print("waiting", flush=True)
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
        pool.run({"ep": 2}, process_id)


def test_dead_and_silent_workers_are_replaced() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankError, match=r"rank 1: .*exit code 7") as raised:
            pool.run({"sp": 2}, dies_on_rank_1)
        assert raised.value.rank == 1
        with pytest.raises(RankError, match="no answer"):
            pool.run({"sp": 2}, never_answers, timeout_s=1)
        assert pool.run({"sp": 2}, sum_of_ranks, "sp", 0) == [(r, 1, [2]) for r in range(2)]
        pool.close()
        assert pool.run({"sp": 2}, sum_of_ranks, "sp", 0) == [(r, 1, [2]) for r in range(2)]


def test_what_a_rank_wrote_as_it_hung_is_not_taken_for_the_next_ones() -> None:
    with RankPool(2) as pool:
        with pytest.raises(RankError, match="no answer") as raised:
            pool.run({"sp": 2}, never_answers, timeout_s=1)
        assert raised.value.log.count("-- last collectives of rank") == 2
        pool.run({"sp": 2}, process_id)
        assert [file for file in pool._folder.iterdir() if file.stat().st_size] == []


PROGRAM = """
from spbench.bench.ranks.rank_pool import RankPool
from tests.bench.ranks.test_rank_pool import says_so_and_waits
if __name__ == "__main__":
    RankPool(1).run({}, says_so_and_waits)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
def test_workers_end_with_their_parent(number: signal.Signals, tmp_path) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    parent = subprocess.Popen(
        [sys.executable, str(program)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        start_new_session=True,
    )
    with parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == b"waiting\n"
        if number is signal.SIGINT:
            os.killpg(parent.pid, number)  # as a terminal does
        else:
            parent.kill()
        assert parent.stdout.read() == b""  # the pipe ends when the worker, which holds it too, has ended
    assert parent.returncode != 0


def threads_with_groups(mesh: DeviceMesh, fail: bool) -> int:
    """The threads of this process, with a group over several axes that refers to itself."""
    place = Place.on(mesh)
    group = place.group("dp", "sp")
    if fail:
        raise ValueError(f"with {group} in sight")
    return len(os.listdir("/proc/self/task"))


@pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="counts threads as Linux does")
def test_no_thread_of_a_process_group_is_left_behind(pool: RankPool) -> None:
    sizes = {"dp": 2, "sp": 2}
    first = pool.run(sizes, threads_with_groups, False)
    with pytest.raises(RankError):
        pool.run(sizes, threads_with_groups, True)
    assert pool.run(sizes, threads_with_groups, False) == first
