"""The meters that a scenario can ask for by name, beside those of memory, communication and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from spbench.impls.discovery import named_classes

if TYPE_CHECKING:
    from spbench.bench.meters.meter import Meter


def meters() -> Mapping[str, type[Meter]]:
    """The meters by name: those of this package, then the entry points ``spbench.meters``."""
    from spbench.bench.meters.communication import CommunicationMeter
    from spbench.bench.meters.event_log import EventLog
    from spbench.bench.meters.memory import MemoryMeter
    from spbench.bench.meters.meter import Meter

    found = named_classes("spbench.bench.meters", Meter, "spbench.meters")
    always = (MemoryMeter, CommunicationMeter, EventLog)  # in every recorder already
    return {name: cls for name, cls in found.items() if cls not in always}


def meter_classes(names: Sequence[str]) -> list[type[Meter]]:
    """The meters of these names.

    Raises:
        KeyError: one is unknown; with the known names.
    """
    known = meters()
    if missing := [name for name in names if name not in known]:
        raise KeyError(f"unknown meter {missing[0]!r}; known: {', '.join(known) or 'none'}")
    return [known[name] for name in names]
