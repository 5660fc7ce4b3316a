"""The verdict on what ranks find: what each error may be, whether the step is wrong in forward, in backward
or in its messages alone, and in which way."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

import torch

from spbench.bench.measure.verify.oracle import Finding
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.as_published.as_published import AsPublished
from spbench.impls.strategies.nesting import Nesting

FLOAT64_LIMIT = 1e-10
NOISE_FACTOR = 4.0

#: in a verdict, names of wrong tensors beside the worst
OTHERS_NAMED = 4


@dataclass(frozen=True)
class Judged:
    """A finding of a rank beside what its error may be."""

    rank: int
    finding: Finding
    limit: float

    @property
    def excess(self) -> float:
        return self.finding.found.error / self.limit

    @property
    def factor(self) -> float | None:
        return self.finding.found.factor(self.limit)

    def __str__(self) -> str:
        return f"{self.finding.tensor} {self.finding.found.described(self.limit)}"


def limits(dtype: torch.dtype, noises: Sequence[float]) -> Callable[[float], float]:
    """What an error may be in a dtype, by the noise of its tensor.

    Args:
        noises: of all tensors of the case on all ranks.
    """
    if dtype is torch.float64:
        return lambda noise: FLOAT64_LIMIT
    typical = median(noises)
    return lambda noise: NOISE_FACTOR * max(noise, typical, torch.finfo(dtype).eps)


def judged(dtype: torch.dtype, findings: Sequence[Sequence[Finding]]) -> list[Judged]:
    """The findings of ranks 0, 1, ... with their limits."""
    limit = limits(dtype, [f.noise for ranks in findings for f in ranks])
    return [Judged(rank, f, limit(f.noise)) for rank, found in enumerate(findings) for f in found]


def worst_of(every: Sequence[Judged], wrong: Sequence[Judged]) -> Judged:
    """The one with the largest error for its limit; of wrong ones values before the messages that go with
    them, as they tell more."""
    return max(wrong or every, key=lambda each: (each.finding.tells if wrong else 0, each.excess))


def how_wrong(worst: Judged, wrong: Sequence[Judged]) -> str:
    """Where the step goes wrong, in which way the worst tensor is wrong, and, where that has no factor, the
    worst one that has."""
    scaled = [each for each in wrong if each.factor is not None]
    shown = (
        [worst] if worst.factor is not None or not scaled else [worst, max(scaled, key=lambda e: e.excess)]
    )
    named = [each.finding.tensor for each in shown]
    others = list(dict.fromkeys(e.finding.tensor for e in wrong if e.finding.tensor not in named))
    more = [f"and {len(others) - OTHERS_NAMED} more"] if len(others) > OTHERS_NAMED else []
    listed = [f"wrong too: {', '.join([*others[:OTHERS_NAMED], *more])}"] if others else []
    return f"{where_wrong(wrong)}: {'; '.join([*map(str, shown), *listed])}"


def how_departs(case: Case, departing: Sequence[Judged]) -> str:
    """How far a baseline's own function is from the model's: in the first tensor, and in how many."""
    classes = case.strategy.classes if isinstance(case.strategy, Nesting) else (case.strategy,)
    (cls,) = (cls for cls in classes if issubclass(cls, AsPublished))
    first = departing[0].finding.tensor
    ranks = [each for each in departing if each.finding.tensor == first]
    error = max(each.finding.found.error for each in ranks)
    at = [each.finding.apart or (0, 0) for each in ranks]
    apart, places = sum(differ for differ, _ in at), sum(every for _, every in at)
    tensors = len({each.finding.tensor for each in departing})
    return (
        f"computes what its authors' code does, and departs from the model: {cls.departs}. {first} differs "
        f"by {error:.1e}, at {apart} of {places} positions on {len(ranks)} ranks; {tensors} tensors do in all"
    )


def where_wrong(wrong: Sequence[Judged]) -> str:
    """Whether outputs are wrong, gradients alone, or neither."""
    tensors = [each.finding.tensor for each in wrong]
    if any(name.startswith("output ") for name in tensors):
        return "wrong in forward"
    if any(name.startswith("gradient of ") for name in tensors):
        return "forward right, backward wrong"
    return "values right"


def unequal_bytes(wrong: Sequence[Judged]) -> list[str]:
    """The messages that are unequal to the closed forms, each once, as on the first rank that has it."""
    said: dict[str, str] = {}
    for each in wrong:
        if each.finding.tells == 0:
            said.setdefault(each.finding.tensor, str(each))
    return list(said.values())
