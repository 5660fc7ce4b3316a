"""A cache on disk that processes share: files by key, of which the least recently used go when it is full.

Own code rather than diskcache, the library for this, whose database is one file that all processes lock: home
folders of clusters are often on NFS, where SQLite must not be used. Here a value is a file that is made whole
or not at all, and only keys with the same first two digits share a lock.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from filelock import FileLock

from spbench.bench.errors import UserError
from spbench.bench.files import write_whole

#: of the environment: the folder of what is kept between runs, or "off"; one of the user's if it is not set
CACHE_FOLDER = "SPBENCH_CACHE"

#: writes after which a process looks again whether the folder is too large
_WRITES_BETWEEN_LOOKS = 50

_log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """The folder of what is kept between runs, which may be deleted at any time; None: nothing is to be kept,
    as :data:`CACHE_FOLDER` is "off", or the user has no home."""
    folder = os.environ.get(CACHE_FOLDER)
    if folder:
        return None if folder == "off" else Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spbench"
    except RuntimeError:
        return None


class DiskCache:
    """Values by key, in a folder.

    A value that cannot be written (a full disk, a folder of somebody else) is not kept, and one line of the
    log says so, once; nothing is raised.

    Args:
        folder: is made when the first value is.
        limit_bytes: the values' size that is allowed; what was used last stays. It may be exceeded for a
            while, by what :data:`_WRITES_BETWEEN_LOOKS` writes of each process add.
    """

    def __init__(self, folder: Path, limit_bytes: int):
        self.folder, self.limit_bytes = folder, limit_bytes
        self._writes = 0
        self._complained = False

    def read(self, key: str) -> bytes | None:
        """The value; None if there is none."""
        path = self.path(key)
        try:
            value = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):
            path.touch()  # it is the one that was used last
        return value

    def write(self, key: str, value: bytes) -> None:
        """Keep a value, and forget others if the folder has become too large."""
        try:
            write_whole(self.path(key), value)
            if self._writes % _WRITES_BETWEEN_LOOKS == 0:
                self._make_room()
            self._writes += 1
        except (OSError, UserError) as error:
            self._complain(error)

    @contextmanager
    def making(self, key: str) -> Iterator[None]:
        """One process at a time is inside for a key: a second one waits, and then finds what the first has
        made. The lock of a process that dies is free at once."""
        # keys share 256 locks, so that no files of locks are left for values that are gone
        lock = FileLock(self.folder / f"{key[:2]}.lock")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock.acquire()
        except OSError as error:
            self._complain(error)
        try:
            yield
        finally:
            lock.release()

    def path(self, key: str) -> Path:
        """The file of a value, whether it is there or not."""
        return self.folder / key[:2] / key

    def _make_room(self) -> None:
        files = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):  # another process has just removed it
                found = path.stat()
                files.append((found.st_mtime, found.st_size, path))
        kept = 0
        for _, size, path in sorted(files, reverse=True):
            kept += size
            if kept > self.limit_bytes:
                path.unlink(missing_ok=True)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            _log.warning("nothing is kept in %s: %s", self.folder, error)
            self._complained = True
