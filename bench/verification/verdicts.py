"""Verdicts of `spbench verify` in a file, so that pages can show what is proven, and of which code.

A folder has one file of JSON lines, one a case: the fields of :class:`VerifyRow`, and of the run that judged
it the backend, the type of device, the commit, :func:`verified_code`, torch's version and the time.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from spbench.bench.atomic_write import write_whole
from spbench.bench.errors import UserError
from spbench.bench.files.measuring_code import digest_of_files
from spbench.impls.discovery import plugin_files

VERDICTS_FILE = "verdicts.jsonl"

Verdict = dict[str, Any]

#: what names a case; a later verdict on it takes the place of an earlier one
CASE = (
    "strategy",
    "model",
    "variant",
    "part",
    "size",
    "mesh",
    "dtype",
    "batch",
    "seq_len",
    "backend",
    "device",
)
#: what a reader finds in every verdict; a text that is empty and a number that is not known are left out of
#: the file
_FIELDS: Verdict = {
    **dict.fromkeys(CASE, ""),
    **dict.fromkeys(("status", "commit", "code", "torch", "time", "tensor", "verdict", "reason"), ""),
    **dict.fromkeys(("error", "limit", "rank", "factor")),
}
#: what a line must have
_NEEDED = ("strategy", "model", "part", "size", "dtype", "status")


@cache
def verified_code() -> str:
    """A digest of the Python files that a verdict is on, as they are at the first call: impls/ and installed
    plug-ins."""
    root = Path(__file__).resolve().parents[2]
    return digest_of_files(root, [*(root / "impls").rglob("*.py"), *plugin_files()])


def read_verdicts(folder: Path) -> list[Verdict]:
    """The verdicts in a folder, in the order of their cases; none if it has no file of them.

    Raises:
        UserError: the file cannot be read, or a line is not a verdict.
    """
    path = folder / VERDICTS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {error}") from error
    return [_read(path, number, line) for number, line in enumerate(lines, start=1) if line.strip()]


def _read(path: Path, number: int, line: str) -> Verdict:
    try:
        found = json.loads(line)
        if not isinstance(found, dict):
            raise ValueError(f"a {type(found).__name__}")
        if absent := [name for name in _NEEDED if name not in found]:
            raise ValueError(f"no {absent[0]}")
    except (ValueError, RecursionError) as error:
        raise UserError(
            f"{path}:{number}: not a verdict ({error}); delete the line, and verify again"
        ) from error
    return _FIELDS | found


@contextmanager
def kept_verdicts(folder: Path | None, made: Mapping[str, Any]) -> Iterator[list[Verdict]]:
    """A list for the verdicts of a run, which are written to a folder beside earlier ones when it ends, also
    by an error; None: nothing is written.

    Args:
        made: further fields of each of them.

    Raises:
        UserError: the file cannot be read or written; an earlier one is as it was.
    """
    found: list[Verdict] = []
    earlier = [] if folder is None else read_verdicts(folder)
    try:
        yield found
    finally:
        if folder is not None:
            write_whole(folder / VERDICTS_FILE, _text([*earlier, *({**row, **made} for row in found)]))


def _text(verdicts: Iterable[Verdict]) -> str:
    """A line for each case, in their order: a diff shows what has changed."""
    by_case = {tuple(row[name] for name in CASE): row for row in verdicts}
    return "".join(
        json.dumps(_filled(by_case[case]), allow_nan=False, separators=(",", ":")) + "\n"
        for case in sorted(by_case)
    )


def _filled(row: Verdict) -> Verdict:
    """What is known of a case: most of the thousands say nothing of a wrong tensor."""
    return {name: value for name, value in row.items() if value not in ("", None)}
