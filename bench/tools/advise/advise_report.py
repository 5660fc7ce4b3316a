"""What `spbench advise` says: the best layouts, why the first wins, and what became of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Output, Table
from spbench.bench.errors import UserError
from spbench.bench.files import write_whole
from spbench.bench.measure.trust.bands import TIE, shown_band
from spbench.bench.tools.advise.absent import absence, spelled
from spbench.bench.tools.advise.advice import Advice, scenario_text
from spbench.bench.tools.advise.search_findings import Seen
from spbench.bench.tools.advise.switch_prices import Price
from spbench.bench.tools.advise.turns import turns
from spbench.bench.tools.jobs.flags import program_flags
from spbench.bench.units import shown_price

_GIB = 2**30
#: lines for --why, and costs of simpler layouts, where no details are asked for
_REASONS, _COSTS = 3, 3


def report(
    answers: Sequence[Advice],
    why: Mapping[str, int] = {},
    figure: Path | None = None,
    output: Path | None = None,
    program: str = "",
) -> Output:
    """The answers for people and for programs.

    Args:
        why: ranks along axes that are asked about.
        figure: the layouts of one answer, or a map of several, are drawn there.
        output: the best layouts are written there, as a scenario.
        program: whose arguments the layout named first is told in; "": of none.
    """
    files = []
    details: list[Table | str] = []
    sections: list[Table | str] = []
    if len(answers) > 1:
        sections.append(_map(answers))
        sections += ["\n".join(lines)] if (lines := [*turns([each.point() for each in answers])]) else []
    for answer in answers:
        sections += _sections(answer, program)
        if why:
            sections += _reasons(answer, why)
        details += _details(answer)
    if output is not None:
        cells = [seen.cell for answer in answers for seen in answer.ranked]
        files.append(write_whole(output, scenario_text(cells, "The best layouts of spbench advise")))
    if figure is not None:
        files.append(_drawn(answers, figure))
    records = [line for answer in answers for line in answer.table()]
    content = [
        {
            "question": answer.asked,
            "layouts": answer.records(),
            "why": answer.why(),
            "prices": [asdict(each) for each in answer.found.prices],
            "attention_kernels": answer.found.by_kernel,
            "strategies": [_brief(seen) for seen in answer.found.of_strategies],
            "nearest": answer.found.nearest and _brief(answer.found.nearest),
            "impossible": answer.found.impossible,
            "counts": dict(answer.found.counts),
            "refused": answer.found.refused.reasons,
            "seconds": answer.seconds,
            "cpu_s": answer.cpu_s,
        }
        for answer in answers
    ]
    notes = list(dict.fromkeys(remark for answer in answers for remark in answer.question.remarks))
    return Output(sections, content, records, notes=notes, files=files, details=details)


def _drawn(answers: Sequence[Advice], path: Path) -> Path:
    """The layouts of one answer, or a map of several, in a file."""
    from spbench.plots.fit_and_advise import draw_advice, draw_layouts

    if len(answers) > 1:
        return draw_advice([answer.point() for answer in answers], path)
    (answer,) = answers
    if answer.winner is None:
        raise UserError(f"--figure {path}: nothing fits, so there is nothing to draw")
    return draw_layouts(answer.in_words(), answer.bars(), path)


def _brief(seen: Seen) -> dict[str, Any]:
    return {
        "strategy": seen.cell.strategy,
        "mesh": seen.cell.mesh_text,
        "step_time_s": seen.step_s,
        "peak_memory_bytes": seen.peak,
        "traced": "whole" if seen.depth == "all_layers" else "with few layers",
        "cell": seen.cell.key,
    }


def _map(answers: Sequence[Advice]) -> Table:
    lines = []
    for answer in answers:
        point = answer.point()
        rate = point["tokens_per_s"]
        lines.append(
            {
                "GPUs": point["gpus"],
                "length": point["seq_len"],
                "batch": point["batch"],
                **({"cluster": point["figures"]} if any(each.question.figures for each in answers) else {}),
                "best": _best(answer),
                "": TIE if point["tie"] else "",
                "tokens/s a GPU": f"{rate / point['gpus']:.3g}" if rate else None,
                "layouts": answer.found.counts["looked at"],
                "took": f"{answer.seconds:.0f} s",
            }
        )
    return Table("Which layout where", lines)


def _best(answer: Advice) -> str:
    if answer.winner is None:
        return "no layout is possible" if answer.found.impossible else "nothing fits"
    return f"{answer.winner.cell.strategy} {answer.winner.cell.mesh_text}"


def _sections(answer: Advice, program: str) -> Iterator[Table | str]:
    """The layouts, why the first is first, and what is simpler."""
    asked, winner = answer.in_words(), answer.winner
    if answer.found.impossible:
        yield f"{asked}: {answer.found.impossible}"
    elif winner is None:
        yield f"{asked}: nothing fits{_nearest(answer)}"
    else:
        yield Table(
            f"The best layouts: {asked}",
            [*_lines(answer)],
            ("strategy", "mesh", "step", "needs GiB", "spare", "", "behind"),
            below=("beside",),
        )
        yield _told_apart(answer)
        if attention := answer.attention():
            yield attention
        if priced_by := answer.priced_by():
            yield f"priced by something else, with shares of the step: {priced_by}"
        yield f"{_named(winner.cell)}: {answer.why()}"
        yield _simplified(answer)
        if program:
            yield _as_job(program, winner.cell)


def _details(answer: Advice) -> Iterator[Table | str]:
    """What memory switches cost, what else was traced, and what became of all layouts."""
    found, winner = answer.found, answer.winner
    if winner is not None:
        if found.prices:
            yield _prices(winner.cell, found.prices)
        if changes := answer.other_settings():
            told = ", ".join(f"{settings} {ratio - 1:+.0%}" for settings, ratio in changes.items())
            yield f"the fastest with other settings: {told}"
        if others := [*_others(answer)]:
            yield f"other strategies, by traces of few layers: {', '.join(others)}"
    counts = found.counts
    if counts["looked at"]:
        yield (
            f"{counts['looked at']} layouts looked at in {answer.seconds:.0f} s "
            f"({answer.cpu_s:.0f} s of cores): "
            + ", ".join(f"{n} {what}" for what, n in counts.items() if n and what != "looked at")
        )


def _simplified(answer: Advice) -> str:
    """What it would cost to set less up than the layout named first does."""
    winner = answer.winner
    assert winner is not None
    costs = [f"{_named(seen.cell)} takes {seen.step_s / winner.step_s - 1:+.0%}" for seen in answer.simpler()]
    costs += [
        f"without {each.settings} it takes {1 / each.ratio - 1:+.0%}, {each.saved_bytes / _GIB:+.3g} GiB"
        for each in answer.found.prices
        if each.used and each.saved_bytes > 0
    ]
    more = f"; {len(costs) - _COSTS} more by --details" if len(costs) > _COSTS else ""
    return f"to simplify: {'; '.join(costs[:_COSTS]) or 'nothing simpler that was traced fits'}{more}"


def _prices(winner: Cell, found: Sequence[Price]) -> Table:
    """What the memory switches of the named layout cost, and what others would."""
    layout = f"{winner.strategy} {winner.mesh_text}"
    return Table(
        f"What memory switches cost in {layout}, a used one beside those above it (by traces of few layers)",
        [
            {
                "switch": each.settings,
                "used": "yes" if each.used else "no",
                "step": shown_price(each.ratio),
                "peak GiB": f"{-each.saved_bytes / _GIB:+.1f}",
            }
            for each in found
        ],
    )


def _told_apart(answer: Advice) -> str:
    """What the marks of the layouts mean."""
    text = f"{TIE}: not told apart from the fastest (up to {answer.tie_limit - 1:.0%}); the simplest is first"
    if hidden := answer.hidden_ties():
        fastest = answer.found.best[0]
        where = f", the fastest of all {_named(fastest.cell)}" if fastest in hidden else ""
        text += f"; {len(hidden)} more tie{where}"
    return text


def _named(cell: Cell) -> str:
    return f"{cell.strategy} {cell.mesh_text}"


def _nearest(answer: Advice) -> str:
    near = answer.found.nearest
    if near is None:
        return ""
    memory = answer.memory(near)
    needed, missing = (f"{nbytes / _GIB:.1f}" for nbytes in (memory.total_bytes, -memory.spare_bytes))
    what = f"{_named(near.cell)} with {near.cell.training.backend}"
    return f"; the nearest is {what}, which needs {needed} GiB: {missing} more than a card has"


def _lines(answer: Advice) -> Iterator[dict[str, Any]]:
    for seen, record in zip(answer.ranked, answer.records(), strict=True):
        mfu = record["mfu"]
        yield {
            "": TIE if record["tie"] else "",
            "strategy": record["strategy"],
            "mesh": record["mesh"],
            "backend": record["backend"],
            "micro-batch": record["micro_batch"],
            "beside": record["settings"].replace("model_options.", "").replace("strategy_options.", ""),
            "step": shown_band(answer.measured(seen)),
            "behind": f"{record['behind']:+.0%}" if record["behind"] else "",
            "tokens/s": f"{record['tokens_per_s']:.3g}",
            "MFU": None if mfu is None else f"{mfu:.0%}",
            "needs GiB": f"{'' if seen.exact else '~'}{record['total_bytes'] / _GIB:.1f}",
            "spare": f"{record['spare_bytes'] / _GIB:.1f}",
            "allocated": f"{seen.peak / _GIB:.1f}",
            "sends GiB": f"{record['sent_bytes'] / _GIB:.3g}",
            "exposed": f"{record['exposed_communication']:.0%}",
            "bubble": f"{record['bubble']:.0%}",
            "bound": record["bound"],
            "floors": _floors(record),
        }


def _floors(record: Mapping[str, Any]) -> str:
    known = {"compute": record["compute_floor_s"], "links": record["links_floor_s"]}
    return ", ".join(f"{what} {seconds:.3g} s" for what, seconds in known.items() if seconds is not None)


def _others(answer: Advice) -> Iterator[str]:
    """The strategies that are not among the best."""
    shown = {seen.cell.strategy for seen in answer.ranked}
    best = answer.found.best[0].step_s
    for seen in answer.found.of_strategies:
        if seen.cell.strategy not in shown:
            yield f"{seen.cell.strategy} {seen.cell.mesh_text} {seen.step_s / best - 1:+.0%}"


def _as_job(program: str, cell: Cell) -> str:
    """A layout as arguments of a program, or what that lacks."""
    flags = program_flags(program, cell)
    name = flags.program.split()[0]
    if flags.missing:
        return f"{name} has no {'; no '.join(flags.missing)}"
    return f"{name}: {' '.join(' '.join(filter(None, [line.argument, line.value])) for line in flags.lines)}"


def _reasons(answer: Advice, why: Mapping[str, int]) -> Iterator[Table | str]:
    """Why layouts with these ranks are not the best."""
    found = absence(answer.question, answer.found, why)
    if found.lines:
        yield Table(f"Layouts with {spelled(why)}", found.lines, most=_REASONS)
    if found.sentence:
        yield found.sentence
