"""Figures of cluster files: a number with its source, the range of its unit, and the card or link that a
number belongs to where a file extends another one.

A number outside the range of its unit is refused by naming the slip that it most likely is: a peak of 989 is
meant in TFLOP/s. A file that extends another and has another card keeps the rates that it does not give as
those of the other card, and a link of another bandwidth or name keeps them as those of the other link.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Generic, TypeVar, get_args

from pydantic import BaseModel, Field, NonNegativeFloat, NonNegativeInt, PositiveFloat, PositiveInt

from spbench.bench.yaml_files import InferredSetting, StrictModel

Number = TypeVar("Number")
Entry = TypeVar("Entry")


@dataclass(frozen=True, eq=False)
class Unit:
    """A unit of figures, and the range outside of which a number is taken for a slip.

    Attributes:
        name: the unit's name; "" for a share.
        low, high: the least and the greatest plausible number; 0 is always plausible where a key allows it.
        typical: a usual value; of several possible slips, the one that comes nearest to this value is named.
        slips: the factor to this unit, by the name of another unit that an author may have meant.
    """

    name: str
    low: float
    high: float
    typical: float
    slips: Mapping[str, float] = field(default_factory=dict)

    def problem(self, value: float) -> str:
        """Why a number is implausible in this unit, and which unit may have been meant; "" if it is
        plausible."""
        if value == 0 or self.low <= value <= self.high:
            return ""
        side = f"below {self.low:g}" if value < self.low else f"above {self.high:g}"
        problem = f"{value:g}{f' {self.name}' if self.name else ''} is {side}"
        meant = {
            name: abs(math.log(value * factor / self.typical))
            for name, factor in self.slips.items()
            if self.low <= value * factor <= self.high
        }
        if not meant:
            return f"{problem}; give {self.low:g} to {self.high:g}"
        slip = min(meant, key=meant.__getitem__)
        return f"{problem}; is it {slip}? Then write {_written(value, self.slips[slip])}"


def _written(value: float, factor: float) -> str:
    """A number times a factor, in the form that a file would have: 989e12, 0.74, 85899345920."""
    meant = value * factor
    if factor in _BINARY.values():
        return f"{meant:.0f}"
    power = 3 * math.floor(math.log10(meant) / 3 + 1e-9) if abs(math.log10(meant)) >= 3 else 0
    return f"{meant / 10.0**power:.6g}{f'e{power}' if power else ''}"


_BINARY = {"KiB": 2.0**10, "MiB": 2.0**20, "GiB": 2.0**30}
_RATES = {"MB/s": 1e6, "GB/s": 1e9, "TB/s": 1e12}
_SHORT = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3}
FLOPS = Unit("FLOP/s", 1e9, 1e17, 3e14, {"GFLOP/s": 1e9, "TFLOP/s": 1e12, "PFLOP/s": 1e15})
_PERCENT = {"a percentage": 0.01}
FlopsPerS = Annotated[PositiveFloat, FLOPS]
#: bytes a second of a card's memory; of a link; of a network card, whose datasheets say bits
MemoryRate = Annotated[PositiveFloat, Unit("bytes/s", 1e8, 1e14, 2e12, _RATES)]
LinkRate = Annotated[PositiveFloat, Unit("bytes/s", 1e5, 1e13, 1e11, _RATES)]
CardRate = Annotated[
    PositiveFloat, Unit("bytes/s", 1e5, 2.5e11, 2.5e10, {**_RATES, "Gbit/s": 1.25e8, "bit/s": 0.125})
]
Latency = Annotated[NonNegativeFloat, Unit("s", 1e-9, 1, 5e-6, _SHORT)]
LongSeconds = Annotated[NonNegativeFloat, Unit("s", 1e-9, 1e4, 1e-2, _SHORT)]
ElementSeconds = Annotated[NonNegativeFloat, Unit("s", 1e-16, 1e-6, 1e-10, {"ps": 1e-12, "ns": 1e-9})]
MemoryBytes = Annotated[PositiveInt, Unit("bytes", 1e6, 1e14, 1e11, _BINARY)]
BufferBytes = Annotated[NonNegativeInt, Unit("bytes", 4096, 1e12, 1e8, _BINARY)]
Share = Annotated[PositiveFloat, Unit("", 0.02, 1, 0.5, _PERCENT)]
Loss = Annotated[NonNegativeFloat, Unit("", 1e-6, 1, 0.5, _PERCENT)]
#: a factor to a figure of a datasheet, which may also be above 1
Factor = Annotated[PositiveFloat, Unit("", 1e-4, 10, 0.5, _PERCENT)]
HostScale = Annotated[PositiveFloat, Unit("", 1e-2, 100, 1)]
Tokens = Annotated[NonNegativeFloat, Unit("tokens", 1e-3, 1e7, 1e3)]
Many = Annotated[PositiveInt, Field(le=100_000)]

#: the end of the note of a figure that a user set in a question; such a figure may be implausible
ASKED = "as it was asked for"


class Sourced(StrictModel, Generic[Number]):
    """A number, its source, and, where the source does not print the number itself, how the number follows.

    Attributes:
        substitute: whose number was measured instead, as "an RTX 4090's"; "" for this cluster's own. Times
            that rest on a substitute say so (:mod:`measure.simulator.substitutes`).
        fitted_on: for a calibrated number, the published cells that it was fitted on.
        inferred_from: published numbers that this number was chosen to agree with.
    """

    value: Number | None
    source: str
    note: str = ""
    substitute: str = ""
    fitted_on: list[str] = []
    inferred_from: list[InferredSetting] = []


def named(entries: Mapping[Any, Entry] | None, name: str) -> Entry | None:
    """The entry of a mapping under any name, which the type of its keys may not allow; None: no entry."""
    return None if entries is None else entries.get(name)


#: a card may run above the clock that its datasheet's peak is at: an RTX 4090's attention reaches 1.025
_BOOST = 1.05


def figures(part: Any, at: str = "", units: Sequence[Any] = ()) -> Iterator[tuple[str, Any, Sequence[Any]]]:
    """The rates and limits of a cluster, or of a part of it, and the numbers in them, each as (key path,
    figure or number, units). The numbers of a rate follow it, unless a user asked for that rate; a list's
    entries have their index in the path.

    Args:
        units: the metadata of the annotation of ``part``, which are passed on to its numbers.
    """
    if isinstance(part, Sourced):
        yield at, part, ()
        args = type(part).__pydantic_generic_metadata__["args"]
        if not part.note.endswith(ASKED):
            yield from figures(part.value, at, [*units, *(get_args(args[0])[1:] if args else ())])
    elif isinstance(part, int | float):
        yield at, part, units
    elif isinstance(part, BaseModel):
        for name, own in type(part).model_fields.items():
            yield from figures(getattr(part, name), f"{at}.{name}" if at else name, own.metadata)
    elif isinstance(part, dict | list):
        for key, each in part.items() if isinstance(part, dict) else enumerate(part):
            yield from figures(each, f"{at}.{key}" if at else str(key), units)


def peak_in_half(device: Any) -> float:
    """A card's peak FLOP/s in half precision; inf: not known."""
    peaks = (named(device.peak_flops_per_s, name) for name in ("bf16", "fp16"))
    return max((of.value for of in peaks if of is not None and of.value), default=math.inf)


