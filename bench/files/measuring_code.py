"""The code that a measurement may run, as a digest: what was measured by other code may be out of date."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path

#: rooms and modules of bench that no measurement runs through; a new room counts until it is named here
NOT_MEASURING = frozenset(
    {
        "calibration",
        "commands",
        "comparison",
        "sweep",
        "verification",
        "atomic_write.py",
        "cli.py",
        "errors.py",
    }
)

#: hexadecimal digits of a digest
DIGEST_LENGTH = 16

#: prefix of the groups of entry points in which other distributions offer strategies, models, ...
_PLUGIN_GROUPS = "spbench."


@cache
def code_digest() -> str:
    """A digest of the Python files that can change a measurement, as they are at the first call.

    They are all of impls/, all of bench/ but :data:`NOT_MEASURING`, and all of installed plug-ins.
    """
    here = Path(__file__).resolve()
    return digest_of_files(here.parents[2], [*measuring_files(here.parents[2]), *_plugin_files()])


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


def _plugin_files() -> Iterator[Path]:
    """The Python files of the packages that entry points of plug-ins lie in."""
    entries = (entry for distribution in distributions() for entry in distribution.entry_points)
    for package in {
        entry.module.split(".")[0] for entry in entries if entry.group.startswith(_PLUGIN_GROUPS)
    }:
        spec = importlib.util.find_spec(package)
        if spec is not None and spec.submodule_search_locations:
            for folder in spec.submodule_search_locations:
                yield from Path(folder).rglob("*.py")
        elif spec is not None and spec.origin is not None:
            yield Path(spec.origin)
