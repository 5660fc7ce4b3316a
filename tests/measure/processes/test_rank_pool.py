"""The pool: results in order, errors with their rank, no process left behind.
Ranks in turns in one process compute what processes with Gloo do, and end where those would hang. Ranks
whose tensors go through the host's memory compute what ranks with Gloo do.

Errors against float64 of all ranks in turn, and that sums in half precision show in them."""

import json
import math
import multiprocessing
import os
import resource
import signal
import threading
import time
from collections.abc import Collection
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.files import write_whole
from spbench.bench.measure.engines.lockstep import LockstepEngine
from spbench.bench.measure.processes import rank_pool
from spbench.bench.measure.processes.child import Child
from spbench.bench.measure.processes.lockstep_ranks import LOCKSTEP, LockstepRanks
from spbench.bench.measure.processes.rank_pool import RankPool, Rendezvous, loopback_store
from spbench.bench.measure.processes.stacks import (
    GRACE_S,
    STACKS_FOLDER,
    STACKS_S,
    RankAnswer,
    RankError,
    collect,
)
from spbench.bench.measure.processes.staged_group import STAGED
from spbench.bench.measure.verify.cases import verify_cases
from spbench.impls import collectives
from spbench.impls.axes import MESH_AXES
from spbench.impls.place import Place
from spbench.impls.registries import all_strategies
from spbench.impls.strategies import blockwise, ring_attention
from spbench.impls.strategies.base import Unsupported
from spbench.impls.strategies.ring_attention import RingAttention
from tests.bench.hosts import left_of, needs_proc, until
from tests.grid import data, tabled


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


def test_each_collective_is_that_of_gloo(pool: RankPool) -> None:
    for (kind, ours), (_, gloo) in zip(
        LockstepRanks().run({"sp": 2}, results), pool.run({"sp": 2}, results), strict=True
    ):
        assert kind == LOCKSTEP
        assert len(ours) == len(gloo)
        assert all(torch.equal(a, b) for a, b in zip(ours, gloo, strict=True))


@pytest.mark.one_in(2)
@tabled(__file__, "strategies_are_green")
def test_strategies_are_green(strategy: str, model: str, part: str) -> None:
    row = next(verify_cases([strategy], [model], [6], parts=[part], pool=LockstepRanks(), batch=1))
    assert row.status == "green"


def test_bytes_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RingAttention, "communication", lambda *_: iter(()))
    row = next(verify_cases(["ring_attention"], ["attention-call-tiny"], [3], pool=LockstepRanks()))
    assert row.status == "RED"
    assert "bytes, 0 by the closed form" in row.verdict


def a_sum_that_rounds(mesh: DeviceMesh) -> float:
    """1 and then 2^-9 on each other rank: in bf16 each addition of those is lost."""
    x = torch.tensor([1.0 if dist.get_rank() == 0 else 2.0**-9], dtype=torch.bfloat16)
    return collectives.all_reduce(x, mesh.get_group("sp")).item()


def test_a_sum_is_rounded_at_each_rank() -> None:
    assert LockstepRanks().run({"sp": 8}, a_sum_that_rounds) == [1.0] * 8


