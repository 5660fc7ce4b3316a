"""What runs the cells of a sweep on other machines.

An executor is found by being there: a class derived from :class:`Executor`, with a name, in a module of this
package. The name is the scheme of the addresses under which it is asked for, as dask in dask://HOST:PORT.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Self

from spbench.bench.cell import Cell
from spbench.bench.clusters.cluster import load_cluster
from spbench.bench.errors import UserError, suggestion
from spbench.bench.workers.worker import Outcome, Run
from spbench.impls.discovery import named_classes


class Executor(ABC):
    """Runs cells on other machines, for one sweep or for several after one another.

    Leaving it as a context cancels the cells that have not ended, and leaves nothing behind on the machines.

    Args:
        address: what stands behind ``name://``.

    Raises:
        UserError: there is nothing at that address, or what is there cannot run cells; with the remedy.
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
        """How many cells run at a time, as things are now; at least 1."""

    @abstractmethod
    def outcomes(
        self, cells: Sequence[Cell], run: Run, on_start: Callable[[Cell], None]
    ) -> Iterator[tuple[Cell, Outcome]]:
        """Run cells, in this order as far as there is room; each with its outcome, as soon as it has one.

        Args:
            run: measures a cell; a function of a module that the other machines have too.
            on_start: called as a cell is sent off.

        Raises:
            UserError: the machines cannot go on; what has been returned before stays valid.
        """

    def __enter__(self) -> Self:
        return self

    @abstractmethod
    def __exit__(self, *error: object) -> None: ...


def opened(address: str) -> Executor:
    """The executor of an address such as dask://HOST:PORT, connected and checked.

    Raises:
        UserError: the address has another form, or as :class:`Executor`.
    """
    known = named_classes("spbench.bench.workers", Executor)
    scheme, separator, rest = address.partition("://")
    if not separator or scheme not in known:
        forms = ", ".join(executor.form for executor in known.values())
        hint = suggestion(scheme, known).split(" (known")[0] if separator else ""
        raise UserError(f"no executor has the address {address!r}{hint}; addresses look like {forms}")
    return known[scheme](rest)


@dataclass(frozen=True)
class Parcel:
    """A cell with the figures of its cluster, for a machine where the cluster's file is missing or differs.

    Attributes:
        figures: of the resolved cluster file, as a cluster file without ``extends``.
        cluster: the cluster's name.
    """

    cell: Cell
    cluster: str
    figures: str

    @classmethod
    def of(cls, cell: Cell) -> Parcel:
        """A cell with its cluster as the file is now."""
        cluster = load_cluster(cell.cluster)
        return cls(cell, cluster.name, json.dumps(cluster.model_dump(mode="json", exclude={"name"})))