def implausible(cluster: Any) -> Iterator[str]:
    """The figures of a cluster that are impossible, each as its key path and the problem: numbers out of the
    range of their unit, and rates of attention above the card's peak in half precision."""
    peak = peak_in_half(cluster.device)
    for at, part, units in figures(cluster):
        if isinstance(part, Sourced):
            continue
        if at.startswith(("device.operators.", "device.scans.")) and at.endswith(".1"):  # of seconds
            units = get_args(Latency)[1:]
        problem = next((unit.problem(part) for unit in units if isinstance(unit, Unit)), "")
        if not problem and at.endswith(".limit_flops_per_s") and part > _BOOST * peak:
            problem = f"{part:g} FLOP/s is above the card's peak_flops_per_s of {peak:g}"
        if problem:
            yield f"{at}: {problem}"


# -- files that extend another -----------------------------------------------------------------------------

#: texts on a figure's value, which a file that gives another value does not inherit
_OF_THE_VALUE = ("note", "substitute", "fitted_on", "inferred_from")
#: figures that depend on a card's memory, not on its processor
_OF_MEMORY = ("memory_efficiency", "operators")
#: figures that were measured over a link, and so depend on its bandwidth
_REACHED = ("table", "collectives", "crossings")
Part = Mapping[str, Any]


