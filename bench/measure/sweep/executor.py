"""What runs the cells of a sweep on other machines.

The name of a class derived from :class:`Executor` is the scheme of its addresses, as in dask://HOST:PORT.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError, suggestion
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.run_cell import Run
from spbench.bench.measured_code import code_digest
from spbench.bench.measurement import Outcome
from spbench.bench.yaml_text import dump
from spbench.impls import loose_files
from spbench.impls.discovery import installed_version, plugin_entries


@dataclass(frozen=True)
class Installation:
    """Attributes:
    spbench, torch: their versions, as the package metadata has them.
    plugins: the entry points of plug-ins, each as GROUP:NAME, and files in no package, as file:NAME.py.
    code: :func:`code_digest`.
    """

    spbench: str
    torch: str
    plugins: frozenset[str]
    code: str

    @classmethod
    def here(cls) -> Installation:
        """That of this machine, as its files are now."""
        code_digest.cache_clear()
        return cls(
            spbench=installed_version("spbench") or "none",
            torch=installed_version("torch") or "none",
            plugins=frozenset(
                [
                    *(f"{entry.group}:{entry.name}" for entry in plugin_entries()),
                    *(f"file:{path.name}" for path in loose_files.paths()),
                ]
            ),
            code=code_digest(),
        )

    def difference(self, other: Installation) -> str:
        """How the other one differs, and the remedy, as the end of a sentence; "" if it does not.

        The digest of the code decides, not spbench's version, which an editable checkout may lack.
        """
        if lacking := self.plugins - other.plugins:
            return f"lacks the plug-ins {_listed(lacking)}; install them there and start it again"
        if unknown := other.plugins - self.plugins:
            return f"has the plug-ins {_listed(unknown)}, which are not here; install the same on both"
        if self.torch != other.torch:
            return f"has torch {other.torch}, not {self.torch}; install the same there and start it again"
        if self.code != other.code:
            return (
                f"has other code of spbench or its plug-ins (version {other.spbench}, digest {other.code}; "
                f"here {self.spbench}, {self.code}); install the same there and start it again"
            )
        return ""


def _listed(names: frozenset[str]) -> str:
    return ", ".join(sorted(names))


class Executor(ABC):
    """Runs cells on other machines, for one sweep or for several in turn.

    Leaving the context cancels the cells that have not ended, and leaves nothing behind on the machines.

    Args:
        address: without ``name://``.

    Raises:
        UserError: nothing is at that address, or it cannot run cells; with the remedy.
    """

    #: the scheme of its addresses
    name: ClassVar[str]
    #: an address as it is typed, for messages
    form: ClassVar[str]

    @abstractmethod
    def __init__(self, address: str): ...

    @property
    @abstractmethod
    def at_once(self) -> int:
        """How many cells can run at a time now; at least 1."""

    @abstractmethod
    def outcomes(
        self, cells: Sequence[Cell], run: Run, on_start: Callable[[Cell], None]
    ) -> Iterator[tuple[Cell, Outcome]]:
        """Start cells in this order; yield each with its outcome as soon as it has one.

        Args:
            run: measures a cell; a function of a module that the other machines have too.
            on_start: called as a cell is sent off.

        Raises:
            UserError: the machines cannot go on; earlier outcomes stay valid.
        """

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...


def opened(address: str) -> Executor:
    """The executor of an address such as dask://HOST:PORT, connected and checked.

    Raises:
        UserError: as :class:`Executor`; or the address has another form.
    """
    from spbench.bench.measure.sweep.dask_executor import DaskExecutor

    known: Mapping[str, type[Executor]] = {DaskExecutor.name: DaskExecutor}
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in known:
        forms = ", ".join(executor.form for executor in known.values())
        hint = suggestion(scheme, known).split(" (known")[0] if separator else ""
        raise UserError(f"no executor has the address {address!r}{hint}; addresses look like {forms}")
    return known[scheme](rest)


@dataclass(frozen=True)
class Parcel:
    """A cell with its cluster, for a machine where the cluster's file is missing or differs.

    Attributes:
        cluster: the cluster's name.
        content: of a cluster file with all rates and limits, without ``extends``.
    """

    cell: Cell
    cluster: str
    content: str

    @classmethod
    def of(cls, cell: Cell) -> Parcel:
        """A cell with its cluster, as the file is now."""
        cluster = load_cluster(cell.cluster)
        return cls(cell, cluster.name, dump(cluster.content))
