"""Whether a number of a cell has changed (a statistical test on samples, and a least effect), and why, as far
as the two rows tell: the parts of the step, of the memory or of the messages that changed most.

**The unit is the process.** Samples of one process differ less than samples of two processes, so a test that
took each sample for an observation would find a change in every rerun. Where a row has several rounds
(:func:`~spbench.bench.tools.changes.metrics.merged_rounds`), each round counts once, by its median.

**The test** is Student's t on logarithms of times, because a change multiplies a time. Where the rounds of
both sides took turns, the test is paired: a pair is one round of each side, next to each other in time, so
whatever slows the machine for a while slows both rounds. If nothing has changed, the rounds of a pair could
be exchanged: the logarithm of their ratio is symmetric about zero however skewed the times are, and with few
rounds the test needs this symmetry. Rank tests do not need symmetry, but with n pairs their p-value is never
below 2 / 2^n, too much to survive the correction for many metrics with fewer than 15 rounds. Rounds that did
not take turns are compared by Welch's test, without pairs.

**Many comparisons**: p-values are corrected together (Benjamini and Hochberg 1995), so that :data:`ALPHA` is
the expected share of false reports among all reported changes; where nothing at all has changed, ALPHA is
the probability of any report.

**The least effect**: a change is reported only if it is also larger than a size that anyone would act on.
"""

import math
import statistics
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import scipy  # whose parts, a second of imports, are imported as they are first used

from spbench.bench.row import Row
from spbench.bench.tools.changes.metrics import TABLES, Difference, Reading, readings, verdict_of_change
from spbench.bench.tools.changes.result_files import origin_of
from spbench.bench.units import shown_bytes, shown_time

#: limit of corrected p-values; an interval contains the change with the probability 1 - ALPHA
ALPHA = 0.01
#: least relative change of times measured in rounds; well below 5%, so that changes of 5% are reported
LEAST_EFFECT = 0.03
#: least relative change of memory, which has no samples: Megatron-LM's own regression tests allow as much
LEAST_MEMORY_EFFECT = 0.05
#: least relative change of times of one process a side, because processes differ by an unknown amount; both
#: the median and the smallest sample must change so, as a busy machine disturbs the smallest sample least
LEAST_EFFECT_OF_ONE_PROCESS = 1.0
#: the number of rounds, or of samples where there is one process a side, that each side needs at least
FEWEST = 5


@dataclass(frozen=True)
class _Tested:
    """The test of one metric, with the uncorrected ``p``; ``effect`` and ``interval`` are logarithms of the
    ratio of new to base; ``least`` is the least relative change that is reported."""

    key: str
    base: Reading
    new: Reading
    effect: float
    interval: tuple[float, float]
    p: float
    least: float

    def difference(self, p: float) -> Difference:
        """The :class:`Difference` of the cell's values, with its interval and the corrected p-value ``p``."""
        sign = 1 if self.base.metric.better == "smaller" else -1
        low, high = sorted(sign * math.expm1(bound) for bound in self.interval)
        effect = sign * math.expm1(self.effect)
        return replace(_difference(self.key, self.base, self.new, effect), interval=(low, high), p=p)


def _difference(key: str, base: Reading, new: Reading, change: float) -> Difference:
    return Difference(verdict_of_change(change), key, base.metric.name, base.value, new.value, change)


def measured_changes(
    base: Mapping[str, Row], new: Mapping[str, Row]
) -> tuple[dict[str, list[Difference]], set[str], list[str]]:
    """Test the measured metrics of the cells that both sides have with the same status. Returns: the
    differences by cell key; the keys of cells with a metric that could not be judged; notes, a line each."""
    tested: list[_Tested] = []
    changes: dict[str, list[Difference]] = defaultdict(list)
    unjudged: set[str] = set()
    reasons: Counter[str] = Counter()
    for key in base.keys() & new.keys():
        for pair in _measured_on_both(base[key], new[key]):
            if why := _why_not(base[key], new[key], *pair):
                reasons[why] += 1
                unjudged.add(key)
            elif pair[0].metric.unit == "bytes":
                change = pair[0].metric.excess(pair[0].value, pair[1].value)
                if abs(change) > LEAST_MEMORY_EFFECT:
                    changes[key].append(_difference(key, *pair, change))
            else:
                tested.append(_test(key, *pair, in_turns=_in_turns(base[key], new[key])))
    corrected = scipy.stats.false_discovery_control([judged.p for judged in tested]) if tested else ()
    for judged, p in zip(tested, corrected, strict=True):
        if p < ALPHA and abs(math.expm1(judged.effect)) > judged.least:
            changes[judged.key].append(judged.difference(float(p)))
    notes = [f"{_metrics(count)} not judged: {why}" for why, count in reasons.items()]
    return changes, unjudged, [*notes, *_precision(tested)]


