"""Why processes cannot start or meet, known before they would wait for each other in vain for minutes."""

from __future__ import annotations

import errno
import os
import sys
import time

from spbench.bench.errors import UserError
from spbench.bench.measure.processes.rank_job import fate

#: files that a process opens for a process group, beside one for each of its ranks: its store, what Gloo
#: listens on and polls
FILES_OF_GROUP = 4
#: files that the parent of a rank opens for it at least: pipes, and sockets to the server that forks it
FILES_OF_RANK = 4


def limits_of_process() -> dict[int, tuple[int, int]]:
    """The limits of resources of this process, soft and hard, by the numbers of :mod:`resource`; none but on
    Linux."""
    if sys.platform != "linux":
        return {}
    import resource

    every = {getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")}
    return {limit: resource.getrlimit(limit) for limit in every}


def check_open_files(further: int, purpose: str) -> None:
    """Refuse what needs more files than this process may open: Gloo would wait for minutes, and then name
    addresses.

    Args:
        further: files beside those that are open.
        purpose: as the end of a sentence, "to start 4 ranks".

    Raises:
        UserError: names the limit.
    """
    if not (limits := limits_of_process()):
        return
    import resource

    allowed = limits[resource.RLIMIT_NOFILE][0]
    needed = len(os.listdir("/proc/self/fd")) + further
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        raise UserError(
            f"this process may open {allowed} files, and needs at least {needed} {purpose}; raise the limit: "
            f"ulimit -n {max(1024, 2 * needed)}"
        )


def no_process(error: BaseException, server: int | None) -> str:
    """Why this process could not have one forked, and what to do.

    Args:
        error: what was raised as it tried.
        server: pid of the server that forks processes, a child of this process; None: it is no child.
    """
    what = f"{type(error).__name__}: {error}".removesuffix(": ")
    gone = isinstance(error, EOFError | ConnectionError | FileNotFoundError)
    if gone and server is None:
        return f"the process that forks ranks and workers is gone ({what}); run the same command again"
    if gone and (code := _exit_code(server)) is not None:
        return (
            f"the process that forks ranks and workers {fate(code)}; run the same command again, and if that "
            "fails too, look at the limit of memory (ulimit -v, a container's)"
        )
    files = isinstance(error, OSError) and error.errno in (errno.EMFILE, errno.ENFILE)
    where = (
        "the limit of open files (ulimit -n)" if files else "the limits of memory and processes (ulimit -a)"
    )
    return f"cannot start processes ({what}); look at {where} and at TMPDIR"


def _exit_code(pid: int | None) -> int | None:
    """How a child of this process has ended, as multiprocessing says it; None: it has not within a second.
    Whoever waits for it finds it still there."""
    for _ in range(20) if pid is not None else ():
        ended = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)  # type: ignore[arg-type]
        if ended is not None:
            return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status
        time.sleep(0.05)
    return None
