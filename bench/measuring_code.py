"""The code that a measurement may run, as a digest: what was measured by other code may be out of date."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from spbench.impls.discovery import plugin_files

#: rooms and modules of bench that no measurement runs through; a new room counts until it is named here
NOT_MEASURING = frozenset(
    {
        "calibration",
        "commands",
        "doctor",
        "exports",
        "history",
        "published",
        "regressions",
        "report",
        "reproduction",
        "sweep",
        "verification",
        "workers",
        "atomic_write.py",
        "cli.py",
        "errors.py",
        "git.py",
    }
)

#: hexadecimal digits of a digest
DIGEST_LENGTH = 16


@cache
def code_digest() -> str:
    """A digest of the Python files that can change a measurement, as they are at the first call.

    They are all of impls/, all of bench/ but :data:`NOT_MEASURING`, and all of installed plug-ins.
    """
    here = Path(__file__).resolve()
    return digest_of_files(here.parents[1], [*measuring_files(here.parents[1]), *plugin_files()])


def measuring_files(root: Path) -> Iterator[Path]:
    """The Python files below ``root``, which has the folders impls and bench, that a measurement may run."""
    for path in (root / "impls").rglob("*.py"):
        yield path
    for path in (root / "bench").rglob("*.py"):
        if path.relative_to(root / "bench").parts[0] not in NOT_MEASURING:
            yield path


def digest_of_files(root: Path, paths: Iterable[Path]) -> str:
    """A digest of names and contents of files; where ``root`` lies does not matter to it."""
    found = hashlib.sha256()
    for path in sorted(paths):
        name = path.relative_to(root) if path.is_relative_to(root) else path.name
        content = path.read_bytes()
        found.update(f"{name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:DIGEST_LENGTH]