def _measured_on_both(base: Row, new: Row) -> Iterable[tuple[Reading, Reading]]:
    if base["status"] != new["status"]:
        return
    now = readings(new)
    for name, before in readings(base).items():
        is_measured = before.metric.judged and not before.exact and name in now and not now[name].exact
        if is_measured and now[name].is_finite:  # the judgement itself reports numbers that are not finite
            yield before, now[name]


def _why_not(base_row: Row, new_row: Row, base: Reading, new: Reading) -> str:
    """Why a measured metric of two rows cannot be judged; "" if it can."""
    origins = origin_of(base_row), origin_of(new_row)
    if not origins[0].is_same_machine(origins[1]):
        was, is_now = (origin.machine_name or "an unknown machine" for origin in origins)
        return (
            f"base was measured on {was}, new on {is_now}; spbench compare --run measures both on one machine"
        )
    if base.metric.unit == "bytes":
        return ""
    if not base.rounds or not new.rounds:
        return "there are no samples"
    if min(*base.samples, *new.samples) <= 0:
        return "a sample is not positive"
    what = "samples" if _is_one_process(base, new) else "rounds"
    if min(len(_units(reading, what)) for reading in (base, new)) < FEWEST:
        return f"fewer than {FEWEST} {what} a side"
    return ""


def _is_one_process(base: Reading, new: Reading) -> bool:
    return len(base.rounds) == len(new.rounds) == 1


def _units(reading: Reading, what: str) -> Sequence[float]:
    """The observations that a test counts: samples if ``what`` is "samples", else the medians of rounds."""
    return reading.samples if what == "samples" else [statistics.median(round_) for round_ in reading.rounds]


def _in_turns(base: Row, new: Row) -> bool:
    """Whether the rounds of two rows took turns: sorted by time, each pair has one round of either row."""
    times = [(str(round_.get("time", "")), side) for side in (base, new) for round_ in side.get("rounds", ())]
    is_base = [side is base for _, side in sorted(times, key=lambda entry: entry[0])]
    return len(is_base) % 2 == 0 and all(
        first != second for first, second in zip(is_base[::2], is_base[1::2], strict=True)
    )


def _test(key: str, base: Reading, new: Reading, *, in_turns: bool) -> _Tested:
    alone = _is_one_process(base, new)
    before, now = (np.log(_units(reading, "samples" if alone else "rounds")) for reading in (base, new))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # scipy warns if all observations are equal
        if in_turns and len(before) == len(now) and not alone:
            result, effect = scipy.stats.ttest_1samp(now - before, 0), np.mean(now - before)
        else:
            result, effect = scipy.stats.ttest_ind(now, before, equal_var=False), now.mean() - before.mean()
        interval = result.confidence_interval(1 - ALPHA)
    if alone:
        seen = [np.median(now) - np.median(before), now.min() - before.min()]
        effect = min(seen, key=abs) if seen[0] * seen[1] > 0 else 0.0
    p = 1.0 if math.isnan(result.pvalue) else float(result.pvalue)  # the same constant on both sides
    bounds = (effect, effect) if math.isnan(interval.low) else (interval.low, interval.high)
    least = LEAST_EFFECT_OF_ONE_PROCESS if alone else LEAST_EFFECT
    return _Tested(key, base, new, float(effect), (float(bounds[0]), float(bounds[1])), p, least)


def _precision(tested: Sequence[_Tested]) -> Iterable[str]:
    """Lines on the smallest visible change: of metrics measured in rounds, and of those measured once."""
    by_rounds = [judged for judged in tested if not _is_one_process(judged.base, judged.new)]
    if by_rounds:
        rounds = min(len(reading.rounds) for judged in by_rounds for reading in (judged.base, judged.new))
        widths = [math.expm1((judged.interval[1] - judged.interval[0]) / 2) for judged in by_rounds]
        yield (
            f"{_metrics(len(by_rounds))} judged by {rounds} rounds a side: half of them to within "
            f"{statistics.median(widths):.1%} or less, the least certain to within {max(widths):.1%}"
        )
    if alone := len(tested) - len(by_rounds):
        yield (
            f"{_metrics(alone)} of one process a side: only changes of more than "
            f"{LEAST_EFFECT_OF_ONE_PROCESS:.0%} are judged; rounds show smaller ones (spbench compare --run)"
        )


def _metrics(count: int) -> str:
    return "1 measured metric" if count == 1 else f"{count} measured metrics"


#: a part is named only if its change exceeds this share of the sum of all parts' absolute changes
_LEAST_SHARE = 0.05
#: the number of parts that are named, those that changed most
_NAMED = 3


class Why(NamedTuple):
    """Why a number changed.

    Attributes:
        moved: the names of the parts that changed, the largest change first; cells with equal names changed
            in the same way.
        text: the names with amounts in bytes or seconds; "" if the rows do not tell.
    """

    moved: tuple[str, ...] = ()
    text: str = ""


