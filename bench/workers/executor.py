"""What runs the cells of a sweep on other machines.

A class derived from :class:`Executor`, with a name, in a module of this package is found by being there. Its
name is the scheme of its addresses, as in dask://HOST:PORT.
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
    known = named_classes("spbench.bench.workers", Executor)
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
        return cls(cell, cluster.name, json.dumps(cluster.model_dump(mode="json", exclude={"name"})))
