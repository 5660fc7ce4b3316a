"""Why layouts with given ranks along axes are not among the best: `spbench advise --why tp=16`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from spbench.bench.tools.advise.candidates import Candidate
from spbench.bench.tools.advise.layouts import Refused
from spbench.bench.tools.advise.possible import possible, why_impossible
from spbench.bench.tools.advise.question import Question
from spbench.bench.tools.advise.ranking import Found
from spbench.bench.units import GIB, shown_price


@dataclass(frozen=True)
class Absence:
    """What became of the layouts that were asked about.

    Attributes:
        lines: ``layout`` and ``why`` of those that were traced or cannot be, the fastest first.
        sentence: on all, or on those that were not traced; "" where each has its line.
    """

    lines: Sequence[Mapping[str, str]]
    sentence: str


def absence(
    question: Question,
    found: Found,
    asked_about: Mapping[str, int],
    every: Sequence[Candidate] = (),
    too_large: float = math.inf,
) -> Absence:
    """What became of the layouts with these ranks along axes.

    Args:
        every: the candidates of the search.
        too_large: estimated bytes above which nothing is traced.
    """
    named = spelled(asked_about)
    if reason := _cannot_be(question, asked_about):
        return Absence((), f"no layout with {named} can be: {reason}")
    best_s = found.best[0].step_s if found.best else None
    traced = [each for each in found.traced if _has(each.cell.sizes.by_axis, asked_about)]
    lines = []
    for seen in sorted(traced, key=lambda each: (not each.fits, each.step_s)):
        why = f"needs {seen.peak / GIB:.1f} GiB"
        if seen.fits:
            why = f"takes {shown_price(seen.step_s / (best_s or seen.step_s))}"
        lines.append({"layout": str(seen), "why": why})
    wanted = {f"{axis}{n}" for axis, n in asked_about.items() if n > 1}
    lines += [
        {"layout": what, "why": reason}
        for what, reason in found.refused.reasons.items()
        if wanted <= {part for word in what.split() for part in word.split("x")}
    ]
    kinds = {(each.cell.strategy, each.cell.mesh_text) for each in found.traced}
    left = [each for each in every if each.kind not in kinds and _has(each.layout.sizes, asked_about)]
    return Absence(lines, _untraced(left, named, best_s, too_large) if left else "")


def spelled(asked_about: Mapping[str, int]) -> str:
    """Ranks along axes as meshes have them."""
    return ", ".join(f"{axis}{n}" for axis, n in asked_about.items())


def _has(sizes: Mapping[str, int], asked_about: Mapping[str, int]) -> bool:
    return all(sizes.get(axis, 1) == n for axis, n in asked_about.items())


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


def _untraced(left: Sequence[Candidate], named: str, best_s: float | None, too_large: float) -> str:
    """What the estimates said of layouts that were not traced."""
    layouts = {each.kind for each in left}
    small = [each for each in left if each.estimated_bytes <= too_large]
    head = f"not traced, of those with {named}: {len(layouts)}, by the estimate"
    if not small:
        least_bytes = min(each.estimated_bytes for each in left)
        return f"{head} too large, the smallest with {least_bytes / GIB:.3g} GiB"
    large = len(layouts) - len({each.kind for each in small})
    against = "" if best_s is None else f" (the fastest that was traced: {best_s:.3g} s)"
    least_s = min(each.estimated_s for each in small)
    words = [head, f"{large} too large, the others" if large else "", f"not faster than {least_s:.3g} s"]
    return " ".join(filter(None, words)) + against
