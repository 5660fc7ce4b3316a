"""How far a tensor is from a reference, and whether it is the reference times a number.

A mean in place of a sum, or a sum over other ranks, leaves gradients that are right but for a factor such as
1/N, which names the fault. Gradients that are wrong in another way have no such factor.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Discrepancy:
    """A tensor x beside a reference.

    Attributes:
        error: ||x - ref|| / ||ref||; infinite where there is a ``problem``.
        problem: why there is no such number, as the rest of a sentence on x; "" where there is one.
        scale: the s for which s ref is nearest to x, <x, ref> / <ref, ref>; 1 where there is a ``problem``.
        residual: ||x - s ref|| / ||s ref||, the error that is left when x is divided by s; infinite where
            s is 0, or where there is a ``problem``.
    """

    error: float
    problem: str = ""
    scale: float = 1.0
    residual: float = float("inf")

    @classmethod
    def none(cls) -> Discrepancy:
        """That of two tensors which are equal."""
        return cls(0.0, residual=0.0)

    @classmethod
    def without_number(cls, problem: str) -> Discrepancy:
        """That of tensors which cannot be compared."""
        return cls(float("inf"), problem)

    def factor(self, limit: float) -> float | None:
        """The s where x is s times the reference, but for an error of at most ``limit``; else None."""
        return self.scale if self.residual <= limit else None

    def described(self, limit: float) -> str:
        """What is wrong with x, as the rest of a sentence on it, where an error above ``limit`` is wrong."""
        if self.problem:
            return self.problem
        if self.scale == 0.0 and self.error == 1.0:
            return "is zero"
        if self.factor(limit) is not None:
            known = min(10, max(3, math.ceil(-math.log10(self.residual or 1e-16))))
            return f"is {self.scale:.{known}g} times the reference (residual {self.residual:.0e})"
        return f"is off by {self.error:.1e}, not a scale"


def discrepancies(
    reference: Mapping[str, Tensor], got: Mapping[str, Tensor | None]
) -> dict[str, Discrepancy]:
    """The discrepancy in float64 of every tensor that either side names.

    The error is infinite where a tensor is missing on one side, has another shape, or is not finite. Where
    the reference is exactly zero it is 0 if x is zero too, else infinite.
    """
    return {name: _discrepancy(reference.get(name), got.get(name)) for name in {**reference, **got}}


def relative_errors(reference: Mapping[str, Tensor], got: Mapping[str, Tensor | None]) -> dict[str, float]:
    """The errors alone of :func:`discrepancies`."""
    return {name: found.error for name, found in discrepancies(reference, got).items()}


def _discrepancy(reference: Tensor | None, x: Tensor | None) -> Discrepancy:
    if reference is None or x is None:
        return Discrepancy.without_number("is missing" if x is None else "has no reference")
    if reference.shape != x.shape:
        return Discrepancy.without_number(f"has the shape {[*x.shape]}, not {[*reference.shape]}")
    reference, x = reference.detach().double().flatten(), x.detach().double().flatten()
    if not (reference.isfinite().all() and x.isfinite().all()):
        return Discrepancy.without_number("is not finite")
    largest = reference.abs().max() if reference.numel() else reference.new_zeros(())
    if largest == 0:
        return Discrepancy.without_number("is not zero, as it should be") if x.any() else Discrepancy.none()
    # divided by the largest element, so that squares of tiny gradients do not underflow
    reference, x = reference / largest, x / largest
    norm = reference.norm().item()
    scale = (x @ reference / (reference @ reference)).item()
    left = (x - scale * reference).norm().item()
    residual = left / (abs(scale) * norm) if scale else float("inf")
    return Discrepancy((x - reference).norm().item() / norm, scale=scale, residual=residual)
