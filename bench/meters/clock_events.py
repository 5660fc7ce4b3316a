"""Whether a GPU's clocks fell while steps ran on it, and what held them down."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: below this share of the clock that it could have, a clock has fallen; less are steps of the governor
FALLEN = 0.95

_IDLE = 0x001
#: why a clock is below its highest, as NVML's clocks event reasons: bit -> words
_REASONS = {
    _IDLE: "idle",
    0x002: "clocks set by the user",
    0x004: "software power cap",
    0x008: "hardware slowdown",
    0x010: "sync boost",
    0x020: "software thermal slowdown",
    0x040: "hardware thermal slowdown",
    0x080: "hardware power brake",
    0x100: "display clock setting",
}
#: reasons that slow a GPU which has work and which nobody has asked to be slower
_SLOWING = {0x004, 0x008, 0x010, 0x020, 0x040, 0x080}


@dataclass(frozen=True)
class ClockSample:
    """The clock of the streaming multiprocessors at a moment.

    Attributes:
        at_s: since the beginning of the stretch.
        reasons: NVML's bits.
    """

    at_s: float
    mhz: float
    reasons: int

    @property
    def bits(self) -> set[int]:
        """Each reason that holds."""
        return {1 << place for place in range(self.reasons.bit_length()) if self.reasons >> place & 1}


@dataclass(frozen=True)
class Fall:
    """The lowest of the samples that are below what the clock could be, ``reference_mhz``."""

    sample: ClockSample
    reference_mhz: float

    def note(self, stretch_s: float) -> str:
        """One line: clock, reference, when and why."""
        sample = self.sample
        why = ", ".join(reason_names([sample])) or "no reason given"
        return (
            f"SM clock at {sample.mhz:.0f} of {self.reference_mhz:.0f} MHz "
            f"after {sample.at_s:.2f} of {stretch_s:.2f} s: {why}"
        )


def reason_names(samples: Iterable[ClockSample]) -> list[str]:
    """All that held clocks down in any of the samples, in words."""
    bits = sorted({bit for sample in samples for bit in sample.bits})
    return [_REASONS.get(bit, f"reason {bit:#x}") for bit in bits]


def fall(samples: Sequence[ClockSample], highest_mhz: float | None) -> tuple[bool | None, Fall | None]:
    """Whether the clock fell, and where it was lowest if so; (None, None) if no sample is of a busy GPU.

    A clock has fallen that is below 95% of the highest of the stretch; while something slows the GPU, below
    95% of the highest that it has, so that one that is slow from the beginning counts as well.

    Args:
        highest_mhz: that the GPU has; None if it does not say.
    """
    busy = [sample for sample in samples if _IDLE not in sample.bits]
    if not busy:
        return None, None
    seen = max(sample.mhz for sample in busy)
    falls = []
    for sample in busy:
        reference = max(seen, highest_mhz or 0) if sample.bits & _SLOWING else seen
        if sample.mhz < FALLEN * reference:
            falls.append(Fall(sample, reference))
    lowest = min(falls, key=lambda each: each.sample.mhz, default=None)
    return lowest is not None, lowest
