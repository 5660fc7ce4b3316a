"""What the code declares (names, summaries, axes, options), known without importing it.

A strategy, model or engine lies in a module that imports torch, which takes seconds; commands that only name
things need no more of it than plain data. A function under :func:`declared` makes such data from its
arguments and the code alone. Inside :func:`kept_on_disk` its answers are kept in a file, and come from there
where the code is not imported already.

The file belongs to one state of the code: the sizes and times of every Python file of impls/, bench/ and of
installed plug-ins, the plug-ins' entry points, and the versions of Python, torch and spbench. Any change of
these leads to another file, so an answer is never that of other code.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from spbench.bench.atomic_write import write_whole
from spbench.bench.errors import UserError
from spbench.impls.discovery import plugin_entries, plugin_files

#: of the environment: the folder of what is kept between runs, or "off"; one of the user's if it is not set
CACHE_FOLDER = "SPBENCH_CACHE"

#: states of the code of which answers are kept, the latest ones
_STATES_KEPT = 20
#: answers in a file, beyond which it is begun anew: options of cells are endless
_MOST_ANSWERS = 5000

P = ParamSpec("P")
T = TypeVar("T")


def cache_folder() -> Path | None:
    """The folder of what is kept between runs, which may be deleted at any time; None: nothing is to be kept,
    as :data:`CACHE_FOLDER` is "off", or the user has no home."""
    folder = os.environ.get(CACHE_FOLDER)
    if folder == "off":
        return None
    if folder:
        return Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spbench"
    except RuntimeError:
        return None


def declared(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function whose result follows from its arguments and the code alone, and is made of what JSON
    has: dicts by texts, lists, texts, numbers, True, False and None (tuples come back as lists)."""
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        if _kept is None:
            return function(*args, **kwargs)
        question = f"{name} {args!r} {kwargs!r}"
        if question not in _kept.answers or "torch" in sys.modules:
            _kept.answers[question] = function(*args, **kwargs)
        return _kept.answers[question]

    return answer


@contextmanager
def kept_on_disk() -> Iterator[None]:
    """Inside, answers come from disk, and those that are not there are asked of the code and added.

    For a process whose code is as its files have it: the command, but no test that replaces parts of it.
    Where the folder cannot be read or written, the code is asked each time.
    """
    global _kept
    folder = cache_folder()
    _kept = None if folder is None else _Kept(folder / "declarations")
    try:
        yield
    finally:
        kept, _kept = _kept, None
        # a full disk, a folder of somebody else's
        with suppress(OSError, UserError):
            if kept is not None:
                kept.save()


class _Kept:
    """The answers for the code as it is now, in a folder, read when the first is asked for."""

    def __init__(self, folder: Path):
        self.folder = folder

    @functools.cached_property
    def path(self) -> Path:
        return self.folder / f"{_state_of_code(Path(__file__).resolve().parents[1])}.json"

    @functools.cached_property
    def on_disk(self) -> dict[str, Any]:
        try:
            content = json.loads(self.path.read_bytes())
        except (OSError, ValueError):  # not there, spoilt
            return {}
        return content if isinstance(content, dict) and len(content) <= _MOST_ANSWERS else {}

    @functools.cached_property
    def answers(self) -> dict[str, Any]:
        """By question."""
        return dict(self.on_disk)

    def save(self) -> None:
        """Write what is new, and forget old states of the code. Of two processes at once the last one wins:
        what the other has found is found again."""
        if "answers" not in vars(self) or self.answers == self.on_disk:
            return
        write_whole(self.path, json.dumps(self.answers))
        files = sorted(self.path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)
        for old in files[:-_STATES_KEPT]:
            old.unlink(missing_ok=True)


_kept: _Kept | None = None


def _state_of_code(root: Path) -> str:
    """A digest of what answers follow from, of files by their sizes and times."""
    files = [*(root / "impls").rglob("*.py"), *(root / "bench").rglob("*.py"), *plugin_files()]
    found = sorted(f"{path} {_stamp(path)}" for path in files)
    found += sorted(f"{entry.group} {entry.name} {entry.value}" for entry in plugin_entries())
    found += [sys.version, *(f"{name} {_version(name)}" for name in ("torch", "spbench"))]
    return hashlib.sha256("\n".join(found).encode()).hexdigest()[:16]


def _stamp(path: Path) -> str:
    status = path.stat()
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def _version(distribution: str) -> str | None:
    with suppress(PackageNotFoundError):
        return version(distribution)
    return None