def inherited(below: Part, own: Part, base: str) -> dict[str, Any]:
    """The figures that a file inherits from the cluster that it extends, marked if of another card or link.

    If the file names another card, inherited figures are marked as the old card's, unless the file says that
    the processor is the same. Then tables of rates by shape are left out, and rates of attention are scaled
    to be no larger a part of the peak. If the file names another link, or gives a link another bandwidth, the
    inherited figures of that link are marked as those of ``base``.

    Args:
        below: the content of the cluster that is extended.
        own: the content of the file.
        base: the name of the cluster that is extended.
    """
    device, taken = _part(own, "device"), dict(below)
    below_it = _part(below, "device")
    card, whose, slower = below_it.get("name"), dict[str, str](), None
    other = device.get("name", card) != card
    if other and "same_processor" not in device:
        whose, slower = {"device.": f"{card}'s", "node_link.": f"{card}'s"}, _slower(device, below_it)
        # a share of the file's own does not go with another card's bandwidth of operands
        taken["device"] = below_it | {
            name: {k: v for k, v in _part(below_it, name).items() if k not in _part(device, name)}
            for name in ("matmul", "grouped_matmul")
        }
        taken["calibration"] = {k: {**v, "fitted_on": []} for k, v in below.get("calibration", {}).items()}
    elif other and _changes(device, below_it, "memory_bandwidth_bytes_per_s"):
        whose = {f"device.{name}.": f"{card}'s" for name in _OF_MEMORY}
    for name in ("node_link", "network"):
        link, of_file = _part(below, name), _part(own, name)
        if of_file.get("name", link.get("name")) != link.get("name"):
            whose.setdefault(f"{name}.", f"{base}'s")
        elif _changes(of_file, link, "bandwidth_bytes_per_s"):
            whose |= {f"{name}.{key}.": f"{base}'s" for key in _REACHED}
    return dict(_taken(taken, own, "", whose, slower))


def _part(content: Part, name: str) -> dict[str, Any]:
    part = content.get(name)
    return part if isinstance(part, dict) else {}


def _changes(own: Part, below: Part, name: str) -> bool:
    return _part(own, name).get("value") not in (None, _part(below, name).get("value"))


def _slower(own: Part, below: Part) -> float:
    """The factor to inherited rates of attention on another card: the ratio of the peaks, at most 1."""
    peaks = [_part(card, "peak_flops_per_s") for card in (own, below)]
    both = ([_part(of, name).get("value") for of in peaks] for name in ("bf16", "fp16"))
    return min([1.0, *(given / was for given, was in both if isinstance(given, int | float) and was)])


def _taken(part: Any, own: Any, at: str, whose: Mapping[str, str], slower: float | None) -> Any:
    """A part of a cluster as a file inherits it: without texts on values that the file replaces, and with
    figures of another card or link marked.

    Args:
        own: the same part in the file.
        at: the key path, with a dot after it.
        whose: the card or link that figures are of, by the beginning of their key path.
        slower: for another card, the factor to rates of attention (:func:`_slower`); else None.
    """
    if isinstance(part, list):
        return [_taken(each, None, at, whose, slower) for each in part]
    if not isinstance(part, dict):
        return part
    own = own if isinstance(own, dict) else {}
    mark = next((each for above, each in whose.items() if at.startswith(above)), "")
    if "value" in own:
        return {name: each for name, each in part.items() if name not in _OF_THE_VALUE}
    if "value" in part and "source" in part:
        marked = {**part, "substitute": part.get("substitute") or mark, "fitted_on": []}
        return marked if mark and part["value"] is not None else part
    taken = {key: _taken(each, own.get(key), f"{at}{key}.", whose, slower) for key, each in part.items()}
    if slower is not None and at.startswith("device."):
        if "table" in taken:
            taken["table"] = {"value": None, "source": f"none; {mark} is left out"}
        if slower < 1 and "limit_flops_per_s" in taken:
            limit = taken["limit_flops_per_s"]
            note = "; ".join(filter(None, (limit.get("note"), f"times {slower:.3g}, as the peaks are")))
            taken["limit_flops_per_s"] = {**limit, "value": limit["value"] * slower, "note": note}
            taken["measured"] = {}
    return taken