def one_who_waits_in_vain(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        dist.recv(torch.zeros(1), 0)


def one_who_raises(mesh: DeviceMesh) -> None:
    if dist.get_rank() == 1:
        raise ValueError("no more")
    collectives.all_reduce(torch.zeros(1), mesh.get_group("sp"))


def rests(mesh: DeviceMesh, on: str) -> str:
    """Wait two seconds for the clock, or for a file of another process; or for ever for another thread."""
    if on == "clock":
        time.sleep(2.0)
    elif on == "file":
        multiprocessing.Pipe()[0].poll(2.0)
    else:
        threading.Event().wait()
    return on


@pytest.mark.parametrize("on", ["clock", "file"])
def test_ranks_that_wait_for_the_clock_or_a_file_do_not_hang(pool: RankPool, on: str) -> None:
    assert pool.run({}, rests, on, idle_s=0.6) == [on]


def test_ranks_that_only_wait_for_each_other_hang(pool: RankPool) -> None:
    begin = time.monotonic()
    with pytest.raises(RankError):
        pool.run({}, rests, "thread", idle_s=0.6)
    assert time.monotonic() - begin < pool.timeout_s / 2


def test_who_waits_for_what_never_comes_fails_at_once() -> None:
    with pytest.raises(RankError, match="ranks 1 wait for each other"):
        LockstepRanks().run({"sp": 3}, one_who_waits_in_vain)


def test_of_a_failure_and_those_that_wait_for_it_the_failure_is_the_cause() -> None:
    with pytest.raises(RankError, match="ValueError: no more") as raised:
        LockstepRanks().run({"sp": 3}, one_who_raises)
    assert raised.value.rank == 1
    assert not dist.is_initialized()


def results(mesh: DeviceMesh) -> tuple[str, list[torch.Tensor]]:
    """The result of each collective that strategies and backends use, on views with strides."""
    group, rank = mesh.get_group("sp"), dist.get_rank()
    x = torch.arange(24.0).view(4, 6).t() * (rank + 1)
    gathered, work = collectives.start_all_gather(x, group)
    work.wait()
    parts = [torch.empty(6, 4) for _ in range(2)]
    dist.all_gather(parts, x.contiguous(), group=group)
    received = torch.empty(6, 4)
    collectives.exchange([(x.contiguous(), 1 - rank)], [(received, 1 - rank)], group)
    sent = x.contiguous()
    dist.broadcast(sent, 1, group=group)
    return dist.get_backend(), [
        collectives.all_reduce(x.clone(), group),
        collectives.all_to_all(x, 0, 1, group),
        collectives.reduce_scatter(x, 0, group),
        gathered,
        *parts,
        received,
        sent,
    ]


def test_each_collective(pool: RankPool) -> None:
    for (kind, staged), (_, plain) in zip(
        pool.run({"sp": 2}, results, backend=STAGED), pool.run({"sp": 2}, results), strict=True
    ):
        assert kind == STAGED
        assert len(staged) == len(plain)
        assert all(torch.equal(a, b) for a, b in zip(staged, plain, strict=True))


class Staged:
    """A pool whose jobs run on the staged backend."""

    def __init__(self, pool: RankPool):
        self.pool, self.size = pool, pool.size

    def run(self, *args: Any, **options: Any) -> list[Any]:
        return self.pool.run(*args, **options | {"backend": STAGED})


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["legacy_ddp", "zero1", "zero3"])
def test_strategies_are_right_on_it(pool: RankPool, backend: str) -> None:
    hybrid = "linear-llama3-tiny-hybrid"
    models = ["bert-tiny-linformer", "causal-transformer-tiny", "tnl-tiny", hybrid, "st-dit-tiny"]
    rows = list(verify_cases(None, models, [2], parts=["model"], backend=backend, pool=Staged(pool)))  # type: ignore[arg-type]
    assert [row for row in rows if row.status == "RED"] == []
    green = {row.strategy for row in rows if row.status == "green"}
    assert green >= {*all_strategies()} - {"single"}


ROOT = Path(__file__).parents[3]
ROWS = [
    json.loads(line) for line in (ROOT / "results/reproduction/numerics/cells.jsonl").read_text().splitlines()
]
CALL = data(__file__)["CALL"]
MODEL = {"model": "causal-transformer-tiny", "model_options": {}, "seq_len": 24, "training": {}}


def errors(strategy: str, precision: str = "bf16", sp: int = 1, **options: Any) -> dict[str, float]:
    settings = {**CALL, "batch": 1, "engine": "lockstep", "sizes": {"sp": sp}, **options}
    cell = Cell.model_validate({**settings, "strategy": strategy, "precision": precision})
    return LockstepEngine().measure(cell).errors


