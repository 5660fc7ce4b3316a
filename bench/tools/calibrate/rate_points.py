"""What is measured of a machine: which operations, at which sizes, and the samples of each."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.timed_steps import seconds

_KIB, _MIB = 2**10, 2**20
#: calls of a burst at most
_LONGEST_BURST = 1000


@dataclass(frozen=True)
class RateSweep:
    """The sizes at which rates are measured; larger ones of a kind are left out once one call takes longer
    than ``longest_call_s``.

    Attributes:
        precisions: of matrix products and attention.
        sides: s of the products [s, s] x [s, s] and [4s, s] x [s, 4s], ascending.
        lengths: of sequences, for attention, ascending.
        summed_bytes: of each of two tensors that are added, ascending.
        message_bytes: S of the collectives, ascending.
        steps: of training, whose operators are timed; on CPUs.
        samples: of each point, the median of which counts.
        sample_s: that a sample takes about; calls that are shorter are repeated in it.
    """

    precisions: tuple[str, ...] = ("fp32",)
    sides: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    # more than a core's caches hold; larger ones are new pages of the system each time
    summed_bytes: tuple[int, ...] = tuple(4**n * _MIB for n in range(3))
    message_bytes: tuple[int, ...] = tuple(4**n * _KIB for n in range(9))
    steps: tuple[Cell, ...] = ()
    samples: int = 5
    sample_s: float = 0.02
    longest_call_s: float = 0.25

    @classmethod
    def of_gpus(cls, **sizes: Any) -> RateSweep:
        """The sizes for GPUs; ``sizes`` are fields that differ."""
        return cls(
            **{
                "precisions": ("bf16", "fp16", "fp32"),
                "sides": tuple(2**n for n in range(8, 15)),
                "lengths": tuple(2**n for n in range(9, 16)),
                "summed_bytes": tuple(4**n * _MIB for n in range(6)),
                "message_bytes": tuple(4**n * _KIB for n in range(11)),
                "samples": 10,
                **sizes,
            }
        )


@dataclass(frozen=True)
class RatePoint:
    """One operation at one size, done by all ranks at once.

    Attributes:
        operation: "matrix product", "attention forward", "sum", "training step", a collective, or one of
            :mod:`tools.calibrate.operator_times`.
        size: in words, as "[512, 512] x [512, 512]" or "1048576 B".
        extent: what the size is plotted over: the side, the length, or bytes.
        precision: of the operands.
        ranks: that took part.
        flops: of one call on one rank.
        nbytes: that one call reads and writes on one rank; S of a collective.
        bus_factor: of a collective: bus bandwidth over algorithm bandwidth.
        wrong: of a collective: elements of the result that were not what they have to be, on all ranks.
        samples_s: seconds of one call on the slowest rank.
    """

    operation: str
    size: str
    extent: int
    precision: str
    ranks: int
    samples_s: list[float] = field(default_factory=list)
    flops: int = 0
    nbytes: int = 0
    bus_factor: float = 0.0
    wrong: int = 0

    @property
    def seconds(self) -> float:
        """The median of the samples."""
        return median(self.samples_s)

    @property
    def is_steady(self) -> bool:
        """Whether no sample took half as long again as another."""
        return max(self.samples_s) < 1.5 * min(self.samples_s)

    @property
    def flops_per_s(self) -> float | None:
        """Of one rank; None where nothing is computed."""
        return self.flops / self.seconds if self.flops else None

    @property
    def bytes_per_s(self) -> float | None:
        """Of a rank's own memory, or the algorithm bandwidth of a collective; None for other operations."""
        return self.nbytes / self.seconds if self.nbytes else None

    @property
    def bus_bytes_per_s(self) -> float | None:
        """The bus bandwidth of a collective; None for other operations."""
        return self.nbytes * self.bus_factor / self.seconds if self.bus_factor else None


def timed(work: Callable[[], Any], device_type: str, sweep: RateSweep) -> list[float]:
    """Samples of one call in seconds, of the slowest rank; the same on all ranks, which call this together.

    The first call warms up and the second says how many are in a burst.
    """
    work()
    (once,) = seconds(work, device_type, repeats=1)
    burst = min(_LONGEST_BURST, max(1, math.ceil(sweep.sample_s / max(once, 1e-9))))
    return seconds(work, device_type, sweep.samples, burst=burst)
