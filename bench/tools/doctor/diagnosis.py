"""Checks of an installation, each run in a process of its own with a time limit.

A check imports the libraries that it needs itself, because a library that is missing, crashes or hangs during
its import is something to observe.

The checks in this module are of Python, of installed libraries, and of the system's disks, shared memory,
limit of open files, cores and memory.
"""

import importlib
import json
import os
import platform
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, requires
from pathlib import Path
from types import ModuleType
from typing import Literal, Self

from spbench import impls
from spbench.bench.files import CACHE_FOLDER, cache_folder
from spbench.bench.measure import environment_of_child, memory_bytes, usable_cores
from spbench.bench.units import GIB, MIB
from spbench.impls import installed_version

#: the program of the child process, whose arguments are a function's module and name
_CHILD = "from spbench.bench.tools.doctor.diagnosis import print_observations; print_observations()"
#: the most characters of a failed check's last line that are shown
_SAID = 200
#: seconds to wait for the end of a killed check
_REAPING_S = 5.0


@dataclass(frozen=True)
class Observation:
    """One line of the diagnosis.

    Attributes:
        subject: the thing that was checked.
        status: "ok"; "warning": the subject works less well or only for some; "missing": it does not work.
        found: the state of the subject in words, such as a version.
        remedy: one line on how to mend the subject.
        is_needed: whether virtual ranks, or real ranks on CPUs, need the subject.
    """

    subject: str
    status: Literal["ok", "warning", "missing"]
    found: str
    remedy: str = ""
    is_needed: bool = False

    @classmethod
    def judged(
        cls,
        subject: str,
        works: bool,
        found: str,
        remedy: str,
        otherwise: Literal["warning", "missing"] = "warning",
        is_needed: bool = False,
    ) -> Self:
        """An observation with status "ok" if the subject works, else ``otherwise`` with the remedy."""
        return cls(subject, "ok", found) if works else cls(subject, otherwise, found, remedy, is_needed)


@dataclass(frozen=True)
class Check:
    """A check of one thing on this machine.

    Attributes:
        look: a function of a module, without arguments, that yields observations.
        is_needed: ``is_needed`` of the observation that reports that ``look`` crashed or did not end.
        limit_s: seconds after which ``look`` is ended.
    """

    look: Callable[[], Iterable[Observation]]
    is_needed: bool = False
    limit_s: float = 60.0


def diagnose(chosen: Mapping[str, Check]) -> list[Observation]:
    """The observations of the checks, in their order; each check runs in a process of its own, all at once.

    If a check's process dies, raises or does not end in time, an observation says so. No process is left when
    this returns or is interrupted.
    """
    with ThreadPoolExecutor(max(1, len(chosen))) as threads, ExitStack() as running:
        processes = [running.enter_context(_running(check.look)) for check in chosen.values()]
        of_checks = threads.map(_observations, chosen, chosen.values(), processes)
        return [observation for observations in of_checks for observation in observations]


@contextmanager
def _running(look: Callable[[], Iterable[Observation]]) -> Iterator[subprocess.Popen[str]]:
    """The process that runs the function of a check; at the end that process and its children are killed."""
    process = subprocess.Popen(
        [sys.executable, "-c", _CHILD, look.__module__, look.__qualname__],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=os.environ | environment_of_child(),
        start_new_session=True,  # so that processes of the check end with it
    )
    try:
        yield process
    finally:
        _kill(process)


def _kill(process: subprocess.Popen[str]) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _observations(name: str, check: Check, process: subprocess.Popen[str]) -> list[Observation]:
    """The observations that a check's process prints within the check's limit; or one on how it failed."""
    try:
        printed, said = process.communicate(timeout=check.limit_s)
        if not (code := process.returncode):
            return [Observation(**each) for each in json.loads(printed)]
        ending = f"crashed with {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        last = next(reversed(said.strip().splitlines()), "")[-_SAID:]
        failure = f"{ending}{last and f': {last}'}"
    except subprocess.TimeoutExpired:
        _kill(process)
        with suppress(subprocess.TimeoutExpired):  # a process of its own session may hold the pipe
            process.communicate(timeout=_REAPING_S)
        failure = f"no answer within {check.limit_s:g} s"
    again = f"see: python -c 'from {check.look.__module__} import *; print([*{check.look.__qualname__}()])'"
    return [Observation(name, "missing", failure, again, check.is_needed)]


