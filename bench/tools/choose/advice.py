"""The answer to one question of `spbench advise`: its layouts as records, ties, and why the winner wins."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any

from spbench.bench.command_line.output import Table
from spbench.bench.command_line.record_forms import TIE
from spbench.bench.measure import ATTENTION, packaged_model, written
from spbench.bench.tools.choose import ranking
from spbench.bench.tools.choose.fit_verdict import TABLES, has_experts
from spbench.bench.tools.choose.layouts import folds_anew
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.suggestions import micro_batch_of
from spbench.bench.tools.choose.whole_looks import Price
from spbench.bench.tools.jobs.argument_tables import shown
from spbench.bench.tools.jobs.flag_changes import FlagChanges, flag_changes
from spbench.bench.tools.jobs.flags import OWN_WAYS, differences
from spbench.impls import model_preset

#: kinds of jobs that take the arguments of another program, and that program
_FLAGS_OF = {"bridge": "megatron"}
#: the most characters that a line quotes of what a program lacks
_LONGEST = 160
#: the most settings that a line names
_MOST = 6


@dataclass(frozen=True)
class Advice:
    """The answer to one question.

    Attributes:
        seconds, cpu_s: seconds that the search took, and CPU seconds of the search and its looks.
        prices: the prices of the winner's memory switches, and of other settings that it could have.
        absence: sections on why the layouts of ``--why`` are not named.
    """

    question: Question
    result: ranking.SearchResult
    seconds: float = 0.0
    cpu_s: float = 0.0
    prices: Sequence[Price] = ()
    absence: Sequence[Table | str] = ()

    @property
    def ranked(self) -> list[ranking.Seen]:
        """The named layouts: first ties with the fastest, the simplest first, then others. The job's own
        layout replaces a layout that is as fast and differs only in settings, else it comes last."""
        named, own = ranking.ranked(self.result.best)[: ranking.NAMED], self.result.own
        if own is None or not named:
            return named
        at = next((at for at, seen in enumerate(named) if ranking.stands_for(own, seen)), len(named))
        return [*named[:at], own, *named[at + 1 :]]

    @property
    def tie_limit(self) -> float:
        """Step times up to this ratio to the shortest are ties with it; 1.0: nothing fits."""
        return ranking.tie_limit(self.result.best)

    def is_tie(self, seen: ranking.Seen) -> bool:
        """Whether the layout fits, and its time ties with the shortest; see :func:`.ranking.is_tie`."""
        return seen.fits and ranking.is_tie(seen, self.result.best)

    @property
    def ties(self) -> list[ranking.Seen]:
        """The ties with the fastest, the simplest first; those after the named ones are hidden."""
        return [*filter(self.is_tie, ranking.ranked(self.result.best))]

    @property
    def winner(self) -> ranking.Seen | None:
        """The layout named first: the simplest of the ties with the fastest; None: nothing fits."""
        return next(iter(self.ranked), None)

    def table(self) -> list[dict[str, Any]]:
        """A mapping for each layout: the question's fields, then the layout's."""
        return [{**self.question.asked, **record} for record in self.records()]

    def records(self) -> list[dict[str, Any]]:
        """One mapping of plain data for each named layout, the best first."""
        best, ties = self.result.best, self.ties
        meanings = {
            "own": self.result.own,
            "best": best[0] if best else None,
            "tie": lambda seen: len(ties) > 1 and self.is_tie(seen),
            "micro_batch": micro_batch_of,
            "settings": lambda cell: written(ranking.settings_beside(self.question.cell, cell)),
            "attention": lambda cell: model_preset(*cell.model_arguments).attention_kernel,
            "links_floor_s": ranking.links_floor_s,
        }
        lines = TABLES.records("layout", self.ranked, **meanings)
        return [{"rank": rank, **line} for rank, line in enumerate(lines, start=1)]

    def text(self, form: str, **values: Any) -> str:
        """A text on the answer, by a form of words.yaml."""
        words = {"TIE": TIE, "NAMED": ranking.NAMED, "SPARE": ranking.SPARE, "ATTENTION": ATTENTION}
        return TABLES.text(form, self, beside=beside_in_words, causes=causes_in_words, **words, **values)

    @property
    def roomy(self) -> list[ranking.Seen]:
        """The ties with the winner that were traced whole, those that leave enough of a card free first."""
        others = [seen for seen in self.ties if seen.exact and seen is not self.winner]
        return sorted(others, key=lambda seen: seen.is_full)

    @property
    def folds(self) -> list[ranking.Seen]:
        """The fastest layout, if its experts lie on other groups of ranks than the rest of the model, then
        the fastest whose experts do not, if one fits. Only layouts that were traced whole count. Empty: the
        experts of the fastest layout do not, or there are no experts."""
        whole = sorted((s for s in self.result.traced if s.fits and s.exact), key=lambda seen: seen.step_s)
        if not whole or not has_experts(whole[0].cell) or not folds_anew(whole[0].cell.sizes.by_axis):
            return []
        unfolded = (seen for seen in whole if not folds_anew(seen.cell.sizes.by_axis))
        return [whole[0], *islice(unfolded, 1)]

    def bars(self) -> list[dict[str, Any]]:
        """The records of the named layouts, each with the seconds of each part of its step, for a figure."""
        return [
            {
                **record,
                "parts": {text: seen.step_parts[name] for name, text in TABLES.forms["step_parts"].items()},
            }
            for seen, record in zip(self.ranked, self.records(), strict=True)
        ]

    def point(self) -> dict[str, Any]:
        """A point of a map: the winner's strategy ("" if nothing fits), and whether another strategy ties."""
        own = TABLES.record("point", self)
        others = (seen for seen in self.result.of_strategies if seen.cell.strategy != own["strategy"])
        return {**self.question.asked, **own, "tie": any(map(self.is_tie, others))}

    def why(self) -> str:
        """A sentence with numbers on why the winner is before the best of the next strategy; "" if there is
        no other strategy."""
        winner = self.winner
        if winner is None:
            return ""
        others = [s for s in self.result.of_strategies if s.cell.strategy != winner.cell.strategy]
        if not others:
            if self.question.strategies == [winner.cell.strategy]:
                return "no other strategy was asked about"
            return f"no other strategy fits than {winner.cell.strategy}"
        other = others[0]
        causes = causes_in_words(other, winner)
        than = f"{other} {beside_in_words(other, winner)}"
        apart = other.step_s / winner.step_s
        if not (self.is_tie(other) and self.is_tie(winner)):
            head = f"the next strategy, {than}"
        elif max(apart, 1 / apart) < self.tie_limit:
            head = f"a tie: {than}, which is within the errors of such times"
        else:
            apart = other.uncharged_s / winner.uncharged_s
            head = f"a tie: {than}, but {apart - 1:+.1%} without a charge fitted where it is little"
        order = packaged_model().order(self.result.best[0].measurement["rates"], apart)
        return "; ".join(filter(None, [head, causes, order]))


