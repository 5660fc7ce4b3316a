"""In words: how much slower a job's own layout is than the fastest, which arguments of its program lead to
the fastest, and from which length or number of GPUs on another layout is the fastest."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.tools.choose.advice import Advice, beside_in_words, causes_in_words
from spbench.bench.tools.choose.fit_verdict import record
from spbench.bench.tools.choose.ranking import NAMED, Seen
from spbench.bench.tools.jobs.argument_tables import shown
from spbench.bench.tools.jobs.flag_changes import FlagChanges, flag_changes
from spbench.bench.tools.jobs.flags import OWN_WAYS, differences
from spbench.bench.units import GIB

#: kinds of jobs that take the arguments of another program, and that program
_FLAGS_OF = {"bridge": "megatron"}
#: the most characters that a line quotes of what a program lacks
_LONGEST = 160
#: the most settings that a line names
_MOST = 6


def own_in_words(answer: Advice) -> Iterator[str]:
    """The lines of an answer on the job's own layout; none if the question has no such layout."""
    own, asked = answer.result.own, answer.question.own
    if asked is None:
        return
    if own is None:
        reasons = answer.result.refused
        cell = asked.looked_at
        reason = reasons.get(f"{cell.strategy} {cell.mesh_text}", "")
        yield f"yours cannot be timed{f': {reason}' if reason else ''}"
        return
    yield f"yours, {own} with {own.cell.training.backend}, {_beside_the_best(answer, own)}"
    yield from _changes_in_words(answer)


def _beside_the_best(answer: Advice, own: Seen) -> str:
    memory, fastest = own.memory, next(iter(answer.result.best), None)
    if not own.fits or memory.spare_bytes < 0:
        needed, missing = (f"{nbytes / GIB:.1f}" for nbytes in (memory.total_bytes, -memory.spare_bytes))
        return f"does not fit: it needs {needed} GiB, {missing} more than a card has"
    if fastest is None or own.step_s <= fastest.step_s:
        return "is the fastest that was traced"
    tie = f"; a tie (up to {answer.tie_limit - 1:.0%})" if answer.is_tie(own) else ""
    causes = causes_in_words(own, fastest)
    named = "the same with other settings" if str(own) == str(fastest) else str(fastest)
    beside = beside_in_words(own, fastest, f"{named}, the fastest")
    return f"{beside}{tie}{f': {causes}' if causes else ''}"


def _changes_in_words(answer: Advice) -> Iterator[str]:
    """Lines on the arguments that lead to the fastest layout that the job's program can run, after the reason
    why it cannot run the fastest of all. If its arguments are unknown: settings of a scenario."""
    own, lacking = answer.result.own, ""
    for at, (seen, changes) in enumerate(_changes(answer)):
        gain = f" ({seen.step_s / own.step_s - 1:+.0%})" if own and own.fits else ""
        if changes is None:
            yield f"to {seen}{gain}: {_settings_changed(answer, seen)}"
            return
        program = changes.program.split()[0]
        if words := str(changes):
            yield "; ".join(filter(None, [lacking, f"to {seen}{gain} by {program}: {words}"]))
            return
        if at == 0:
            reason = changes.missing[0] if changes.missing else "arguments that differ"
            lacking = f"{seen}: {program} has no {reason[:_LONGEST]}"
    if lacking and answer.question.own and not answer.question.program:
        kind = answer.question.own.job
        yield f"{lacking}; the fastest of what it has: --for {_FLAGS_OF.get(kind, kind)}"


def _settings_changed(answer: Advice, seen: Seen) -> str:
    """In words, the settings that turn the job's own layout into another layout."""
    assert answer.result.own is not None
    differing = _differing(answer.result.own, seen)
    words = [f"{path.partition('.')[2] or path} {shown(a)} to {shown(b)}" for path, a, b in differing]
    more = f" and {len(words) - _MOST} more" if len(words) > _MOST else ""
    return ", ".join(words[:_MOST]) + more


