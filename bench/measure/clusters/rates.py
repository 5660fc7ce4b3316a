"""Rates of a card by the kind of work: matrix products by shape, attention by kernel and length."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

import numpy as np
from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from spbench.bench.errors import suggestion
from spbench.bench.measure.clusters.sourced import Sourced
from spbench.bench.yaml_files import StrictModel

#: kernels of softmax attention that hold no scores; a model's option ``attention`` names one of them, or
#: "flash" for that which the card's file has as its default
AttentionKernel = Literal[
    "flash_attention_1", "flash_attention_2", "flash_attention_3", "flash_attention_4", "triton", "cudnn"
]
Direction = Literal["forward", "backward"]
Mask = Literal["causal", "whole"]
#: pairs: bytes that a call of an operator reads and writes, and its seconds; by ascending bytes
OperatorTimes = list[list[PositiveFloat]]


def operator_seconds(times: Sequence[Sequence[float]], nbytes: np.ndarray) -> np.ndarray:
    """Seconds of calls that move so many bytes: on straight lines between those measured, as long as the
    smallest below, in proportion to bytes above the largest."""
    measured, taken = np.array(times).T
    seconds: np.ndarray = np.interp(nbytes, measured, taken) * np.maximum(1.0, nbytes / measured[-1])
    return seconds


class ProductRate(StrictModel):
    """Matrix products of one precision: seconds = FLOPs / (peak x share) + bytes / bandwidth.

    Attributes:
        share: of the peak rate.
        bandwidth_bytes_per_s: of the operands and the result, which large products pay least for; null: the
            share holds for all shapes.
        measured: FLOPs a second of square products by n, where a source has several; for figures alone.
    """

    share: Sourced[PositiveFloat]
    bandwidth_bytes_per_s: Sourced[PositiveFloat] = Sourced(value=None, source="one share for all shapes")
    measured: dict[PositiveInt, PositiveFloat] = {}


class AttentionRate(StrictModel):
    """An attention kernel: FLOPs a second = limit / (1 + half_length / length).

    FLOPs are those that the mask leaves: of a causal one, half. Length is the lesser of queries and keys.

    Attributes:
        head_size: that it was measured at.
        direction: null: of a forward and a backward together, which holds for each of them.
        mask: "causal" or "whole".
        limit_flops_per_s: that very long sequences come near to.
        half_length: the length that reaches half of it; null: one rate for all lengths.
        measured: FLOPs a second by the lengths that were measured; the rate of others is extrapolated.
    """

    head_size: PositiveInt
    direction: Direction | None = None
    mask: Mask
    limit_flops_per_s: Sourced[PositiveFloat]
    half_length: Sourced[NonNegativeFloat] = Sourced(value=None, source="one rate for all lengths")
    measured: dict[PositiveInt, PositiveFloat] = {}

    def at(self, length: int) -> float:
        """FLOPs a second of sequences of that length; nan: not known."""
        limit = self.limit_flops_per_s.value or float("nan")
        return limit / (1 + (self.half_length.value or 0.0) / length)


class AttentionRates(StrictModel):
    """What a card's kernels of softmax attention reach in half precisions.

    Attributes:
        default: the kernel that programs on this card run where a model does not say which.
        kernels: rates of each kernel that was measured.
    """

    default: AttentionKernel
    kernels: dict[AttentionKernel, list[AttentionRate]]

    @model_validator(mode="after")
    def _default_known(self) -> Self:
        if not self.kernels.get(self.default):
            known = [name for name, rates in self.kernels.items() if rates]
            raise ValueError(f"default {self.default!r} has no rates{suggestion(self.default, known)}")
        return self

    def rate_of(self, kernel: str, head_size: int, direction: Direction, mask: Mask) -> AttentionRate | None:
        """The rate that was measured of the most similar calls of a kernel ("flash" is the default): of the
        same direction or else of both, then of the same mask, then of the nearest head size. None: the kernel
        has none."""
        by_name = {str(name): rates for name, rates in self.kernels.items()}
        rates = by_name.get(self.default if kernel == "flash" else kernel, [])

        def unlike(rate: AttentionRate) -> tuple[int, bool, int]:
            other = 0 if rate.direction == direction else 1 if rate.direction is None else 2
            return other, rate.mask != mask, abs(rate.head_size - head_size)

        return min(rates, key=unlike, default=None)