def print_observations() -> None:
    """Run in the child: print, as JSON, the observations of the function that the arguments name."""
    module, function = sys.argv[1:]
    with redirect_stdout(sys.stderr):
        observations = [asdict(each) for each in getattr(importlib.import_module(module), function)()]
    print(json.dumps(observations))


_OLDEST_PYTHON = (3, 11)
#: compute capabilities for which a kernel is compiled: P100, V100, A100, H100, B200
_CAPABILITIES = {"P100": 60, "V100": 70, "A100": 80, "H100": 90, "B200": 100}
#: of a line with a requirement: what pip takes, the package's name, and the extra in the marker
_REQUIREMENT = re.compile(r"""(?m)^(([\w.-]+)[^;\n]*)(?:;.*extra\s*==\s*['"]([^'"]+))?""")
#: free bytes below which a disk is full, or soon will be: a sweep's rows take a few MiB, traces up to 2 GiB
_FULL_BYTES, _LITTLE_BYTES = 50 * MIB, 2 * GIB
#: shared memory that NCCL and data loaders can do with
_SHARED_BYTES = GIB
#: open files that some dozens of ranks need, with their sockets
_OPEN_FILES = 1024


def python() -> Iterator[Observation]:
    """Check the version of Python; the observation also names the system."""
    text = f"{platform.python_version()}, {platform.platform()}, {sys.executable}"
    remedy = f"install Python {'.'.join(map(str, _OLDEST_PYTHON))} or later"
    yield Observation.judged("Python", sys.version_info >= _OLDEST_PYTHON, text, remedy, "missing", True)


def packages() -> Iterator[Observation]:
    """Check that the packages are installed that spbench needs, and those of each extra."""
    try:
        declared = requires("spbench") or []
    except PackageNotFoundError:
        yield Observation("spbench", "warning", "not installed, only text on the path", "pip install -e .")
        return
    wanted: dict[str, dict[str, str]] = {}
    for text, name, extra in _REQUIREMENT.findall("\n".join(declared)):
        wanted.setdefault(extra, {})[name] = text.strip()
    for extra, texts in wanted.items():
        versions = {name: installed_version(name) for name in texts}
        absent = [name for name, version in versions.items() if version is None]
        there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
        subject = f"packages of the extra {extra}" if extra else "packages"
        remedy = f"pip install {' '.join(shlex.quote(texts[name]) for name in absent)}"
        if absent:
            there = f"not installed: {', '.join(absent)}{there and f'; installed: {there}'}"
        yield Observation.judged(subject, not absent, there, remedy, "missing", not extra)


def py_spy() -> Iterator[Observation]:
    """Check for py-spy, which reads the Python and C stacks of a process that hangs."""
    program = shutil.which("py-spy") or shutil.which("py-spy", path=str(Path(sys.executable).parent))
    if program is None:
        remedy = "pip install py-spy; without it the stacks of a rank that hangs are Python's alone"
        yield Observation("py-spy", "missing", "not installed", remedy)
        return
    done = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=20)
    yield Observation("py-spy", "ok", f"{done.stdout.strip()}, {program}")


def torch() -> Iterator[Observation]:
    """Check the build of torch, and whether that has Gloo."""
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    yield Observation("torch", "ok", f"{torch.__version__}, built for {build}", is_needed=True)
    has_gloo = torch.distributed.is_available() and torch.distributed.is_gloo_available()
    text = "in this build of torch" if has_gloo else "not in this build of torch"
    remedy = "install a build of torch with torch.distributed and Gloo"
    yield Observation.judged("Gloo", has_gloo, text, remedy, "missing", True)


