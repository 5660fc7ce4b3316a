"""Where a result comes from: the code, the libraries and the machine."""

from __future__ import annotations

import platform
import subprocess
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


@cache
def provenance() -> dict[str, str | None]:
    """What is the same for all rows of a process: versions, commit (with "-dirty" for a changed checkout;
    None where the code is not a checkout) and host."""
    return {
        "spbench": installed_version("spbench"),
        "commit": _commit(Path(__file__).resolve().parents[2]),
        "torch": installed_version("torch"),
        "python": platform.python_version(),
        "host": platform.node(),
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
    command = ["git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