def _differing(own: Seen, seen: Seen) -> list[tuple[str, Any, Any]]:
    """The settings in which the job's own layout differs from another layout, with both values."""
    return [each for each in differences(own.cell, seen.cell) if each[0] not in OWN_WAYS]


def _changes(answer: Advice) -> Iterator[tuple[Seen, FlagChanges | None]]:
    """The fastest layouts that are faster than the job's own, or that fit where the job's own does not, each
    with the changes of arguments that lead to it; None: the program's arguments are not known."""
    own, asked = answer.result.own, answer.question.own
    if own is None or asked is None:
        return
    # layouts that surely fit come first
    whole = [seen for seen in answer.result.best if seen.exact]
    towards = sorted(whole[:NAMED], key=lambda seen: seen.is_full)
    if not own.fits:  # then ties with the fastest, and those with the fewest changed settings
        towards.sort(key=lambda seen: (seen.is_full, not answer.is_tie(seen), len(_differing(own, seen))))
    for seen in towards:
        if own.fits and seen.step_s >= own.step_s:
            continue
        yield seen, flag_changes(asked.cell, seen.cell, asked.job)


def own_content(answer: Advice) -> dict[str, Any] | None:
    """The job's own layout as a record for programs; None: there is none."""
    own = answer.result.own
    if own is None:
        return None
    return {
        **record("own", own),
        "words": [*own_in_words(answer)],
        "changes": [
            {"strategy": seen.cell.strategy, "mesh": seen.cell.mesh_text, **asdict(changes)}
            for seen, changes in _changes(answer)
            if changes is not None
        ],
    }


#: fields that can vary from answer to answer, and their names for people
AXES = {"seq_len": "length", "gpus": "GPUs", "figures": "figure"}
NOTHING = "nothing fits"

Point = Mapping[str, Any]


def varying(points: Sequence[Point]) -> list[str]:
    """The fields of :data:`AXES` in which answers differ; the first is the horizontal axis of a map.

    Raises:
        UserError: answers differ in more than two fields, so that no map can show them.
    """
    names = [name for name in AXES if len({point[name] for point in points}) > 1]
    if len(names) > 2:
        raise UserError("give several --gpus, several --seq-len or a range of a figure: two of these at most")
    return names


def turns(points: Sequence[Point]) -> Iterator[str]:
    """A line for each value of the second varying field: which strategy wins from where to where, and ties.

    Args:
        points: with ``gpus``, ``seq_len``, ``figures``, ``strategy`` ("" where nothing fits) and ``tie``, in
            the order that they were asked in.
    """
    names = varying(points)
    if not names:
        return
    along, others = names[0], names[1:]
    for value in dict.fromkeys(tuple(point[name] for name in others) for point in points):
        row = [point for point in points if tuple(point[name] for name in others) == value]
        head = "".join(f"{shown_value(name, n)}: " for name, n in zip(others, value, strict=True))
        runs = [[*run] for _, run in groupby(row, lambda point: str(point["strategy"]))]
        winners = [f"{run[0]['strategy'] or NOTHING} {_where(along, run, run is runs[-1])}" for run in runs]
        ties = ", ".join(shown_value(along, point[along]) for point in row if point["tie"])
        yield head + ", ".join(winners) + (f"; a tie with another strategy at {ties}" if ties else "")


def _where(along: str, run: Sequence[Point], last: bool) -> str:
    first = shown_value(along, run[0][along])
    if last and len(run) > 1:
        return f"from {first} on"
    return f"at {first}" if len(run) == 1 else f"from {first} to {shown_value(along, run[-1][along])}"


def shown_value(name: str, value: Any) -> str:
    """A value of one of :data:`AXES` as people write it."""
    if name == "figures":
        return str(value) or "as it is"
    text = next((f"{value // n}{s}" for s, n in (("M", 2**20), ("K", 2**10)) if value % n == 0), str(value))
    return text if name == "seq_len" else f"{value} GPUs"
