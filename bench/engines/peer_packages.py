"""The packages that a cell's strategy calls, where it is a peer; known without torch."""

from __future__ import annotations

from spbench.bench.declarations import declared
from spbench.impls.peers.registry import INSTALL, absent, versions
from spbench.impls.strategies.nesting import nesting


@declared
def requirements(strategy: str) -> list[str]:
    """The distributions that the strategies of a name require; none unless one of them is a peer.

    Raises:
        KeyError: a strategy is not known.
        ValueError: they cannot be around each other.
    """
    return list(nesting(strategy).requires)


def installed(strategy: str) -> dict[str, str | None]:
    """The version of each of the :func:`requirements`, None where it is missing: a part of what makes a
    measurement."""
    return versions(requirements(strategy))


def missing_problem(strategy: str) -> str:
    """One line on those of the :func:`requirements` that are missing, and how to mend it; "" if none is."""
    missing = absent(requirements(strategy))
    return f"strategy {strategy} needs {' and '.join(missing)}; {INSTALL}" if missing else ""