def triton() -> Iterator[Observation]:
    """Check for which kinds of GPUs Triton compiles one of our kernels; compiling needs no GPU."""
    try:
        import triton
    except ImportError as error:
        remedy = "pip install triton (Linux); linear attention is slower on GPUs without it"
        yield Observation("Triton", "missing", f"cannot be imported: {error}", remedy)
        return
    failed: dict[str, str] = {}
    for card, capability in _CAPABILITIES.items():
        try:
            _compile(triton, capability)
        except Exception as error:  # of a compiler anything can be raised
            failed[card] = next(iter(str(error).strip().splitlines()), type(error).__name__)
    works = ", ".join(f"{card} (sm_{_CAPABILITIES[card]})" for card in _CAPABILITIES if card not in failed)
    text = f"{triton.__version__}, compiles for {works or 'none'}"
    text += next((f"; not for {card}: {why}" for card, why in failed.items()), "")
    remedy = f"another version of Triton, if you have one of these: {', '.join(failed)}"
    yield Observation.judged("Triton", not failed, text, remedy)


def _compile(triton: ModuleType, capability: int) -> None:
    kernels = impls.linear_attention_triton
    scan = kernels._scan
    constants = {"SIZE": 64 * 64, "BACKWARD": False, "TS": kernels.SCANNED}
    types = {"states": "*fp32", "rates": "*fp32"}
    source = triton.compiler.ASTSource(
        scan,
        {name: "constexpr" if name in constants else types.get(name, "i32") for name in scan.arg_names},
        {(place,): constants[name] for place, name in enumerate(scan.arg_names) if name in constants},
    )
    triton.compile(source, target=triton.backends.compiler.GPUTarget("cuda", capability, 32))


# -- what the system gives -------------------------------------------------------------------------------


def disks() -> Iterator[Observation]:
    """Check that the folders of results, cache and temporary files can be written, and their free bytes."""
    yield _disk("disk of results", Path("results"), "run spbench in a folder with room, or give --output")
    cache = cache_folder()
    if cache is None:
        remedy = f"set {CACHE_FOLDER} to a folder"
        yield Observation("disk of the cache", "warning", "traces are not kept", remedy)
    else:
        remedy = f"point {CACHE_FOLDER} to a folder with room; without it every cell is traced again"
        yield _disk("disk of the cache", cache, remedy, is_needed=False)
    yield _disk("temporary files", Path(tempfile.gettempdir()), "point TMPDIR to a folder with room")


def _disk(subject: str, folder: Path, remedy: str, is_needed: bool = True) -> Observation:
    """Check the free bytes of a folder, or of its nearest parent if the folder does not exist."""
    there = folder.absolute()
    while not there.exists():
        there = there.parent
    try:
        with tempfile.TemporaryFile(dir=there) as probe:
            probe.write(b"spbench")
            probe.flush()
        free = shutil.disk_usage(there).free
    except OSError as error:
        return Observation(subject, "missing", f"{there}: {error.strerror}", remedy, is_needed)
    text = f"{free / GIB:.1f} GiB free in {there}"
    if free < _FULL_BYTES:
        return Observation(subject, "missing", text, remedy, is_needed)
    return Observation.judged(subject, free >= _LITTLE_BYTES, text, remedy)


def shared_memory() -> Iterator[Observation]:
    """Check the size of /dev/shm, through which NCCL's ranks on one node exchange data."""
    what, folder = "shared memory", Path("/dev/shm")
    if not folder.is_dir():
        yield Observation(what, "warning", "there is no /dev/shm", "only Linux has one; NCCL needs it")
        return
    size = shutil.disk_usage(folder)
    text = f"{size.free / GIB:.1f} of {size.total / GIB:.1f} GiB free in {folder}"
    enough = size.free >= _SHARED_BYTES
    yield Observation.judged(what, enough, text, "in a container: docker run --shm-size=8g")


def open_files() -> Iterator[Observation]:
    """Check how many files and sockets a process may have open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit, most = ("unlimited" if n == resource.RLIM_INFINITY else n for n in (soft, hard))
    text = f"{limit} a process, of at most {most}"
    enough = soft == resource.RLIM_INFINITY or soft >= _OPEN_FILES
    yield Observation.judged("open files", enough, text, "ulimit -n 65536 before you start many ranks")


def machine() -> Iterator[Observation]:
    """Check how many cores this process may use; the observation also has the memory."""
    text = f"{usable_cores()} of {os.cpu_count()} cores"
    if (memory := memory_bytes()) is not None:
        text += f", {memory / GIB:.1f} GiB of memory"
    remedy = "two ranks share one core: their times mean little"
    yield Observation.judged("machine", usable_cores() > 1, text, remedy)
