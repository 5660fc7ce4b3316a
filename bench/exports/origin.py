"""Where results come from: commit, machine and versions, from the rows' provenance or from git."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from spbench.bench.history.checkout import last_change
from spbench.bench.history.run_record import SHORT_HASH
from spbench.bench.sweep.results import Row

_DIRTY = "-dirty"


@dataclass(frozen=True)
class Origin:
    """Where a row comes from; "" stands for what is not known.

    Attributes:
        commit: of the code, in full where git knows it.
        dirty: the code had changes that were not committed.
        host: the name of the machine.
        machine: its facts, as :func:`machine_facts` has them; older rows and pytest-benchmark have few.
        versions: of ``python``, ``torch`` and ``spbench``, as far as they are known.
        time: when the cell ended, ISO 8601.
    """

    commit: str = ""
    dirty: bool = False
    host: str = ""
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    time: str = ""

    @property
    def shown_commit(self) -> str:
        """The commit for people."""
        return f"{self.commit[:SHORT_HASH]}{_DIRTY if self.dirty else ''}" if self.commit else "unknown"


def origin_of(row: Row, results: Path, commit: str = "") -> Origin:
    """Where a row comes from.

    Rows of baselines have no provenance: their commit is the one in which their file last changed.

    Args:
        results: the file or folder that it was read from.
        commit: in place of the one in the row.
    """
    known = row.get("provenance") or {}
    named = commit or str(known.get("commit") or "")
    digits = named.removesuffix(_DIRTY)
    return Origin(
        commit=full_commit(digits, results) if digits else "" if known else last_change(results),
        dirty=named.endswith(_DIRTY),
        host=known.get("host") or "",
        machine=known.get("machine") or {"cpu": known.get("cpu")},
        versions={name: known[name] for name in ("python", "torch", "spbench") if known.get(name)},
        time=row.get("time") or "",
    )


@cache
def full_commit(commit: str, near: Path) -> str:
    """The whole hash of a commit if the checkout around ``near``, or around the working folder, has it; else
    the digits that were given."""
    return _asked((near, Path()), "rev-parse", "--verify", "-q", f"{commit}^{{commit}}") or commit


@cache
def commit_time_s(commit: str, near: Path) -> int | None:
    """When a commit was made, in seconds since 1970; None if neither checkout has it."""
    found = _asked((near, Path()), "show", "-s", "--format=%ct", commit)
    return int(found) if found else None


def _asked(places: tuple[Path, ...], *arguments: str) -> str:
    """What git prints in the first checkout around one of these paths that answers; "" if none does."""
    for place in places:
        folder = place if place.is_dir() else place.parent
        command = ["git", "-C", str(folder), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        if done.stdout.strip():
            return done.stdout.strip()
    return ""
