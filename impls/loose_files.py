"""Strategies and models in Python files that are in no package: ``--strategy FILE.py``, ``--model FILE.py``.

An added file becomes a submodule of this module, so that its classes can be pickled by name. Its path is in
the environment, which the processes of a sweep and the ranks inherit.

This module also imports and calls code of users: files and plug-ins.

An error in such code is reported as the code's fault. The code must not end a command with success, because a
strategy that calls ``sys.exit(0)`` would then look verified.
"""

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

#: the environment variable with the paths of the files, with ``os.pathsep`` between
LOOSE_FILES = "SPBENCH_FILES"

#: the environment variable that says that files are only data, so that none is imported
ONLY_DATA = "SPBENCH_ONLY_DATA"

SUFFIX = ".py"

#: turns this module into a package, whose submodules :class:`_Finder` finds
__path__: list[str] = []


def is_packaged(cls: type) -> bool:
    """Whether a class belongs to this package, and not to a plug-in or an added file."""
    module = cls.__module__
    return module.startswith("spbench.impls.") and not module.startswith(f"{__name__}.")


def loose_paths() -> tuple[Path, ...]:
    """The paths of the added files, in the order of their addition."""
    return _paths(os.environ.get(LOOSE_FILES, ""))


@cache
def _paths(joined: str) -> tuple[Path, ...]:
    """The paths in the environment variable's value; cached, because each look at a registry calls this."""
    return tuple(Path(path) for path in joined.split(os.pathsep) if path)


def modules() -> list[ModuleType]:
    """The added files as modules, imported at the first call.

    Raises whatever the files raise as they are imported.
    """
    return [importlib.import_module(_module_name(path)) for path in loose_paths()]


def add_file(path: Path) -> ModuleType:
    """Import a file as a module, in which this process and its child processes then search for strategies and
    models.

    Raises:
        PermissionError: no file's code may run in this process (ONLY_DATA).
        ValueError: another file of that name was added.
        BaseException: whatever the file raises, for example SystemExit.
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
    """The digest of each added file's content, by its path: the argument of :func:`share_files`."""
    return {str(path): _digest(path) for path in loose_paths()}


def share_files(files: Mapping[str, str]) -> None:
    """Use the files that another process has added in this process too, and no others.

    Args:
        files: :func:`file_digests` of the other process, which may be on another machine.

    Raises:
        ValueError: a file is missing on this machine, or has another content.
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
    """An import finder of the added files as submodules of this module."""

    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = next((file for file in loose_paths() if _module_name(file) == name), None)
        return None if file is None else spec_from_file_location(name, file)


sys.meta_path.append(_Finder)


@contextmanager
def exits_refused() -> Iterator[None]:
    """A context in which ``os._exit`` of this thread raises RuntimeError and does not end the process.

    Other threads and forked processes may still call it, as those of multiprocessing do.
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
    """The type and message of an exception, in one line; for a SystemExit, the call that raises it."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) would end the command"
    try:
        text = " ".join(str(error).split())
    except Exception as failure:  # an exception of users may have any __str__
        text = f"its message cannot be built: {type(failure).__name__}"
    return f"{type(error).__name__}: {text}".removesuffix(": ")


def place_of_error(error: BaseException, files: Collection[Path] | None = None) -> str:
    """The text FILE:LINE of the last call in an exception's traceback that is in one of ``files``; "" if
    there is none.

    Args:
        files: paths of files; None: the added files.
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
    """The text of :func:`raised`, after the place of the error in an added file if there is one."""
    at = place_of_error(error)
    return f"{at}: {raised(error)}" if at else raised(error)
