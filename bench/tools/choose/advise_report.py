"""The output of `spbench advise`: the best layouts, why the first wins, and why others are not named."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import Progress
from spbench.bench.command_line.record_forms import TIE
from spbench.bench.errors import UserError
from spbench.bench.files import write_whole
from spbench.bench.measure import priced_by_in_words
from spbench.bench.tools.choose.advice import Advice, own_content, own_in_words
from spbench.bench.tools.choose.asked import Asked, is_figure, swept_figures
from spbench.bench.tools.choose.fit_verdict import TABLES
from spbench.bench.tools.choose.layout_search import answered
from spbench.bench.tools.choose.possible import left_out_by_length
from spbench.bench.tools.choose.question import question, whole_numbers
from spbench.bench.tools.choose.ranking import Seen, simpler
from spbench.bench.tools.jobs.flags import program_flags
from spbench.bench.tools.jobs.job import seen_from
from spbench.bench.units import GIB
from spbench.bench.yaml_text import dump
from spbench.impls import PLUS, model_preset
from spbench.plots.style import binary_length

#: the most costs of simpler layouts, unless --details asks for all
_COSTS = 3


def report(
    answers: Sequence[Advice], figure: Path | None = None, output: Path | None = None, program: str = ""
) -> Output:
    """The output of all answers, for people and for programs.

    Args:
        figure: the file for a figure of one answer's layouts, or for a map of several answers.
        output: the file for a scenario of the best layouts.
        program: the layout named first is shown in the arguments of this program; "": in none.
    """
    files = []
    details: list[Table | str] = []
    sections: list[Table | str] = []
    if len(answers) > 1:
        about = {"changed": any(each.question.figures for each in answers), "TIE": TIE, "NOTHING": NOTHING}
        sections.append(TABLES.table("map", "Which layout where", answers, **about))
        sections += ["\n".join(lines)] if (lines := [*turns([each.point() for each in answers])]) else []
    for answer in answers:
        sections += [*_sections(answer, program), *answer.absence]
        details += _details(answer)
    if output is not None:
        cells = [seen.cell for answer in answers for seen in answer.ranked]
        text = scenario_text(cells, "The best layouts of spbench advise", output.expanduser().parent)
        files.append(write_whole(output, text))
    if figure is not None:
        files.append(_drawn(answers, figure))
    table = [line for answer in answers for line in answer.table()]
    content = TABLES.records("advice", answers, own=own_content)
    notes = list(dict.fromkeys(remark for answer in answers for remark in answer.question.remarks))
    return Output(sections, content, table, notes=notes, files=files, details=details)


def scenario_text(cells: Sequence[Cell], title: str, folder: Path) -> str:
    """The text of a scenario file in ``folder`` with these cells, for `spbench run`, `verify`, `trace` and
    `fit`."""
    left_out = {"engine", "timing", "model_config_json"}
    groups = [cell.model_dump(mode="json", exclude_defaults=True, exclude=left_out) for cell in cells]
    for group in groups:
        group["sizes"] = {axis: n for axis, n in group.get("sizes", {}).items() if n > 1}
        group |= {key: seen_from(folder, group[key]) for key in ("model", "cluster") if key in group}
    return dump({"title": title, "groups": groups})


def _drawn(answers: Sequence[Advice], path: Path) -> Path:
    """Draw the layouts of one answer, or a map of several answers; returns the file."""
    from spbench.plots.fit_and_advise import draw_advice, draw_layouts

    if len(answers) > 1:
        return draw_advice([answer.point() for answer in answers], path)
    (answer,) = answers
    if answer.winner is None:
        raise UserError(f"--figure {path}: nothing fits, so there is nothing to draw")
    return draw_layouts(answer.text("question"), answer.bars(), path)


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
    return binary_length(value) if name == "seq_len" else f"{value} GPUs"


def _sections(answer: Advice, program: str) -> Iterator[Table | str]:
    """The sections on the named layouts, on why the winner wins, and on simpler layouts."""
    winner = answer.winner
    if winner is None:
        yield answer.text("none_fits", NOTHING=NOTHING)
        yield from () if answer.result.impossible else own_in_words(answer)
        return
    lines = [{**of, "seen": each} for each, of in zip(answer.ranked, answer.records(), strict=True)]
    title = f"The best layouts: {answer.text('question')}"
    yield TABLES.table("layouts", title, lines, TIE=TIE, TIGHT="tight")
    yield from own_in_words(answer)
    traced = {part for seen in answer.result.traced for part in seen.cell.strategy.split(PLUS)}
    work = priced_by_in_words(seen.measurement for seen in answer.result.best)
    texts = [
        answer.text("told_apart"),
        left_out_by_length(answer.question, traced),
        answer.text("hours"),
        answer.text("attention", kernel=model_preset(*winner.cell.model_arguments).attention_kernel),
        TABLES.text("priced_by", work=work),
        f"{winner}: {answer.why()}",
        *map(answer.text, ("fullness", "folding", "packed", "same")),
        _simplified(answer, winner),
    ]
    yield from filter(None, texts)
    if program:
        yield _as_job(program, winner.cell)


def _details(answer: Advice) -> Iterator[Table | str]:
    """The sections on prices of settings, on other strategies, and on how many layouts had each outcome."""
    if answer.prices:
        yield TABLES.table("prices", f"What single settings of {answer.winner} cost", answer.prices)
    named = {seen.cell.strategy for seen in answer.ranked}
    others = [seen for seen in answer.result.of_strategies if seen.cell.strategy not in named]
    texts = answer.text("others", others=others if answer.winner else ()), answer.text("counts")
    yield from filter(None, texts)


def _simplified(answer: Advice, winner: Seen) -> str:
    """In words, how much longer a step of simpler layouts takes than that of the layout named first."""
    simpler_ones = simpler(answer.result.best, winner)
    costs = [f"{seen} takes {seen.step_s / winner.step_s - 1:+.0%}" for seen in simpler_ones if seen.exact]
    costs += [
        f"without {each.settings} it takes {1 / each.ratio - 1:+.0%}, {each.saved_bytes / GIB:+.3g} GiB"
        f"{'' if each.changed.fits else ', and does not fit'}"
        for each in answer.prices
        if each.used
    ]
    more = f"; {len(costs) - _COSTS} more by --details" if len(costs) > _COSTS else ""
    return f"to simplify: {'; '.join(costs[:_COSTS]) or 'no simpler layout that was traced fits'}{more}"


def _as_job(program: str, cell: Cell) -> str:
    """A layout as arguments of a program, or a sentence on what the program lacks."""
    flags = program_flags(program, cell)
    name = flags.program.split()[0]
    if flags.missing:
        return f"{name} has no {'; no '.join(flags.missing)}"
    return f"{name}: {' '.join(' '.join(filter(None, [line.argument, line.value])) for line in flags.lines)}"


def advise(
    subject: tuple[str, ...],
    gpus: tuple[int, ...] | None,
    seq_len: tuple[int, ...] | None,
    batch_tokens: int | None,
    only: tuple[str, ...],
    without: tuple[str, ...],
    fixed: tuple[tuple[str, str], ...],
    changes: tuple[tuple[str, str], ...],
    why: tuple[tuple[str, str], ...],
    program: str | None,
    figure: Path | None,
    output: Path | None,
    jobs: int | None,
    executor: str | None,
    **options: Any,
) -> Output:
    """The output of `spbench advise`; the arguments are the options of that command, ``options`` the others
    of :meth:`Asked.of`."""
    if options["batch"] is not None and batch_tokens is not None:
        raise UserError("--batch and --batch-tokens say the same: give one")
    asked_about = whole_numbers("--why", why)
    of_cluster = [(name, text) for name, text in changes if is_figure(name)]
    options["changes"] = [pair for pair in changes if pair not in of_cluster]
    questions = []
    for length, n in itertools.product(seq_len or [None], gpus or [None]):
        asked = Asked.of(gpus=n, seq_len=length, **options)
        one = question(subject, asked, batch_tokens, only, without, fixed, program or "")
        one.check_axes("--why", asked_about)
        questions += [one.with_figures(figures) for figures in swept_figures(of_cluster)]
    varying([each.asked for each in questions])
    answers = []
    with Progress() as progress:
        for answer in answered(questions, jobs, progress.at, executor, asked_about):
            answers.append(answer)
            progress.at(f"answered in {answer.seconds:.0f} s", len(answers) / len(questions))
    return report(answers, figure, output, program or "")