#: by metric whose parts a row has: the format of a part's amount; a form of tables.yaml names the parts
_AMOUNTS = {
    **dict.fromkeys(("sent_bytes", "peak_memory_bytes", "reserved_memory_bytes"), shown_bytes),
    "step_time_s": shown_time,
}


def why(quantity: str, base: Row, new: Row) -> Why:
    """Why a metric (or "status") of a cell differs between the cell's two rows."""
    was, now = base["measurement"], new["measurement"]
    if quantity == "status":
        # the reason of the new status, or else of the old one; for a mismatch, the bytes that differ
        reasons = [
            _beside_the_form(row["measurement"]) or str(row.get("reason") or "") for row in (new, base)
        ]
        text = f"was: {reasons[1]}" if reasons[1] and not reasons[0] else reasons[0]
        return Why((f"{base['status']} -> {new['status']}",), text)
    if quantity == "formula_differences":
        return Why((), _beside_the_form(now) or _beside_the_form(was))
    if quantity == "answer":
        return Why((), _answer(was, now))
    if quantity not in _AMOUNTS:
        return Why()
    sides = _parts(quantity, was), _parts(quantity, now)
    if quantity == "reserved_memory_bytes" and not all(sides):
        return Why()
    parts = _moved(*sides, _AMOUNTS[quantity])
    phases = [measured.get("peak_phase") for measured in (was, now)]
    if quantity == "peak_memory_bytes" and all(phases) and phases[0] != phases[1]:
        to = f"the peak is in {phases[1]}, was in {phases[0]}"
        return Why((*parts.moved, to), "; ".join(filter(None, (parts.text, to))))
    return parts


def _beside_the_form(measured: Mapping[str, Any]) -> str:
    """The first message whose bytes differ from the closed form, and how many other messages differ; "" if
    no message differs."""
    wrong = measured.get("formula_difference") or []
    if not wrong or not {"phase", "collective", "metered_bytes", "formula_bytes"} <= wrong[0].keys():
        return ""
    more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
    return (
        "{collective} in {phase}: {metered_bytes:,.0f} bytes sent, "
        "{formula_bytes:,.0f} by the closed form".format(**wrong[0])
        + more
    )


def _parts(quantity: str, measured: Mapping[str, Any]) -> Mapping[str, float]:
    """The parts of a metric in a measurement by name: of sent bytes, a text that names collective, phase and
    axis; messages without bytes are left out."""
    if quantity == "peak_memory_bytes":
        return {name.replace("_", " "): value for name, value in (measured.get("peak_held") or {}).items()}
    if quantity != "sent_bytes":
        seconds = {**(measured.get("breakdown") or {}), **(measured.get("parts") or {})}
        return TABLES.record(f"parts of {quantity}", {**measured, **seconds})
    sent: Counter[str] = Counter()
    for entry in measured.get("communication") or ():
        over = f" over {entry['axis']}" if entry.get("axis") else ""
        name = f"{entry.get('collective', 'messages')} in {entry.get('phase', 'the step')}{over}"
        sent[name] += entry["sent_bytes"]
    return +sent


def _answer(was: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Why a search's answer changed: the smallest value that both rows probed with different statuses; else
    the first value that does not fit now."""
    before, after = ({p.get("value"): p for p in measured.get("proof") or ()} for measured in (was, now))
    for value in sorted(value for value in before.keys() & after.keys() if value is not None):
        pair = before[value], after[value]
        if pair[0].get("status") != pair[1].get("status"):
            peaks = [shown_bytes(probe.get("peak_memory_bytes") or 0) for probe in pair]
            return f"at {value}: " + " -> ".join(
                f"{probe.get('status')}" + f" ({peak})" * bool(probe.get("peak_memory_bytes"))
                for probe, peak in zip(pair, peaks, strict=True)
            )
    full = (p for p in after.values() if p.get("status") == "oom" and p.get("reason"))
    return next((f"at {p['value']}: {p['reason'].split(';')[0]}" for p in full), "")


def _moved(before: Mapping[str, float], after: Mapping[str, float], shown: Any) -> Why:
    """The parts whose values changed most between ``before`` and ``after``; ``shown`` formats an amount."""
    changes = {name: after.get(name, 0) - before.get(name, 0) for name in {**before, **after}}
    total = math.fsum(map(abs, changes.values()))
    most = sorted(changes, key=lambda name: -abs(changes[name]))
    named = [name for name in most if abs(changes[name]) > _LEAST_SHARE * total][:_NAMED]
    signed = ((name, "+" if changes[name] >= 0 else "-", shown(abs(changes[name]))) for name in named)
    return Why(tuple(named), ", ".join(f"{name} {sign}{amount}" for name, sign, amount in signed))
