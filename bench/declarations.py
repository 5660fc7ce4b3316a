"""What the code declares (names, summaries, axes, options), known without importing it.

A strategy, model or engine lies in a module that imports torch, which takes seconds; a listing or a dry run
needs only plain data of it. A function under :func:`declared` makes such data from its arguments and the code
alone. Inside :func:`kept_on_disk` its answers are kept for the code as it is, by the sizes and times of its
files, so that a change of any of them asks the code again.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from spbench.bench.disk_cache import DiskCache, cache_folder
from spbench.impls import loose_files
from spbench.impls.discovery import installed_version, plugin_entries, plugin_files

#: bytes of the answers for all states of the code
_LIMIT_BYTES = 2**24
#: answers for one state, beyond which they are begun anew: options of cells are endless
_MOST_ANSWERS = 5000

P = ParamSpec("P")
T = TypeVar("T")

_kept: _Answers | None = None
_elsewhere: Callable[..., Any] | None = None


def declared(function: Callable[P, T]) -> Callable[P, T]:
    """Mark a function whose result follows from its arguments and the code alone, and is made of what JSON
    has: dicts by texts, lists, texts, numbers, True, False and None (tuples come back as lists)."""
    name = f"{function.__module__}.{function.__qualname__}"

    @functools.wraps(function)
    def answer(*args: P.args, **kwargs: P.kwargs) -> T:
        if _kept is None or loose_files.paths():
            return function(*args, **kwargs)
        question = f"{name} {args!r} {kwargs!r}"
        if question not in _kept.by_question or "torch" in sys.modules:
            _kept.by_question[question] = asked(*args, **kwargs)
        return _kept.by_question[question]

    def asked(*args: P.args, **kwargs: P.kwargs) -> Any:
        if _elsewhere is not None and "torch" not in sys.modules:
            with suppress(NotAnswered):
                return _elsewhere(answer, *args, **kwargs)
        return function(*args, **kwargs)

    return answer


class NotAnswered(Exception):
    """A question has no answer elsewhere."""


@contextmanager
def asked_elsewhere(ask: Callable[..., Any]) -> Iterator[None]:
    """Inside, what is not kept is asked by ``ask``, with a declared function and its arguments, as long as
    this process has not imported torch; if that raises :class:`NotAnswered`, of the code here."""
    global _elsewhere
    _elsewhere = ask
    try:
        yield
    finally:
        _elsewhere = None


@contextmanager
def kept_on_disk() -> Iterator[None]:
    """Inside, answers come from disk, and those that are not there are asked of the code and added.

    For a process whose code is as its files have it: the command, but no test that replaces parts of it.
    Where the folder cannot be read or written, the code is asked each time.
    """
    global _kept
    folder = cache_folder()
    _kept = None if folder is None else _Answers(DiskCache(folder / "declarations", _LIMIT_BYTES))
    try:
        yield
    finally:
        kept, _kept = _kept, None
        if kept is not None:
            kept.save()


class _Answers:
    """The answers for the code as it is now, read when the first is asked for."""

    def __init__(self, cache: DiskCache):
        self.cache = cache

    @functools.cached_property
    def state(self) -> str:
        return state_of_code(Path(__file__).resolve().parents[1])

    @functools.cached_property
    def by_question(self) -> dict[str, Any]:
        try:
            content = json.loads(self.cache.read(self.state) or "{}")
        except ValueError:  # spoilt
            return {}
        return content if isinstance(content, dict) and len(content) <= _MOST_ANSWERS else {}

    def save(self) -> None:
        """Of two processes at once the last one wins: what the other has added is asked again."""
        if "by_question" in vars(self):
            content = json.dumps(self.by_question).encode()
            if content != self.cache.read(self.state):
                self.cache.write(self.state, content)


def state_of_code(root: Path) -> str:
    """A digest of what answers follow from: of files by their sizes and times, entry points, versions."""
    files = [*(root / "impls").rglob("*.py"), *(root / "bench").rglob("*.py"), *plugin_files()]
    parts = sorted(f"{path} {_stamp(path.stat())}" for path in files)
    parts += sorted(f"{entry.group} {entry.name} {entry.value}" for entry in plugin_entries())
    parts += [sys.version, *(installed_version(name) or "" for name in ("torch", "spbench"))]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _stamp(status: os.stat_result) -> str:
    return f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
