"""Files: reading a whole file in UTF-8, with a one-line error for each reason why this fails; writing a file
whole or not at all; and a cache on disk that processes share.

The cache does not use the library diskcache, because all its processes lock one SQLite file, and home folders
of clusters are often on NFS, where SQLite must not be used. In this cache a value is a file that is written
whole or not at all, and only keys with the same first two digits share a lock.
"""

import codecs
import csv
import errno
import io
import json
import logging
import os
import re
import stat
import sys
import sysconfig
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

from filelock import FileLock

from spbench.bench.errors import UserError, shown
from spbench.impls import ONLY_DATA

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_file(path: Path) -> bytes:
    """The content of a file. Pipes are read to their end, but refused if :data:`ONLY_DATA` is set (calls by
    agents), because a pipe may have no end.

    Raises:
        UserError: the file does not exist, cannot be read, or is a device, which may have no end.
    """
    try:
        if os.environ.get(ONLY_DATA) and not stat.S_ISREG(path.stat().st_mode):
            raise UserError(f"cannot read {path}: it is no regular file")
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                raise UserError(f"cannot read {path}: it is a device, not a file")
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise UserError(f"cannot read {path}: {reason(error)}") from error


def read_text(path: Path) -> str:
    """The text of a file; UserError if the file cannot be read (:func:`read_file`) or is not UTF-8."""
    return decoded(path, read_file(path))


def decoded(path: Path, content: bytes) -> str:
    """A file's content as text, without a byte order mark; UserError if the content is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"not a text file in UTF-8 (byte {error.start})"
        if content.startswith(_UTF_16):
            what = "a text file in UTF-16; save it in UTF-8"
        raise UserError(f"{path}: {what}") from error


def resolved(path: Path) -> Path:
    """The absolute path without symbolic links; UserError if links go in a circle."""
    try:
        return path.expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: links that go in a circle
        raise UserError(f"cannot follow {path}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Why a file cannot be read or a path cannot be followed, as text without the path."""
    if isinstance(error, OSError):
        return error.strerror or os.strerror(error.errno or errno.EIO)
    return "its links go in a circle" if isinstance(error, RuntimeError) else str(error)


