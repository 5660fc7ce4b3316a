"""Files that are written whole or not at all."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from spbench.bench.config.files import UserError


def write_whole(contents: Mapping[Path, str]) -> None:
    """Write files in UTF-8, and the folders that they need: each is first written under another name beside
    it, and put in place once all of them are written.

    Raises:
        UserError: one cannot be written, so that none is changed, or cannot be put in place.
    """
    unfinished = {path: path.with_name(f".{path.name}.tmp") for path in contents}
    path = Path()
    try:
        for path, text in contents.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            unfinished[path].write_text(text, encoding="utf-8", newline="")
        for path in contents:
            unfinished[path].replace(path)
    except OSError as error:
        raise UserError(f"cannot write {path}: {error.strerror or error}") from error
    finally:
        for left in unfinished.values():
            with suppress(OSError):
                left.unlink()