def beside_in_words(seen: ranking.Seen, other: ranking.Seen, named: str = "") -> str:
    """In words, how much longer a step of ``seen`` takes than one of ``other``, which is called ``named``."""
    return TABLES.text("beside", ratio=seen.step_s / other.step_s, named=named)


def causes_in_words(other: ranking.Seen, winner: ranking.Seen, most: int = 2) -> str:
    """In words, the parts of a step that explain most of the difference between two layouts' times, at most
    ``most`` parts."""
    mine, theirs = (seen.step_parts for seen in (winner, other))
    differences = {name: theirs[name] - mine[name] for name in mine}
    sign = 1 if other.step_s >= winner.step_s else -1
    reasons = sorted(differences, key=lambda name: -sign * differences[name])[:most]
    return ", ".join(
        f"{TABLES.forms['step_parts'][name]} {theirs[name]:.3g} s against {mine[name]:.3g}"
        for name in reasons
        if sign * differences[name] > 0.001 * winner.step_s
    )


# -- the job's own layout ----------------------------------------------------------------------------------


def own_in_words(answer: Advice) -> Iterator[str]:
    """The lines of an answer on the job's own layout; none if the question has no such layout."""
    asked = answer.question.own
    if asked is not None:
        cell = asked.looked_at
        reason = answer.result.refused.get(f"{cell.strategy} {cell.mesh_text}", "")
        fastest = next(iter(answer.result.best), None)
        yield answer.text("own", own=answer.result.own, fastest=fastest, reason=reason)
        if answer.result.own is not None:
            yield from _changes_in_words(answer)


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


def _settings_changed(answer: Advice, seen: ranking.Seen) -> str:
    """In words, the settings that turn the job's own layout into another layout."""
    assert answer.result.own is not None
    differing = _differing(answer.result.own, seen)
    words = [f"{path.partition('.')[2] or path} {shown(a)} to {shown(b)}" for path, a, b in differing]
    more = f" and {len(words) - _MOST} more" if len(words) > _MOST else ""
    return ", ".join(words[:_MOST]) + more


def _differing(own: ranking.Seen, seen: ranking.Seen) -> list[tuple[str, Any, Any]]:
    """The settings in which the job's own layout differs from another layout, with both values."""
    return [each for each in differences(own.cell, seen.cell) if each[0] not in OWN_WAYS]


def _changes(answer: Advice) -> Iterator[tuple[ranking.Seen, FlagChanges | None]]:
    """The fastest layouts that are faster than the job's own, or that fit where the job's own does not, each
    with the changes of arguments that lead to it; None: the program's arguments are not known."""
    own, asked = answer.result.own, answer.question.own
    if own is None or asked is None:
        return
    # layouts that surely fit come first
    whole = [seen for seen in answer.result.best if seen.exact]
    towards = sorted(whole[: ranking.NAMED], key=lambda seen: seen.is_full)
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
    changes = [
        {"strategy": seen.cell.strategy, "mesh": seen.cell.mesh_text, **asdict(changes)}
        for seen, changes in _changes(answer)
        if changes is not None
    ]
    return TABLES.record("own", own, words=[*own_in_words(answer)], changes=changes)
