"""Writing files whole or not at all."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.user_files import resolved


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
    write_together({path: content})
    return path


def write_together(contents: Mapping[Path, str | bytes]) -> list[Path]:
    """Write several files, each as :func:`write_whole` does, and none if one of them finds no room.

    They take their names in the order of the mapping, once all are on the disk.

    Returns:
        The paths.

    Raises:
        UserError: one of them cannot be written; earlier files are unchanged, unless it is the names that
            cannot be taken.
    """
    unfinished: dict[Path, Path] = {}  # by the path that it is for
    try:
        for path, content in contents.items():
            data = content.encode() if isinstance(content, str) else content
            target = resolved(path)
            with suppress(FileExistsError):  # also a file in the folder's place, of which the opening tells
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
    """Put the data on the disk under another name, with the permissions of the target, if there is one."""
    with unfinished.open("wb") as stream:
        if target.exists():
            os.fchmod(stream.fileno(), target.stat().st_mode & 0o777)
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
