"""Where a result comes from: the code, the libraries and the machine."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from spbench.bench.sweep.machine import machine_facts

#: what is written from rows and by verification, so that no row depends on it
MADE_FROM_ROWS = ("results/reproduction", "results/baseline", "results/verification", "*.md")


@cache
def provenance() -> dict[str, Any]:
    """What is the same for all rows of a process: versions, host, the ``machine`` (:func:`machine_facts`) and
    the commit (12 digits, with "-dirty" if tracked files other than :data:`MADE_FROM_ROWS` are changed; None
    where the code is not in a checkout)."""
    return {
        "spbench": installed_version("spbench"),
        "commit": _commit(Path(__file__).resolve().parents[2]),
        "torch": installed_version("torch"),
        "python": platform.python_version(),
        "host": platform.node(),
        "machine": machine_facts(),
    }


@cache
def installed_version(distribution: str) -> str | None:
    """The version of an installed distribution, or None."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None


def _commit(checkout: Path) -> str | None:
    if not (checkout / ".git").exists():  # installed, perhaps inside somebody else's checkout
        return None
    try:
        commit = _git(checkout, "describe", "--always", "--abbrev=12", "--exclude=*")
        excluded = [f":(exclude){path}" for path in MADE_FROM_ROWS]
        changed = _git(checkout, "status", "--porcelain", "--untracked-files=no", "--", ".", *excluded)
    except (OSError, subprocess.SubprocessError):
        return None
    return f"{commit}-dirty" if changed else commit


def _git(checkout: Path, *arguments: str) -> str:
    command = ["git", "-C", str(checkout), *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
