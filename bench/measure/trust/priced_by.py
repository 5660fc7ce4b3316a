"""What of simulated times is priced by something else than a rate of its own, in words."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

#: grades of such prices (:mod:`measure.simulator.substitutes`), the worst first, and what each says
GRADES = {
    "substituted": "No rate of its own",
    "transferred": "The rate of another",
    "extrapolated": "Extrapolated",
}

#: so many of a grade are named, those with the largest shares
MOST = 3


def priced_by_in_words(measurements: Iterable[Mapping[str, Any]]) -> str:
    """What the times of some measurements are priced by instead of a rate of its own, each with its largest
    share of a step, by grade: "no rate of its own: attention by triton (68%): matrix products";
    "" where there is no such price."""
    shares: dict[tuple[str, str, str], float] = {}
    for measured in measurements:
        for each in measured.get("priced_by") or ():
            key = each["grade"], each["work"], each["by"]
            shares[key] = max(each["share"], shares.get(key, 0.0))
    parts: list[str] = []
    for grade, words in GRADES.items():
        of_grade = sorted(((-share, *key) for key, share in shares.items() if key[0] == grade))
        told = [f"{work} ({-share:.0%}): {by}" for share, _, work, by in of_grade[:MOST]]
        if len(of_grade) > MOST:
            told.append(f"{len(of_grade) - MOST} more")
        if told:
            parts.append(f"{words if parts else words[0].lower() + words[1:]}: {'; '.join(told)}")
    return ". ".join(parts)