def parse_json(path: Path, content: bytes) -> Any:
    """The value in the content of a JSON file. UserError, which names ``path``, if the content is not JSON in
    UTF-8, or a key comes twice."""
    text = decoded(path, content)
    try:
        return json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: malformed JSON: {error}") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The dictionary of a JSON object's pairs; ValueError if a key is given twice."""
    content = dict(pairs)
    if len(content) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(
            f"{shown(next(key for key in keys if keys.count(key) > 1))} is given twice; leave one"
        )
    return content


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file so that a reader, even after a crash or on a full disk, finds the old or the new content.

    The content is written to a temporary file in the same folder and synced to the disk, then the temporary
    file is renamed. Missing parent folders are made. A symbolic link stays: the file at its end is replaced,
    and keeps its permissions. Pipes and devices, which cannot be replaced, are written to.

    Args:
        content: text is encoded as UTF-8; line ends are left as they are.

    Returns:
        ``path``.

    Raises:
        UserError: the file cannot be written; an earlier file is unchanged, and no temporary file is left.
    """
    write_together({path: content})
    return path


def write_together(contents: Mapping[Path, str | bytes]) -> list[Path]:
    """Write several files, each as :func:`write_whole` does, and none if one of them finds no room.

    The temporary files are renamed in the order of the mapping, once all are on the disk.

    Returns:
        The paths of the files.

    Raises:
        UserError: a file cannot be written; earlier files are unchanged, unless a rename failed.
    """
    unfinished: dict[Path, Path] = {}  # the temporary file of each path
    try:
        for path, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            target = resolved(path)
            with suppress(FileExistsError):  # if the folder is a file, opening the temporary file fails
                target.parent.mkdir(parents=True)
            if target.exists() and not target.is_file() and not target.is_dir():
                target.write_bytes(data)
            else:
                unfinished[path] = target.with_name(f".{target.name}.{os.getpid()}.tmp")
                _write_beside(target, unfinished[path], data)
        for path, written in unfinished.items():
            written.replace(resolved(path))
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        for written in unfinished.values():
            with suppress(OSError):
                written.unlink()
    return list(contents)


def _write_beside(target: Path, unfinished: Path, data: bytes) -> None:
    """Write the data to ``unfinished`` and sync it, with the permissions of the target if that exists."""
    with unfinished.open("wb") as stream:
        if target.exists():
            os.fchmod(stream.fileno(), target.stat().st_mode & 0o777)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())


#: the signs with which a text begins that spreadsheets take for a formula
FORMULA_SIGNS = ("=", "+", "-", "@", "\t", "\r")
_NUMBER = re.compile(r"[+-]?[\d.,]+(e[+-]?\d+)?%?", re.IGNORECASE)


def csv_text(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of a CSV file: a line of column names, then a line for each row. None and absent values are
    empty; a text that a spreadsheet would run as a formula gets an apostrophe before it."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([_harmless(row.get(name)) for name in columns] for row in rows)
    return stream.getvalue()


def _harmless(value: Any) -> Any:
    is_formula = isinstance(value, str) and value.startswith(FORMULA_SIGNS) and not _NUMBER.fullmatch(value)
    return f"'{value}" if is_formula else value


#: the environment variable with the cache's folder, or "off"; if not set, the cache is in the user's home
CACHE_FOLDER = "SPBENCH_CACHE"

#: the number of writes after which a process checks again whether the folder is too large
_WRITES_BETWEEN_LOOKS = 50

_log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """The folder of the cache, which anyone may delete at any time; None: there is no cache, because
    :data:`CACHE_FOLDER` is "off", or the user has no home."""
    folder = os.environ.get(CACHE_FOLDER)
    if folder:
        return None if folder == "off" else Path(folder)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "spbench"
    except RuntimeError:
        return None


class DiskCache:
    """A cache of values (bytes) by key, in a folder.

    A value that cannot be written (a full disk, a folder of somebody else) is not kept, and one line of the
    log says so, once; no error is raised.

    Args:
        folder: the folder, which is made with the first value.
        limit_bytes: the allowed size of all values; the values used last are kept. The limit may be exceeded
            for a while, by :data:`_WRITES_BETWEEN_LOOKS` values of each process.
    """

    def __init__(self, folder: Path, limit_bytes: int):
        self.folder, self.limit_bytes = folder, limit_bytes
        self._writes = 0
        self._complained = False

    def read(self, key: str) -> bytes | None:
        """The value kept under the key; None if there is none."""
        path = self.path(key)
        try:
            value = path.read_bytes()
        except OSError:
            return None
        with suppress(OSError):
            path.touch()  # the file's time says when the value was last used
        return value

    def write(self, key: str, value: bytes) -> None:
        """Keep a value, and delete the values that were not used for longest if the folder is too large."""
        try:
            write_whole(self.path(key), value)
            if self._writes % _WRITES_BETWEEN_LOOKS == 0:
                self._make_room()
            self._writes += 1
        except (OSError, UserError) as error:
            self._complain(error)

    @contextmanager
    def making(self, key: str) -> Iterator[None]:
        """A context for making a key's value, which one process at a time can enter: a second process waits,
        and then finds the first one's value. The lock of a process that dies is free at once."""
        # keys share 256 locks, so that no lock files are left for values that were deleted
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
        """The path of a key's file, which may not exist."""
        return self.folder / key[:2] / key

    def _make_room(self) -> None:
        files = []
        for path in self.folder.glob("??/*"):
            with suppress(OSError):  # another process has just removed it
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        kept = 0
        for _, size, path in sorted(files, reverse=True):
            kept += size
            if kept > self.limit_bytes:
                path.unlink(missing_ok=True)

    def _complain(self, error: Exception) -> None:
        if not self._complained:
            _log.warning("nothing is kept in %s: %s", self.folder, error)
            self._complained = True


@cache
def users_file(path: str) -> str:
    """The name of a file if it is the user's code, or of a package; "" if it is torch's, spbench's or
    Python's own."""
    root, torch = Path(__file__).resolve().parents[1], Path(sys.modules["torch"].__file__ or "")
    others = (torch.parent, *(root / name for name in ("bench", "impls", "spbench")))
    real, python = os.path.realpath(path), os.path.realpath(sysconfig.get_path("stdlib"))
    of_python = real.startswith(f"{python}{os.sep}") and "-packages" not in real
    is_others = real.startswith(tuple(f"{os.path.realpath(folder)}{os.sep}" for folder in others))
    return os.path.basename(path) if os.path.isfile(path) and not of_python and not is_others else ""


def line_of(frame: Any) -> str:
    """The line of the user's innermost code that a frame runs in, as "step.py:31"; "" if there is none."""
    while frame is not None:
        if name := users_file(frame.f_code.co_filename):
            return f"{name}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
