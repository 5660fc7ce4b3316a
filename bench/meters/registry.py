"""The meters that a scenario can ask for by name, beside those of memory, communication and events."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from spbench.bench.meters.communication import CommunicationMeter
from spbench.bench.meters.event_log import EventLog
from spbench.bench.meters.memory import MemoryMeter
from spbench.bench.meters.meter import Meter
from spbench.impls.discovery import named_classes

#: in every recorder already, so that nobody has to ask for them
_ALWAYS = (MemoryMeter, CommunicationMeter, EventLog)


def meters() -> Mapping[str, type[Meter]]:
    """The meters by name: those of this package, then the entry points ``spbench.meters``."""
    found = named_classes("spbench.bench.meters", Meter, "spbench.meters")
    return {name: cls for name, cls in found.items() if cls not in _ALWAYS}


def meter_classes(names: Sequence[str]) -> list[type[Meter]]:
    """The meters of these names.

    Raises:
        KeyError: one is unknown; with the known names.
    """
    known = meters()
    if missing := [name for name in names if name not in known]:
        raise KeyError(f"unknown meter {missing[0]!r}; known: {', '.join(known) or 'none'}")
    return [known[name] for name in names]
