"""Strategies and models in Python files that are in no package: ``--strategy FILE.py``, ``--model FILE.py``.

A file that was added is a submodule of this module, so that its classes travel between processes by name. Its
path travels by the environment, which the processes of a sweep and the ranks take over.

Code that is not of this package: files and plug-ins of users, which are imported and called here.

Whatever such code does is told as a fault of it. It must not end a command with success: a strategy that
calls ``sys.exit(0)`` would look like one that has been verified.
"""

from __future__ import annotations

import hashlib
import importlib
import os
import platform
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType
from typing import NoReturn

from spbench.impls import loose_files

#: of the environment: the paths of the files, with ``os.pathsep`` between
LOOSE_FILES = "SPBENCH_FILES"

#: of the environment: files are data here, and none is imported
ONLY_DATA = "SPBENCH_ONLY_DATA"

SUFFIX = ".py"

#: makes a package of this module, whose submodules :class:`_Finder` finds
__path__: list[str] = []


def is_packaged(cls: type) -> bool:
    """Whether a class is of this package: of no plug-in, and of no file that was added."""
    module = cls.__module__
    return module.startswith("spbench.impls.") and not module.startswith(f"{__name__}.")


def loose_paths() -> tuple[Path, ...]:
    """The files that were added, in their order."""
    return _paths(os.environ.get(LOOSE_FILES, ""))


@cache
def _paths(joined: str) -> tuple[Path, ...]:
    """The files that the variable names; the result is kept, as each look at a registry asks."""
    return tuple(Path(path) for path in joined.split(os.pathsep) if path)


def modules() -> list[ModuleType]:
    """The files as modules, imported at the first call.

    Raises whatever the files raise as they are imported.
    """
    return [importlib.import_module(_module_name(path)) for path in loose_paths()]


def add_file(path: Path) -> ModuleType:
    """Import a file, and have it searched for strategies and models from now on, here and in all processes
    that this one starts.

    Raises:
        PermissionError: no file's code may run here.
        ValueError: another file of that name was added.
        BaseException: whatever the file raises, as SystemExit.
    """
    if os.environ.get(ONLY_DATA):
        raise PermissionError("no code of files is run here; run the command in a shell instead")
    path = path.resolve()
    for other in loose_paths():
        if other != path and _module_name(other) == _module_name(path):
            raise ValueError(f"{path} and {other} have one name; rename one")
    before = os.environ.get(LOOSE_FILES, "")
    os.environ[LOOSE_FILES] = os.pathsep.join(map(str, dict.fromkeys([*loose_paths(), path])))
    try:
        return importlib.import_module(_module_name(path))
    except BaseException:
        os.environ[LOOSE_FILES] = before
        raise


def file_digests() -> dict[str, str]:
    """A digest of the content of each file that was added, by its path: what :func:`share_files` takes."""
    return {str(path): _digest(path) for path in loose_paths()}


def share_files(files: Mapping[str, str]) -> None:
    """Have the files that another process has added found here too, and no others.

    Args:
        files: of :func:`digests` there. The other process may be on another machine.

    Raises:
        ValueError: a file is not here, or is not the same.
    """
    for name, digest in files.items():
        own_digest = _digest(Path(name)) if Path(name).is_file() else None
        if own_digest != digest:
            what = "is not on" if own_digest is None else "is another file on"
            raise ValueError(
                f"{name} {what} {platform.node()}; put the same file there, on a file system that all share"
            )
    os.environ[LOOSE_FILES] = os.pathsep.join(files)


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _module_name(path: Path) -> str:
    return f"{__name__}.{path.stem.replace('.', '_')}"


class _Finder:
    """Finds the files as submodules of this module."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = next((file for file in loose_paths() if _module_name(file) == name), None)
        return None if file is None else spec_from_file_location(name, file)


sys.meta_path.append(_Finder)


@contextmanager
def exits_refused() -> Iterator[None]:
    """Inside, ``os._exit`` of the main thread of this process raises a RuntimeError instead.

    Threads and forked processes may still end themselves by it: multiprocessing's do.
    """
    end, process, thread = os._exit, os.getpid(), threading.get_ident()

    def refuse(status: int) -> NoReturn:
        if os.getpid() != process or threading.get_ident() != thread:
            end(status)
        raise RuntimeError(f"os._exit({status}) would end the command")

    os._exit = refuse
    try:
        yield
    finally:
        os._exit = end


def raised(error: BaseException) -> str:
    """Type and message of an exception, in one line; of a SystemExit the call that raises it."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) would end the command"
    try:
        text = " ".join(str(error).split())
    except Exception as failure:  # an exception of users may have any __str__
        text = f"its message cannot be built: {type(failure).__name__}"
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def place_of_error(error: BaseException, files: Collection[Path] | None = None) -> str:
    """FILE:LINE of the last call in one of some files on the way to where an exception was raised; "" where
    there is none.

    Args:
        files: None: those that were added (:mod:`spbench.impls.loose_files`).
    """
    names = {str(path) for path in (loose_files.loose_paths() if files is None else files)}
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        calls.append((error.filename or "", error.lineno or 1))
    places = [f"{file}:{line}" for file, line in calls if file in names]
    return places[-1] if places else ""


def printed(error: BaseException) -> str:
    """The traceback of an exception, as Python prints it."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return f"{''.join(traceback.format_tb(error.__traceback__))}{raised(error)}\n"


def told(error: BaseException) -> str:
    """:func:`raised`, after the place in a file that was added, if there is one."""
    at = place_of_error(error)
    return f"{at}: {raised(error)}" if at else raised(error)
