"""The answer to one question of `spbench advise`: its layouts as records, ties, and why the winner wins."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from spbench.bench.measure import ATTENTION, packaged_model, priced_by_in_words, written
from spbench.bench.tools.choose import ranking
from spbench.bench.tools.choose.fit_verdict import TABLES, has_experts
from spbench.bench.tools.choose.layouts import folds_anew
from spbench.bench.tools.choose.possible import Absence
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.suggestions import micro_batch_of
from spbench.bench.tools.choose.whole_looks import Price
from spbench.bench.tools.jobs.argument_tables import shown
from spbench.bench.tools.jobs.flag_changes import FlagChanges, flag_changes
from spbench.bench.tools.jobs.flags import OWN_WAYS, differences
from spbench.bench.units import GIB, shown_price
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
        absence: why the layouts of ``--why`` are not named; None: there is no such option.
    """

    question: Question
    result: ranking.SearchResult
    seconds: float = 0.0
    cpu_s: float = 0.0
    prices: Sequence[Price] = ()
    absence: Absence | None = None

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

    def hidden_ties(self) -> list[ranking.Seen]:
        """The ties with the fastest that are not named, the simplest first; no named tie is less simple."""
        return [seen for seen in ranking.ranked(self.result.best)[ranking.NAMED :] if self.is_tie(seen)]

    @property
    def winner(self) -> ranking.Seen | None:
        """The layout named first: the simplest of the ties with the fastest; None: nothing fits."""
        return next(iter(self.ranked), None)

    @property
    def asked(self) -> dict[str, Any]:
        """The question as plain data: model, cluster, GPUs, length, figures and batch."""
        cell = self.question.cell
        return {
            "model": cell.model,
            "cluster": self.question.cluster,
            **self.question.place,
            "batch": cell.batch,
        }

    def table(self) -> list[dict[str, Any]]:
        """A mapping for each layout: the question's fields, then the layout's."""
        return [{**self.asked, **record} for record in self.records()]

    def records(self) -> list[dict[str, Any]]:
        """One mapping of plain data for each named layout, the best first."""
        best = self.result.best
        ties = sum(map(self.is_tie, best)) > 1
        meanings = {
            "own": self.result.own,
            "best": best[0] if best else None,
            "tie": lambda seen: ties and self.is_tie(seen),
            "micro_batch": micro_batch_of,
            "settings": lambda cell: written(ranking.settings_beside(self.question.cell, cell)),
            "attention": lambda cell: model_preset(*cell.model_arguments).attention_kernel,
            "compute_floor_s": ranking.compute_floor_s,
            "links_floor_s": ranking.links_floor_s,
        }
        lines = TABLES.records("layout", self.ranked, **meanings)
        return [{"rank": rank, **line} for rank, line in enumerate(lines, start=1)]

    def fullness(self) -> str:
        """A warning if the winner is too full or tight, with the first tie that is not too full; else ""."""
        winner = self.winner
        if winner is None or not winner.fits or not winner.is_full:
            because = winner.certainty.reason if winner else ""
            return f"{winner} is tight: {because}" if because else ""
        left = winner.memory.spare_bytes / GIB
        text = f"{winner} leaves {left:.1f} GiB, less than {ranking.SPARE:.0%} of a card"
        ties = [s for s in ranking.ranked(self.result.best) if self.is_tie(s) and s.exact and s is not winner]
        if (roomy := next((s for s in ties if not s.is_full), None)) is None:
            return f"{text}, and so does every tie that was traced whole" if ties else text
        ratio = roomy.step_s / winner.step_s - 1
        return f"{text}; {roomy} takes {ratio:+.0%} and leaves {roomy.memory.spare_bytes / GIB:.1f}"

    def folding(self) -> str:
        """In words, how much the fastest layout gains because its experts lie on other groups of ranks than
        the rest; "": they do not, or there are no experts. Only layouts that were traced whole count."""
        whole = sorted((s for s in self.result.traced if s.fits and s.exact), key=lambda seen: seen.step_s)
        if not whole or not has_experts(whole[0].cell) or not folds_anew(whole[0].cell.sizes.by_axis):
            return ""
        head = f"folding: the fastest layout, {whole[0]}, has its experts over ranks of several axes"
        other = next((s for s in whole if not folds_anew(s.cell.sizes.by_axis)), None)
        if other is None:
            return f"{head}; none without it that was traced fits"
        cause = causes_in_words(other, whole[0], 1)
        return f"{head}; without it {other} takes {other.step_s / whole[0].step_s - 1:+.0%}: {cause}"

    def priced_by(self) -> str:
        """In words, the work of the best layouts that is priced by a rate of other work; "": all work has
        rates."""
        return priced_by_in_words(seen.measurement for seen in self.result.best)

    def attention(self) -> str:
        """In words, the winner's attention kernel, and how long its step would take with other kernels, the
        shortest first; "": no other kernel was priced."""
        others = sorted((p for p in self.prices if p.settings.startswith(ATTENTION)), key=lambda p: p.ratio)
        if self.winner is None or not others:
            return ""
        kernel = model_preset(*self.winner.cell.model_arguments).attention_kernel
        steps = ", ".join(f"{p.settings.partition('=')[2]} {shown_price(p.ratio)}" for p in others)
        return f"attention by {kernel}; a step by others: {steps}"

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
        winner = self.winner
        strategy = winner.cell.strategy if winner else ""
        others = [s for s in self.result.of_strategies if s.cell.strategy != strategy and self.is_tie(s)]
        return {
            **self.asked,
            "strategy": strategy,
            "mesh": winner.cell.mesh_text if winner else "",
            "tie": bool(others),
            "tokens_per_s": winner.measurement["tokens_per_s"] if winner else None,
        }

    def in_words(self) -> str:
        """The question in words: model, GPUs, cluster, batch and length."""
        cell = self.question.cell
        sequences = f"{cell.batch} sequence{'s' if cell.batch != 1 else ''} of {cell.seq_len}"
        sizes = [cell.model_options.get(name) for name in ("layers", "hidden")]
        # a job that gives all sizes has a preset only in name
        model = f"a model of {sizes[0]} layers of width {sizes[1]}" if all(sizes) else cell.model
        return f"{model}, {self.question.gpus} GPUs of {self.question.cluster}, {sequences}"

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
    ratio = seen.step_s / other.step_s
    share = abs(ratio - 1)
    words, joint = f"{share:.{0 if share >= 0.1 else 1}%} {'more' if ratio >= 1 else 'less'} time", "than"
    if ratio >= 2:
        words, joint = f"{ratio:.1f} times as long", "as"
    return f"takes {words} {joint if named else ''} {named}".rstrip()


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


def _beside_the_best(answer: Advice, own: ranking.Seen) -> str:
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
