"""Which experts tokens go to, where that is known before a step runs: even, skewed or counted elsewhere.

A token's experts follow only from its position in the sequence, the same in every sample and every layer. So
each rank knows how many tokens every other rank sends to each expert, also virtual ranks without values, and
a strategy that spreads positions in any order agrees with one device. This module needs no tensor.

Letters: L positions, E experts, k experts a token.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np

LEARNED, EVEN, ROUND_ROBIN, ZIPF = "learned", "even", "round_robin", "zipf"
#: positions whose experts are drawn at once
_AT_ONCE = 2**13


@dataclass(frozen=True)
class RoutingPlan:
    """The experts of every position.

    Attributes:
        routing: "even": each expert has equally many tokens; "round_robin": each token takes the next k
            experts, as torchtitan and NeMo Automodel force it; "zipf:S" or "zipf:S:SEED": expert number n of
            a seeded order is drawn in proportion to n^-S, k different ones for each token; else the path of a
            file with a count for each expert, in proportion to which they are drawn.
        experts: the number of experts, E.
        per_token: the number of experts of a token, k.
        groups, group_topk: for "even": the number of groups of experts, and of groups in which a token has
            experts; 0: no groups.

    Raises:
        ValueError: the routing cannot be read, or k is more than E.
    """

    routing: str
    experts: int
    per_token: int
    groups: int = 0
    group_topk: int = 0

    def __post_init__(self) -> None:
        if self.per_token > self.experts:
            raise ValueError(f"experts_per_token {self.per_token} is more than experts {self.experts}")
        if self.routing not in (EVEN, ROUND_ROBIN):
            _shares(self.routing, self.experts)

    def of_positions(self, length: int) -> np.ndarray:
        """The experts of each position, int64 [L, k], a cached array that callers must not change."""
        return _experts_of(self, length)

    def tokens(self, positions: np.ndarray, length: int, batch: int) -> np.ndarray:
        """The number of tokens that a rank sends to each expert, int64 [E], from ``batch`` samples of
        ``length`` positions, of which the rank has ``positions``."""
        chosen = self.of_positions(length)[positions]
        return np.bincount(chosen.ravel(), minlength=self.experts) * batch


@lru_cache(maxsize=8)
def _experts_of(plan: RoutingPlan, length: int) -> np.ndarray:
    if plan.routing == EVEN:
        return _even(plan, np.arange(length)[:, None])
    if plan.routing == ROUND_ROBIN:
        return np.arange(length * plan.per_token).reshape(length, -1) % plan.experts
    shares = _shares(plan.routing, plan.experts)
    generator = np.random.default_rng(_seed(plan.routing))
    weights = np.log(np.maximum(generator.permutation(shares) if _zipf(plan.routing) else shares, 1e-300))
    chosen = []
    for start in range(0, length, _AT_ONCE):
        # the k largest of log(share) plus Gumbel noise are k draws without putting back
        noise = generator.gumbel(size=(min(_AT_ONCE, length - start), plan.experts))
        chosen.append(np.argpartition(-(weights + noise), plan.per_token - 1)[:, : plan.per_token])
    return np.concatenate(chosen).astype(np.int64)


def _even(plan: RoutingPlan, positions: np.ndarray) -> np.ndarray:
    """The experts [L, k] of "even" routing: at equal distances, each position's experts one after the last's.

    The experts shift by one more after each block of E positions, and after each E blocks, so that every E-th
    position, as a rank has in stripes, also meets all experts. This needs that E divides L.
    """
    places = np.arange(plan.per_token)
    blocks = positions // plan.experts if len(positions) % plan.experts == 0 else np.zeros_like(positions)
    while plan.experts > 1 and blocks.any():
        positions, blocks = positions + blocks, blocks // plan.experts
    if not plan.groups:
        return (positions + places * plan.experts // plan.per_token) % plan.experts
    size, of_group = plan.experts // plan.groups, -(-plan.per_token // plan.group_topk)
    group = (positions + places // of_group * plan.groups // plan.group_topk) % plan.groups
    within = (positions // plan.groups + places % of_group * size // of_group) % size
    return group * size + within


def _zipf(routing: str) -> re.Match[str] | None:
    return re.fullmatch(rf"{ZIPF}:([0-9]+\.?[0-9]*|\.[0-9]+)(?::([0-9]+))?", routing)


def _seed(routing: str) -> int:
    match = _zipf(routing)
    return int(match[2] or 0) if match else 0


@lru_cache(maxsize=8)
def _shares(routing: str, experts: int) -> np.ndarray:
    """The share of tokens of each expert [E], up to a constant factor.

    Raises:
        ValueError: ``routing`` is neither a skew nor a readable file, or the file has not E counts.
    """
    if match := _zipf(routing):
        return np.arange(1.0, experts + 1) ** -float(match[1])
    if routing.startswith(f"{ZIPF}:"):
        raise ValueError(f"routing {routing!r} has no skew S of at least 0; write {ZIPF}:S, as {ZIPF}:0.8")
    try:
        counts = [
            float(word) for word in re.split(r"[\s,]+", Path(routing).read_text(encoding="utf-8").strip())
        ]
    except (OSError, ValueError) as error:
        raise ValueError(
            f"routing is {LEARNED}, {EVEN}, {ROUND_ROBIN}, {ZIPF}:S or a file of counts, not {routing!r} "
            f"({error})"
        ) from error
    if len(counts) != experts or min(counts) < 0 or not math.isfinite(sum(counts)) or not sum(counts):
        raise ValueError(
            f"routing: {routing} has {len(counts)} counts; give one for each of {experts} experts"
        )
    return np.array(counts)


def capacity_of(tokens: int, per_token: int, experts: int, factor: float | None) -> int | None:
    """The largest number of a rank's ``tokens`` that each expert takes; None: no limit."""
    return None if factor is None else math.ceil(tokens * per_token / experts * factor)


def taken(tokens: np.ndarray, capacity: int | None, *, padded: bool) -> np.ndarray:
    """The number of tokens that experts take of the ``tokens`` sent to them, [..., E]; ``padded``: experts
    get ``capacity`` rows in any case."""
    if capacity is None:
        return tokens
    return np.full_like(tokens, capacity) if padded else np.minimum(tokens, capacity)
