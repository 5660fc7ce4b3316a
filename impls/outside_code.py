"""Code that is not of this package: files and plug-ins of users, which are imported and called here.

Whatever such code does is told as a fault of it. It must not end a command with success: a strategy that
calls ``sys.exit(0)`` would look like one that has been verified.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from spbench.impls import loose_files


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


def place(error: BaseException, files: Collection[Path] | None = None) -> str:
    """FILE:LINE of the last call in one of some files on the way to where an exception was raised; "" where
    there is none.

    Args:
        files: None: those that were added (:mod:`spbench.impls.loose_files`).
    """
    names = {str(path) for path in (loose_files.paths() if files is None else files)}
    calls = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if isinstance(error, SyntaxError):
        calls.append((error.filename or "", error.lineno or 1))
    found = [f"{file}:{line}" for file, line in calls if file in names]
    return found[-1] if found else ""


def printed(error: BaseException) -> str:
    """The traceback of an exception, as Python prints it."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        return f"{''.join(traceback.format_tb(error.__traceback__))}{raised(error)}\n"


def told(error: BaseException) -> str:
    """:func:`raised`, after the place in a file that was added, if there is one."""
    at = place(error)
    return f"{at}: {raised(error)}" if at else raised(error)
