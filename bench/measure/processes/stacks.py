"""What processes do that hang: the stacks of their threads and their last collectives, written on signals."""

from __future__ import annotations

import faulthandler
import json
import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

#: of the environment: the folder into which a worker and its ranks write their stacks
STACKS_FOLDER = "SPBENCH_STACKS_FOLDER"

#: seconds that processes have to write their stacks
STACKS_S = 6.0

#: the collectives of a rank that are written down when it hangs, the last ones
_LAST_COLLECTIVES = 20


def write_stacks_on_signal(name: str) -> None:
    """From now on SIGUSR1 makes this process write the stacks of all its threads, and go on.

    They go to the file ``name`` in the folder :data:`STACKS_FOLDER`, if the environment has one. The handler
    is C code, so it answers while a thread waits inside a library.
    """
    if folder := os.environ.get(STACKS_FOLDER):
        # stays open for as long as the process lives
        descriptor = os.open(Path(folder, name), os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        faulthandler.register(signal.SIGUSR1, descriptor, all_threads=True, chain=False)


def write_collectives_on_signal(name: str) -> None:
    """From now on SIGUSR2 makes this process write the last collectives that its process groups have begun to
    the file ``name`` in the folder :data:`STACKS_FOLDER`, if the environment has one.

    A thread waits for the signal, which all threads must block: the main thread may hang in a collective.
    """
    if not (folder := os.environ.get(STACKS_FOLDER)):
        return
    file = Path(folder, name)
    file.unlink(missing_ok=True)  # an earlier process with this name may have left one

    def wait() -> None:
        while True:
            signal.sigwait([signal.SIGUSR2])
            file.write_text(_last_collectives() or "none\n", encoding="utf-8")

    threading.Thread(target=wait, daemon=True).start()


def _last_collectives() -> str:
    """A line for each of the last collectives of this process, from torch's flight recorder: number, name,
    shapes, group, state."""
    from torch._C import _distributed_c10d as c10d  # a rank has it already; a worker needs no torch here

    dump = getattr(c10d, "_dump_nccl_trace_json", None) or getattr(c10d, "_dump_fr_trace_json", None)
    if dump is None:  # an older release, built without NCCL
        return ""
    entries = json.loads(dump()).get("entries", [])[-_LAST_COLLECTIVES:]
    return "".join(
        f"{entry['record_id']} {entry['profiling_name']} {entry['input_sizes']} "
        f"on {' '.join(entry['process_group'])}: {'ended' if entry['retired'] else entry['state']}\n"
        for entry in entries
    )


def stacks_of(folder: Path, pids: Iterable[int | None]) -> str:
    """Have processes write their stacks and last collectives into a folder; return each file under its name,
    then, if py-spy is installed, what it sees, which names the lines of Python below C code.

    Takes up to twice :data:`STACKS_S` seconds.
    """
    living = [pid for pid in pids if pid is not None]
    text = ""
    # one after the other: the stacks of a thread that runs are written while they change
    for times, number in enumerate((signal.SIGUSR1, signal.SIGUSR2), start=1):
        for pid in living:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        text = written_stacks(folder, times * len(living))
    return text + "".join(_seen_by_py_spy(pid) for pid in living)


def written_stacks(folder: Path, files: int | None = None) -> str:
    """What signalled processes write into files of a folder, each under its name.

    Args:
        files: how many have something; None: all that there are. They are waited for, and until nothing more
            is written, for up to :data:`STACKS_S` seconds.
    """
    deadline, before, sizes = time.monotonic() + STACKS_S, [-1], [0]
    while time.monotonic() < deadline:
        written = sum(size > 0 for size in sizes)
        if sizes == before and written >= (len(sizes) if files is None else files):
            break
        time.sleep(STACKS_S / 20)
        before, sizes = sizes, [file.stat().st_size for file in _files(folder)]
    texts = {file.name: file.read_text(errors="replace", encoding="utf-8") for file in _files(folder)}
    return "".join(f"-- {name} --\n{text.rstrip()}\n" for name, text in texts.items() if text)


def _files(folder: Path) -> list[Path]:
    return sorted(filter(Path.is_file, folder.rglob("*")))


def _seen_by_py_spy(pid: int) -> str:
    program = shutil.which("py-spy")
    if program is None:
        return ""
    command = [program, "dump", "--nonblocking", "--pid", str(pid)]
    try:
        seen = subprocess.run(command, capture_output=True, text=True, timeout=STACKS_S, check=True).stdout
    except (OSError, subprocess.SubprocessError):  # mostly that it may not look into the process
        return ""
    return f"-- process {pid} as py-spy sees it --\n{seen.rstrip()}\n"
