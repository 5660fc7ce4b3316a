"""Files that the user names: read whole, in UTF-8, with one line for whatever keeps them from being read."""

from __future__ import annotations

import codecs
import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

from spbench.bench.errors import UserError

_UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)


def read_file(path: Path) -> bytes:
    """The content of a file; pipes are read to their end.

    Raises:
        UserError: there is none, it cannot be read, or it is a device, which may have no end.
    """
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            if stat.S_ISCHR(mode) or stat.S_ISBLK(mode):
                raise UserError(f"cannot read {path}: it is a device, not a file")
            return file.read()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise UserError(f"cannot read {path}: {reason(error)}") from error


def read_text(path: Path) -> str:
    """The text of a file in UTF-8; UserError as of :func:`read_file`, or if it is something else."""
    return decoded(path, read_file(path))


def decoded(path: Path, content: bytes) -> str:
    """The text that a file's content is, without a byte order mark; UserError if it is not UTF-8."""
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        what = f"not a text file in UTF-8 (byte {error.start})"
        if content.startswith(_UTF_16):
            what = "a text file in UTF-16; save it in UTF-8"
        raise UserError(f"{path}: {what}") from error


def resolved(path: Path) -> Path:
    """The absolute path without links; UserError where links go in a circle."""
    try:
        return path.expanduser().resolve()
    except (
        OSError,
        RuntimeError,
        ValueError,
    ) as error:  # RuntimeError: Python's for links that go in a circle
        raise UserError(f"cannot follow {path}: {reason(error)}") from error


def reason(error: Exception) -> str:
    """Why a file cannot be read or a path be followed, without the path."""
    if isinstance(error, OSError):
        return error.strerror or os.strerror(error.errno or errno.EIO)
    return "its links go in a circle" if isinstance(error, RuntimeError) else str(error)


def parse_json(path: Path, content: bytes, **further: Any) -> Any:
    """What the content of a JSON file is; UserError, which names ``path``, if it is not JSON in UTF-8.

    Args:
        further: of :func:`json.loads`.
    """
    text = decoded(path, content)
    try:
        return json.loads(text, **further)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path}: malformed JSON: {error}") from error
