"""How far a tensor is from its reference, and the verdict on the findings of ranks: the limit of each error,
and whether and how the step is wrong in forward, in backward or only in its messages.

A mean in place of a sum, or a sum over other ranks, makes gradients wrong by a factor such as 1/N, which
names the fault. Other faults have no such factor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Self

import torch
from torch import Tensor

from spbench.bench.errors import listed
from spbench.impls import AsPublished, Nesting, Strategy

FLOAT64_LIMIT = 1e-10
NOISE_FACTOR = 4.0

#: how many wrong tensors a verdict names besides the worst
OTHERS_NAMED = 4


@dataclass(frozen=True)
class Discrepancy:
    """The difference of a tensor x from its reference.

    Attributes:
        error: ||x - ref|| / ||ref||; infinite where there is a ``problem``.
        problem: why x cannot be compared, as the rest of a sentence on x; "" where it can.
        scale: the s for which s ref is nearest to x, <x, ref> / <ref, ref>; 1 where there is a ``problem``.
        residual: ||x - s ref|| / ||s ref||, the error that is left when x is divided by s; infinite where
            s is 0, or where there is a ``problem``.
    """

    error: float
    problem: str = ""
    scale: float = 1.0
    residual: float = float("inf")

    @classmethod
    def none(cls) -> Self:
        """The discrepancy of two equal tensors: 0."""
        return cls(0.0, residual=0.0)

    @classmethod
    def without_number(cls, problem: str) -> Self:
        """The discrepancy of tensors that cannot be compared: infinite, with the reason."""
        return cls(float("inf"), problem)

    def factor(self, limit: float) -> float | None:
        """The number s if x is s times the reference, with an error of at most ``limit``; else None."""
        return self.scale if self.residual <= limit else None

    def described(self, limit: float) -> str:
        """The fault of x, as the rest of a sentence on x; errors above ``limit`` are faults."""
        if self.problem:
            return self.problem
        if self.scale == 0.0 and self.error == 1.0:
            return "is zero"
        if self.factor(limit) is not None:
            digits = min(10, max(3, math.ceil(-math.log10(self.residual or 1e-16))))
            return f"is {self.scale:.{digits}g} times the reference (residual {self.residual:.0e})"
        return f"is off by {self.error:.1e}, not a scale"


def discrepancies(
    reference: Mapping[str, Tensor], got: Mapping[str, Tensor | None]
) -> dict[str, Discrepancy]:
    """The discrepancy, in float64, of every tensor that either side has, by name.

    The error is infinite where a tensor is missing on one side, has another shape, or is not finite. Where
    the reference is exactly zero, the error is 0 if x is at most the rounding, in x's dtype, of the largest
    number of all references, else infinite.
    """
    sizes = [x.abs().max().item() for x in reference.values() if x.numel() and x.is_floating_point()]
    largest = max(sizes, default=0.0)
    return {name: _discrepancy(reference.get(name), got.get(name), largest) for name in {**reference, **got}}


def relative_errors(reference: Mapping[str, Tensor], got: Mapping[str, Tensor | None]) -> dict[str, float]:
    """Only the errors of :func:`discrepancies`, by name."""
    return {name: discrepancy.error for name, discrepancy in discrepancies(reference, got).items()}


def _discrepancy(reference: Tensor | None, x: Tensor | None, largest_of_all: float) -> Discrepancy:
    if reference is None or x is None:
        return Discrepancy.without_number("is missing" if x is None else "has no reference")
    if reference.shape != x.shape:
        return Discrepancy.without_number(f"has the shape {[*x.shape]}, not {[*reference.shape]}")
    rounding = torch.finfo(x.dtype).eps * largest_of_all if x.is_floating_point() else 0.0
    reference, x = reference.detach().double().flatten(), x.detach().double().flatten()
    if not (reference.isfinite().all() and x.isfinite().all()):
        return Discrepancy.without_number("is not finite")
    largest = reference.abs().max() if reference.numel() else reference.new_zeros(())
    if largest == 0:
        zero = (x.abs() <= rounding).all()
        return Discrepancy.none() if zero else Discrepancy.without_number("is not zero, as it should be")
    # divided by the largest element, so that squares of tiny gradients do not underflow
    reference, x = reference / largest, x / largest
    norm = reference.norm().item()
    scale = (x @ reference / (reference @ reference)).item()
    left = (x - scale * reference).norm().item()
    residual = left / (abs(scale) * norm) if scale else float("inf")
    return Discrepancy((x - reference).norm().item() / norm, scale=scale, residual=residual)


@dataclass(frozen=True)
class Finding:
    """The comparison of one tensor on one rank.

    Attributes:
        tensor: "output y", "gradient of input x", "gradient of layer.qkv.weight", or "positions of ...".
        discrepancy: the strategy's tensor against the oracle's.
        noise: the relative error of the single device in the case's dtype, on the same part of the tensor.
        tells: how much the finding tells of a fault: 0 for bytes of messages ("backward all_reduce over sp"),
            1 for values, 2 for documents that see each other.
        apart: for a published baseline's own function against the model, which is no fault: the number of
            positions that differ, and of all; None for other findings.
        place: the sort key of the tensor in the order of execution.
        blocks: the error in each of :data:`BLOCKS` blocks of the sequence, None for a block that is not on
            this rank; empty for a tensor without positions, and where nothing is explained.
    """

    tensor: str
    discrepancy: Discrepancy
    noise: float
    tells: int = 1
    apart: tuple[int, int] | None = None
    place: tuple[int, float] = (0, 0.0)
    blocks: tuple[float | None, ...] = ()


@dataclass(frozen=True)
class Judged:
    """A finding of a rank with the limit of its error."""

    rank: int
    finding: Finding
    limit: float

    @property
    def excess(self) -> float:
        return self.finding.discrepancy.error / self.limit

    @property
    def factor(self) -> float | None:
        return self.finding.discrepancy.factor(self.limit)

    def __str__(self) -> str:
        return f"{self.finding.tensor} {self.finding.discrepancy.described(self.limit)}"


def limits(dtype: torch.dtype, noises: Sequence[float]) -> Callable[[float], float]:
    """A function from a tensor's noise to the limit of its error, in a dtype, given the noises of all tensors
    of the case on all ranks; in float64 a constant limit, unless the model itself rounds more."""
    if dtype is torch.float64 and not any(noises):
        return lambda noise: FLOAT64_LIMIT
    typical = median(noises)
    return lambda noise: NOISE_FACTOR * max(noise, typical, torch.finfo(dtype).eps)


def judged(dtype: torch.dtype, findings: Sequence[Sequence[Finding]]) -> list[Judged]:
    """The findings of ranks 0, 1, ... with their limits."""
    limit = limits(dtype, [f.noise for ranks in findings for f in ranks])
    return [Judged(rank, f, limit(f.noise)) for rank, of_rank in enumerate(findings) for f in of_rank]


def worst_of(every: Sequence[Judged], wrong: Sequence[Judged]) -> Judged:
    """The finding with the largest error for its limit. Among wrong ones, values come before messages with
    wrong bytes, because values tell more of a fault."""
    return max(wrong or every, key=lambda each: (each.finding.tells if wrong else 0, each.excess))


def how_wrong(worst: Judged, wrong: Sequence[Judged]) -> str:
    """Whether forward or backward is wrong, and how the worst tensor is wrong; if the worst is not wrong by a
    factor, also the worst tensor that is."""
    scaled = [] if worst.factor is not None else [each for each in wrong if each.factor is not None]
    shown = [worst, *sorted(scaled, key=lambda each: each.excess)[-1:]]
    named = [each.finding.tensor for each in shown]
    others = list(dict.fromkeys(e.finding.tensor for e in wrong if e.finding.tensor not in named))
    too = [f"wrong too: {listed(others, OTHERS_NAMED)}"] if others else []
    return f"{where_wrong(wrong)}: {'; '.join([*map(str, shown), *too])}"


def how_departs(strategy: type[Strategy] | Nesting, departing: Sequence[Judged]) -> str:
    """How far a baseline's own function is from the model's: the error of the first tensor that differs, and
    the number of such tensors."""
    classes = strategy.classes if isinstance(strategy, Nesting) else (strategy,)
    (cls,) = (cls for cls in classes if issubclass(cls, AsPublished))
    first = departing[0].finding.tensor
    ranks = [each for each in departing if each.finding.tensor == first]
    error = max(each.finding.discrepancy.error for each in ranks)
    at = [each.finding.apart or (0, 0) for each in ranks]
    apart, places = sum(differ for differ, _ in at), sum(every for _, every in at)
    tensors = len({each.finding.tensor for each in departing})
    return (
        f"computes what its authors' code does, and departs from the model: {cls.departs}. {first} differs "
        f"by {error:.1e}, at {apart} of {places} positions on {len(ranks)} ranks; {tensors} tensors do in all"
    )


def where_wrong(wrong: Sequence[Judged]) -> str:
    """Whether outputs are wrong, only gradients, or neither, in words."""
    for of, where in (("output ", "wrong in forward"), ("gradient of ", "forward right, backward wrong")):
        if any(each.finding.tensor.startswith(of) for each in wrong):
            return where
    return "values right"


def unequal_bytes(wrong: Sequence[Judged]) -> list[str]:
    """The messages whose bytes differ from the closed forms, each with the numbers of one rank."""
    said: dict[str, str] = {}
    for each in wrong:
        if each.finding.tells == 0:
            said.setdefault(each.finding.tensor, str(each))
    return list(said.values())
