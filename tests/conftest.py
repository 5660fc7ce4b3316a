"""What all tests share: their order, a pool of ranks, a folder for the cache, and one thread of torch."""

from __future__ import annotations

import atexit
import gc
import os
import signal
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from spbench.bench.files import CACHE_FOLDER, DiskCache
from spbench.bench.measure.processes import starting as processes
from spbench.bench.measured_code import code_digest
from spbench.impls.loose_files import LOOSE_FILES
from tests.grid import data
from tests.slow import leave_out_slow_cases, slow_ones_are_left_out, thin

# functions import torch, because the first process of xdist, for which the others wait, does not need it
if TYPE_CHECKING:
    from spbench.bench.measure.processes.rank_pool import RankPool

#: an image of a container may forbid bytecode files; then each worker would compile all tests again, and each
#: process that a test starts would compile the modules that it imports
sys.dont_write_bytecode = False
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
pytest_plugins = ["tests.recorded"]
processes._PRELOADED = "tests.preloaded"  # or each rank would import pytest


def pytest_configure(config: pytest.Config) -> None:
    """Keep traces and declarations in a folder that is removed after the tests, and let SIGINT interrupt.

    The workers of xdist share the folder, because they inherit the environment of the first process. A shell
    starts processes in the background with SIGINT ignored, and their children inherit this: tests that send a
    SIGINT would wait in vain.
    """
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    if not hasattr(config, "workerinput"):
        folder = tempfile.TemporaryDirectory(prefix="spbench-test-cache-", ignore_cleanup_errors=True)
        os.environ[CACHE_FOLDER] = folder.name
        config.add_cleanup(folder.cleanup)


@pytest.hookimpl(tryfirst=True)  # before slow tests are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort the tests so that the longest files come first. A worker of xdist takes whole files, and so sets
    up a file's fixtures once; a long file at the end would leave the other workers idle."""
    thin(items)
    order = {Path(__file__).parent / name: place for place, name in enumerate(data(__file__)["LONGEST"])}
    items.sort(key=lambda item: order.get(item.path, len(order)))


@pytest.hookimpl(wrapper=True)
def pytest_generate_tests(metafunc: pytest.Metafunc) -> Iterator[None]:
    yield
    if slow_ones_are_left_out(metafunc.config):
        leave_out_slow_cases(metafunc)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Disable garbage collection during imports, which make little garbage, to save a fifth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_collection_finish() -> None:
    """Set one thread, as ranks have, and freeze imported objects for the garbage collector, which would take
    half a second for them each time, also when pytest looks for garbage at the end.

    The server of ranks is forked at this point, so that it has torch and all other imported modules. The only
    other thread, xdist's, waits for the first process and holds no lock of ours.
    """
    import torch

    torch.set_num_threads(1)
    if processes.START_METHOD == "forkserver":
        processes._run_server(processes._forked)
    from spbench.bench.measure.verify import proof

    proof.keep_package_proof()  # these tests prove the package, so that no test verifies it in small
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # the default thresholds would cost a twentieth of the time
    atexit.register(gc.unfreeze)  # else libraries in C++ would report the frozen objects as leaks


@pytest.fixture(autouse=True)
def files_forgotten() -> Iterator[None]:
    """Forget, after a test, the files of strategies and models that the test added, and the digest of the
    code with these files; else a later test would have other code than a process that the test starts."""
    before = os.environ.get(LOOSE_FILES, "")
    yield
    if os.environ.get(LOOSE_FILES, "") != before:
        os.environ[LOOSE_FILES] = before
        code_digest.cache_clear()


@pytest.fixture(scope="module")
def kept_traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep the traces of a module's tests, so that each cell is traced once; for tests that change no
    code."""
    from spbench.bench.measure.engines import traces

    with pytest.MonkeyPatch.context() as patched:
        kept = DiskCache(tmp_path_factory.mktemp("traces"), traces.LIMIT_BYTES)
        patched.setattr(traces, "_cache", kept)
        yield


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    """A pool of four ranks that tests use in turn; its processes start with the first job. A job that hangs
    ends before pytest's limit, so that the failure names the test."""
    from spbench.bench.measure.processes.rank_pool import RankPool

    with RankPool(4, timeout_s=120.0) as ranks:  # a machine that does ten other things included
        yield ranks