@tabled(__file__, "in_float64_only_the_order_of_sums_differs")
def test_in_float64_only_the_order_of_sums_differs(strategy: str, kind: str) -> None:
    options = CALL["model_options"] | {"kind": kind}  # type: ignore[operator]
    found = errors(strategy, "fp64", 4, model_options=options)
    assert set(found) == {"o", "d_q", "d_k", "d_v"}
    assert max(found.values()) < 1e-14


@pytest.mark.parametrize("sizes", [{"tp": 3}, {"sp": 2, "dp": 2}])
def test_gradients_of_weights(sizes: dict[str, int]) -> None:
    strategy = "tensor_parallel" if "tp" in sizes else "ulysses"
    found = errors(strategy, "fp64", **MODEL, sizes=sizes, batch=2)
    assert set(found) == {"loss", "gradients", "worst_gradient"}
    assert max(found.values()) < 1e-13
    half = errors(strategy, "fp16", **MODEL, sizes=sizes, batch=2)
    assert 1e-5 < half["gradients"] < 1e-2


def test_a_ring_that_sums_in_float32_is_as_exact_as_a_device() -> None:
    device, ring = errors("single"), errors("ring_attention", sp=16)
    assert ring["o"] < 1.5 * device["o"]
    assert ring["d_k"] < 1.5 * device["d_k"]


def test_sums_of_a_ring_in_half_precision_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ring_attention, "state_dtype", lambda dtype: dtype)
    few, many = (errors("ring_attention", sp=sp)["d_k"] for sp in (2, 16))
    assert many > 1.5 * few


def test_a_wrong_merge_of_softmaxes_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    def merge(o: Tensor, lse: Tensor, block_o: Tensor, block_lse: Tensor) -> None:
        o.lerp_(block_o.to(o.dtype), torch.sigmoid(block_lse - lse).unsqueeze(-1))
        torch.maximum(lse, block_lse, out=lse)

    monkeypatch.setattr(blockwise, "merge", merge)
    assert errors("ring_attention", sp=4)["o"] > 0.05


def test_a_pass_without_gradients_is_refused() -> None:
    settings = {**MODEL, "batch": 1, "training": {"step": "inference"}, "engine": "lockstep"}
    with pytest.raises(Unsupported, match=r"leave training\.step out"):
        LockstepEngine().measure(Cell.model_validate({**settings, "strategy": "single"}))


def committed(strategy: str, kind: str, ranks: int, placement: str | None = None) -> dict[str, Any]:
    """The row in bf16 of a call of attention."""
    (row,) = [
        row
        for row in ROWS
        if (cell := row["cell"])["model"] == "attention-call"
        and (cell["strategy"], cell["precision"]) == (strategy, "bf16")
        and cell["model_options"].get("kind", "causal_attention") == kind
        and math.prod(cell["sizes"].values()) == ranks
        and placement in (None, cell["strategy_options"].get("placement"))
    ]
    return row


def test_a_committed_row_is_measured_again() -> None:
    row = committed("ring_self_attention", "attention", 4)
    found = LockstepEngine().measure(Cell.model_validate(row["cell"])).errors
    # vector units of other machines round otherwise
    assert found == pytest.approx(row["measurement"]["errors"], rel=0.05)


@tabled(__file__, "the_page_shows_the_rows")
def test_the_page_shows_the_rows(line: str, strategy: str, kind: str, placement: str | None) -> None:
    page = (ROOT / "docs/numerics.md").read_text()
    for what, names in (("outputs", ["o"]), ("gradients", ["d_q", "d_k", "d_v"])):
        (shown,) = [each for each in page.splitlines() if each.startswith(f"| {line}, {what} |")]
        numbers = [text.strip() for text in shown.strip("|").split("|")[1:]]
        for ranks, number in zip([1, 4, 16, 64], numbers, strict=True):
            place = ("single", kind, 1) if ranks == 1 else (strategy, kind, ranks, placement)
            if number:
                found = committed(*place)["measurement"]["errors"]
                assert number == f"{max(found[name] for name in names) * 1e3:.1f}"
