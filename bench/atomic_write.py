"""Writing a file whole or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from spbench.bench.errors import UserError


def write_whole(path: Path, content: str | bytes) -> Path:
    """Write a file so that a reader, even after a crash or on a full disk, finds the old content or the new.

    The content goes to a temporary file in the same folder and from there to the disk, then the temporary
    file takes the name. Missing parent folders are made. A symbolic link stays: the file that it leads to
    is replaced, and keeps its permissions. Pipes and devices, which cannot be replaced, are written to.

    Args:
        content: text is encoded as UTF-8; line ends are left as they are.

    Returns:
        ``path``.

    Raises:
        UserError: the file cannot be written; an earlier one is unchanged, and no temporary file is left.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        target = path.resolve()
        with suppress(FileExistsError):  # also a file in the folder's place, of which the opening tells
            target.parent.mkdir(parents=True)
        if target.exists() and not target.is_file() and not target.is_dir():
            target.write_bytes(data)
        else:
            _replace(target, data)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    return path


def _replace(target: Path, data: bytes) -> None:
    unfinished = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with unfinished.open("wb") as stream:
            if target.exists():
                os.fchmod(stream.fileno(), target.stat().st_mode & 0o777)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        unfinished.replace(target)
    except BaseException:
        with suppress(OSError):
            unfinished.unlink()
        raise
