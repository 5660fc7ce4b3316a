"""What `spbench advise` says: the best layouts, why the first wins, and what became of the others."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from spbench.bench.advise.advice import Advice, scenario_text
from spbench.bench.advise.findings import Seen
from spbench.bench.advise.prices import Price
from spbench.bench.advise.turns import turns
from spbench.bench.atomic_write import write_whole
from spbench.bench.cell import Cell
from spbench.bench.commands.output import Output, Table
from spbench.bench.errors import UserError
from spbench.bench.jobs import FLAGS
from spbench.bench.jobs.flags import program_flags
from spbench.bench.trust.bands import TIE, shown_band
from spbench.bench.trust.shown import shown_price

_GIB = 2**30
#: refusals of layouts that are shown for --why, at the most
_MOST_REASONS = 20


def report(
    answers: Sequence[Advice],
    why: Mapping[str, int] = {},
    figure: Path | None = None,
    output: Path | None = None,
) -> Output:
    """The answers for people and for programs.

    Args:
        why: ranks along axes that are asked about.
        figure: the layouts of one answer, or a map of several, are drawn there.
        output: the best layouts are written there, as a scenario.
    """
    files = []
    sections: list[Table | str] = []
    if len(answers) > 1:
        sections.append(_map(answers))
        sections += ["\n".join(lines)] if (lines := [*turns([each.point() for each in answers])]) else []
    for answer in answers:
        sections += _sections(answer)
        if why:
            sections.append(_reasons(answer, why))
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
    return Output(sections, content, records, notes=notes, files=files)


def _drawn(answers: Sequence[Advice], path: Path) -> Path:
    """The layouts of one answer, or a map of several, in a file."""
    from spbench.plots.advice import draw_advice
    from spbench.plots.layouts import draw_layouts

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


def _sections(answer: Advice) -> Iterator[Table | str]:
    found = answer.found
    asked = answer.in_words()
    winner = answer.winner
    if found.impossible:
        yield f"{asked}: {found.impossible}"
        return
    if winner is None:
        yield f"{asked}: nothing fits{_nearest(answer)}"
    else:
        yield Table(f"The best layouts: {asked}", [*_lines(answer)])
        yield _told_apart(answer)
        if attention := answer.attention():
            yield attention
        if priced_by := answer.priced_by():
            yield f"times rest on substitutes: {priced_by}"
        yield f"{winner.cell.strategy} {winner.cell.mesh_text}: {answer.why()}"
        if found.prices:
            yield _prices(winner.cell, found.prices)
        if changes := answer.other_settings():
            told = ", ".join(f"{settings} {ratio - 1:+.0%}" for settings, ratio in changes.items())
            yield f"the fastest with other settings: {told}"
        if others := [*_others(answer)]:
            yield f"other strategies, by traces of few layers: {', '.join(others)}"
        yield "\n".join(_as_jobs(winner.cell))
    counts = found.counts
    yield (
        f"{counts['looked at']} layouts looked at in {answer.seconds:.0f} s ({answer.cpu_s:.0f} s of cores): "
        + ", ".join(f"{n} {what}" for what, n in counts.items() if n and what != "looked at")
    )


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
    """What the mark and the intervals of the layouts mean."""
    return (
        f"{TIE}: not told apart from the fastest: errors of splits of one run differ by up to "
        f"{answer.tie_limit - 1:.0%}; ± is how far a machine's time may be off, in part for all layouts alike"
    )


def _nearest(answer: Advice) -> str:
    near = answer.found.nearest
    if near is None:
        return ""
    usable = near.outcome.measurement["usable_memory_bytes"]
    needed, missing = (f"{nbytes / _GIB:.1f}" for nbytes in (near.peak, near.peak - usable))
    what = f"{near.cell.strategy} {near.cell.mesh_text} with {near.cell.training.backend}"
    return f"; the nearest is {what}, which needs {needed} GiB: {missing} more than a card has for tensors"


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
            "peak GiB": f"{seen.peak / _GIB:.1f}",
            "spare": f"{record['spare_bytes'] / _GIB:.1f}",
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
    shown = {seen.cell.strategy for seen in answer.found.best}
    best = answer.found.best[0].step_s
    for seen in answer.found.of_strategies:
        if seen.cell.strategy not in shown:
            yield f"{seen.cell.strategy} {seen.cell.mesh_text} {seen.step_s / best - 1:+.0%}"


def _as_jobs(cell: Cell) -> Iterator[str]:
    """The winner as arguments of programs, or what these lack."""
    for kind in FLAGS.names():
        flags = program_flags(kind, cell)
        program = flags.program.split()[0]
        if flags.missing:
            yield f"{program} has no {'; no '.join(flags.missing)}"
        else:
            arguments = " ".join(" ".join(filter(None, [line.argument, line.value])) for line in flags.lines)
            yield f"{program}: {arguments}"


def _reasons(answer: Advice, why: Mapping[str, int]) -> Table | str:
    """Why layouts with these ranks are not the best."""
    wanted = {f"{axis}{n}" for axis, n in why.items()}

    def has(text: str) -> bool:
        return wanted <= {part for word in text.split() for part in word.split("x")}

    lines: list[dict[str, Any]] = [
        {"layout": what, "why": reason} for what, reason in answer.found.refused.reasons.items() if has(what)
    ]
    best = answer.found.best[0].step_s if answer.found.best else None
    for seen in answer.found.traced:
        if has(seen.cell.mesh_text):
            if seen.fits:
                why_not = f"takes {seen.step_s / best - 1:+.1%}" if best else "fits"
            else:
                why_not = f"needs {seen.peak / _GIB:.1f} GiB"
            lines.append({"layout": f"{seen.cell.strategy} {seen.cell.mesh_text}", "why": why_not})
    if not lines:
        return f"no layout with {', '.join(sorted(wanted))} came so far: slower or larger by the estimate"
    return Table(f"Layouts with {', '.join(sorted(wanted))}", lines[:_MOST_REASONS])
