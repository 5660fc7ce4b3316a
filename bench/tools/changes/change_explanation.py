"""Why a number of a cell is not what it was, as far as its two rows say: which part of the step, which
messages, what is held at the peak, or the reason of a status."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from spbench.bench.row import Row
from spbench.bench.units import shown_bytes, shown_time

#: the parts of a simulated step that add up to it, by their names in ``parts`` and ``breakdown`` of a row
STEP_PARTS = {
    "products_s": "matrix products",
    "attention_s": "attention kernels",
    "memory_bound_s": "memory-bound operators",
    "within_nodes_s": "waits for links within a node",
    "across_nodes_s": "waits for links across nodes",
    "bubble_s": "pipeline bubble",
    "overhead_s": "overhead of the step",
    "host_s": "waits for the host's launches",
}

#: of all that moved; what moved by less is rounding, or beside the point
_LEAST_SHARE = 0.05
#: parts that are named, those that moved most
_NAMED = 3


class Why(NamedTuple):
    """Why a number changed.

    Attributes:
        moved: names of what moved, most first: the same for cells that changed in the same way.
        text: the same with amounts; "" where the rows do not say.
    """

    moved: tuple[str, ...] = ()
    text: str = ""


def why(quantity: str, base: Row, new: Row) -> Why:
    """Why a metric, or the status, of a cell differs between two rows of it."""
    was, now = base["measurement"], new["measurement"]
    match quantity:
        case "status":
            return _status(base, new)
        case "sent_bytes":
            return _moved(_sent(was), _sent(now), shown_bytes)
        case "formula_differences":
            return Why((), _beside_the_form(now) or _beside_the_form(was))
        case "peak_memory_bytes":
            return _peak(was, now)
        case "reserved_memory_bytes":
            return _reserved(was, now)
        case "step_time_s":
            return _moved(_step(was), _step(now), shown_time)
        case "answer":
            return _answer(was, now)
        case _:
            return Why()


def _status(base: Row, new: Row) -> Why:
    """The reason of the status that is not ok, with the bytes where that is a mismatch."""
    reasons = [_beside_the_form(row["measurement"]) or str(row.get("reason") or "") for row in (new, base)]
    moved = f"{base['status']} -> {new['status']}"
    if reasons[0] or not reasons[1]:
        return Why((moved,), reasons[0])
    return Why((moved,), f"was: {reasons[1]}")


def _beside_the_form(measured: Mapping[str, Any]) -> str:
    """The first message whose bytes are not those of the closed form, and how many more there are; "" where
    there is none."""
    wrong = measured.get("formula_difference") or []
    if not wrong or not {"phase", "collective", "metered_bytes", "formula_bytes"} <= wrong[0].keys():
        return ""
    first = wrong[0]
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return (
        f"{first['collective']} in {first['phase']}: {first['metered_bytes']:,.0f} bytes sent, "
        f"{first['formula_bytes']:,.0f} by the closed form{more}"
    )


def _sent(measured: Mapping[str, Any]) -> dict[str, float]:
    """Bytes sent by collective, phase and axis, in words."""
    sent: dict[str, float] = {}
    for entry in measured.get("communication") or ():
        over = f" over {entry['axis']}" if entry.get("axis") else ""
        name = f"{entry.get('collective', 'messages')} in {entry.get('phase', 'the step')}{over}"
        sent[name] = sent.get(name, 0) + entry["sent_bytes"]
    return {name: value for name, value in sent.items() if value}


def _step(measured: Mapping[str, Any]) -> dict[str, float]:
    seconds = {**(measured.get("breakdown") or {}), **(measured.get("parts") or {})}
    return {words: seconds[name] or 0.0 for name, words in STEP_PARTS.items() if name in seconds}


def _held(measured: Mapping[str, Any]) -> dict[str, float]:
    return {name.replace("_", " "): value for name, value in (measured.get("peak_held") or {}).items()}


def _peak(was: Mapping[str, Any], now: Mapping[str, Any]) -> Why:
    parts = _moved(_held(was), _held(now), shown_bytes)
    phases = [measured.get("peak_phase") for measured in (was, now)]
    if all(phases) and phases[0] != phases[1]:
        to = f"the peak is in {phases[1]}, was in {phases[0]}"
        return Why((*parts.moved, to), "; ".join(filter(None, (parts.text, to))))
    return parts


def _reserved(was: Mapping[str, Any], now: Mapping[str, Any]) -> Why:
    """Whether more is allocated at the peak, or more is reserved beside that."""
    parts = [
        {"allocated at the peak": peak, "reserved beside it": reserved - peak}
        for measured in (was, now)
        if (peak := measured.get("peak_memory_bytes")) is not None
        and (reserved := measured.get("reserved_memory_bytes")) is not None
    ]
    return _moved(parts[0], parts[1], shown_bytes) if len(parts) == 2 else Why()


def _answer(was: Mapping[str, Any], now: Mapping[str, Any]) -> Why:
    """The smallest value that was probed on both sides and now has another status; else the first that does
    not fit now."""
    before, after = ({p.get("value"): p for p in measured.get("proof") or ()} for measured in (was, now))
    for value in sorted(value for value in before.keys() & after.keys() if value is not None):
        a, b = before[value], after[value]
        if a.get("status") != b.get("status"):
            peaks = [
                f"{p['status']} ({shown_bytes(p['peak_memory_bytes'])})"
                if p.get("peak_memory_bytes")
                else str(p.get("status"))
                for p in (a, b)
            ]
            return Why((), f"at {value}: {' -> '.join(peaks)}")
    full = [p for p in after.values() if p.get("status") == "oom" and p.get("reason")]
    return Why((), f"at {full[0]['value']}: {full[0]['reason'].split(';')[0]}") if full else Why()


def _moved(before: Mapping[str, float], after: Mapping[str, float], shown: Any) -> Why:
    """The parts that differ most.

    Args:
        shown: an amount as text.
    """
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    total = math.fsum(map(abs, changes.values()))
    most = sorted(changes, key=lambda name: -abs(changes[name]))
    named = [name for name in most if abs(changes[name]) > _LEAST_SHARE * total][:_NAMED]
    return Why(tuple(named), ", ".join(f"{name} {_signed(changes[name], shown)}" for name in named))


def _signed(amount: float, shown: Any) -> str:
    return f"{'+' if amount >= 0 else '-'}{shown(abs(amount))}"
