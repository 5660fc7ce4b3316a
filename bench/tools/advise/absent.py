"""Why layouts with given ranks along axes are not among the best: `spbench advise --why tp=16`."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from spbench.bench.tools.advise.candidates import Candidate
from spbench.bench.tools.advise.layouts import Refused
from spbench.bench.tools.advise.possible import possible, why_impossible
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.advise.search_findings import Found, Seen, Untraced
from spbench.bench.units import shown_price

_GIB = 2**30


@dataclass(frozen=True)
class Absence:
    """What became of the layouts that were asked about.

    Attributes:
        lines: ``layout`` and ``why`` of those that were traced or cannot be, the fastest first.
        sentence: of all, or of those that were not traced; "" where each has its line.
    """

    lines: Sequence[Mapping[str, Any]]
    sentence: str


def untraced(
    asked_about: Mapping[str, int], every: Sequence[Candidate], seen: Collection[Seen], too_large: float
) -> Untraced | None:
    """What the estimates said of layouts that were not traced; None where each was, or there are none.

    Args:
        asked_about: ranks along axes.
        every: the candidates of the search.
        seen: what was traced.
        too_large: estimated bytes above which nothing is traced.
    """
    if not asked_about:
        return None
    traced = {(each.cell.strategy, each.cell.mesh_text) for each in seen}
    left = [each for each in every if each.kind not in traced and _has(each.layout.sizes, asked_about)]
    if not left:
        return None
    small = [each for each in left if each.estimated_bytes <= too_large]
    return Untraced(
        layouts=len({each.kind for each in left}),
        slow=len({each.kind for each in small}),
        least_s=min((each.estimated_s for each in small), default=None),
        least_bytes=min(each.estimated_bytes for each in left),
    )


def _has(sizes: Mapping[str, int], asked_about: Mapping[str, int]) -> bool:
    return all(sizes.get(axis, 1) == n for axis, n in asked_about.items())


def absence(question: Question, found: Found, asked_about: Mapping[str, int]) -> Absence:
    """What became of the layouts with these ranks along axes."""
    named = spelled(asked_about)
    if reason := _cannot_be(question, asked_about):
        return Absence((), f"no layout with {named} can be: {reason}")
    best_s = found.best[0].step_s if found.best else None
    traced = [each for each in found.traced if _has(each.cell.sizes.by_axis, asked_about)]
    lines: list[dict[str, Any]] = []
    for seen in sorted(traced, key=lambda each: (not each.fits, each.step_s)):
        why = f"needs {seen.peak / _GIB:.1f} GiB"
        if seen.fits:
            why = f"takes {shown_price(seen.step_s / (best_s or seen.step_s))}"
        lines.append({"layout": f"{seen.cell.strategy} {seen.cell.mesh_text}", "why": why})
    wanted = {f"{axis}{n}" for axis, n in asked_about.items() if n > 1}
    lines += [
        {"layout": what, "why": reason}
        for what, reason in found.refused.reasons.items()
        if wanted <= {part for word in what.split() for part in word.split("x")}
    ]
    return Absence(lines, _of_untraced(found.untraced, named, best_s))


def spelled(asked_about: Mapping[str, int]) -> str:
    """Ranks along axes as meshes have them."""
    return ", ".join(f"{axis}{n}" for axis, n in asked_about.items())


def _cannot_be(question: Question, asked_about: Mapping[str, int]) -> str:
    """Why no layout has these ranks; "" where some can."""
    ranks = math.prod(asked_about.values())
    if question.gpus % ranks:
        return f"{ranks} ranks do not divide {question.gpus} GPUs"
    for axis, n in asked_about.items():
        if question.fixed.get(axis, n) != n:
            return f"--fixed {axis}={question.fixed[axis]} leaves them out"
    asked = replace(question, fixed={**question.fixed, **asked_about})
    return "" if possible(asked, Refused()) else why_impossible(asked, kept=[*asked_about])


def _of_untraced(left: Untraced | None, named: str, best_s: float | None) -> str:
    if left is None:
        return ""
    head = f"not traced, of those with {named}: {left.layouts}, by the estimate"
    if left.least_s is None:
        return f"{head} too large, the smallest with {left.least_bytes / _GIB:.3g} GiB"
    against = "" if best_s is None else f" (the fastest that was traced: {best_s:.3g} s)"
    large = left.layouts - left.slow
    too_large = f"{large} too large, the others" if large else ""
    return " ".join(filter(None, [head, too_large, f"not faster than {left.least_s:.3g} s{against}"]))
