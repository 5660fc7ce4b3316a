"""Whether a question has any layout, and if not, which single change of the question gives it one: each
change that is named was tried. Also why layouts with given ranks along axes are not among the best: `spbench
advise --why tp=16`."""

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from spbench.bench.command_line.output import Table
from spbench.bench.tools.choose.candidates import Bar, Candidate, figures_of, kind_of_layout
from spbench.bench.tools.choose.estimates import Estimates
from spbench.bench.tools.choose.fit_verdict import TABLES
from spbench.bench.tools.choose.layouts import (
    Layout,
    Refused,
    backend_settings,
    divisors,
    layouts,
    searched_strategies,
    ways,
)
from spbench.bench.tools.choose.question import Question
from spbench.bench.tools.choose.ranking import SearchResult
from spbench.bench.tools.choose.references import has_stages
from spbench.impls import MESH_AXES, PLUS, all_strategies

#: the most changes that are named, and the most batches that are tried
_NAMED, _VALUES = 3, 6
#: the most layouts for --why, unless --details asks for all
_REASONS = 3
#: a batch that is larger or smaller by this factor would rather be another job
_ANOTHER_JOB = 1.5
NO_STAGES = "no backend that is searched has stages of a pipeline"


def possible(question: Question, refused: Refused) -> bool:
    """Whether a question has a layout, by all checks that need no trace.

    Args:
        refused: takes the reasons of impossible layouts, until the first possible one.
    """
    if not (settings := backend_settings(question)):
        return False
    pipelined = any(each and has_stages(question, each) for each in settings)
    estimates = Estimates(question.cell, question.gpus, {}, {})
    for way in ways(question):
        around = [*islice(layouts(question, way, estimates.layers, refused), 1)]
        if around and around[0].pp > 1 and not pipelined:  # the first has the fewest stages
            refused.setdefault(f"{way} pp{around[0].pp}", NO_STAGES)
        elif around and figures_of(estimates, way, question, refused) is not None:
            return True
    for part in dict.fromkeys(part for name in question.strategies for part in name.split(PLUS)):
        if not all_strategies()[part].searched:
            refused[part] = f"{part} is in no search (spbench fit says whether one layout of it fits)"
    return False


def why_impossible(question: Question, kept: Collection[str] = ()) -> str:
    """Why a question has no layout, in a sentence; "" if the question has a layout.

    Args:
        kept: fixed axes that the sentence does not propose to leave out.
    """
    refused = Refused()
    if possible(question, refused):
        return ""
    ways_out = [*islice(_ways_out(question, kept), _NAMED)]
    return TABLES.text("impossible", question, reasons=[*{*refused.values()}], ways_out=ways_out)


def left_out_by_length(question: Question, traced: Collection[str]) -> str:
    """A sentence on strategies that only the length leaves without a layout, and a near length; "" for none.

    Args:
        traced: strategies with a traced layout.
    """
    lengths, by_length = _lengths(question), dict[int, list[str]]()
    backends = [each for each in question.only if each not in question.strategies]
    names = (each.name for each in searched_strategies(question) if PLUS not in each.name) if lengths else ()
    for name in names:
        alone = replace(question, only=[*backends, name])
        if name in traced or possible(alone, Refused()):
            continue
        if (length := _first(alone, lengths, "seq_len")) is not None:
            by_length.setdefault(length, []).append(name)
    length = question.cell.seq_len
    texts = (f"{', '.join(names)} (--seq-len {other} has some)" for other, names in by_length.items())
    text = "; ".join(texts)
    return f"left out, as no layout of theirs divides {length} positions: {text}" if text else ""


def _ways_out(question: Question, kept: Collection[str]) -> Iterator[str]:
    """Single changes of a question, in words, each of which was tried and gives the question a layout."""
    for text, narrowed in _without(question, kept):
        if possible(narrowed, Refused()):
            yield f"without {text}"
    for flag, values, name in (
        ("--batch", _batches(question), "batch"),
        ("--gpus", _gpus(question), "gpus"),
        ("--seq-len", _lengths(question), "seq_len"),
    ):
        if (value := _first(question, values, name)) is not None:
            yield f"with {flag} {value}"


def _without(question: Question, kept: Collection[str]) -> Iterator[tuple[str, Question]]:
    """(an option that narrows the question, in words; the question without it), for each such option."""
    fixed, options, only, strategies = question.fixed, question.options, question.only, question.strategies
    for name in (name for name in fixed if name not in kept):
        rest = {other: n for other, n in fixed.items() if other != name}
        yield f"--fixed {name}={fixed[name]}", replace(question, fixed=rest)
    for name in (name for name in options if name.startswith("training.")):
        others = {other: value for other, value in options.items() if other != name}
        yield f"--fixed {name}={options[name]}", replace(question, options=others)
    for some in filter(None, (strategies, [each for each in only if each not in strategies])):
        yield f"--only {','.join(some)}", replace(question, only=[each for each in only if each not in some])
    if question.program:
        yield f"--for {question.program}", replace(question, program="")
    for name in question.without:
        left = [each for each in question.without if each != name]
        yield f"--without {name}", replace(question, without=left)


def _first(question: Question, values: Sequence[int], name: str) -> int | None:
    """The first of some numbers of GPUs, or values of a setting, with which the question has a layout."""
    for n in values:
        cell = question.cell if name == "gpus" else question.cell.model_copy(update={name: n})
        if possible(replace(question, cell=cell, gpus=n if name == "gpus" else question.gpus), Refused()):
            return n
    return None


def _near(n: int, factor: int) -> int:
    """The multiple of a factor, at least the factor itself, that is nearest to n."""
    return max(factor, round(n / factor) * factor)


def _batches(question: Question) -> list[int]:
    """Nearby batches that more of the GPUs divide; those that hardly change the job come first."""
    batch, _ = question.cell.shape
    around = {_near(batch, n): n for n in divisors(question.gpus)}
    around.pop(batch, None)

    def order(value: int) -> tuple[bool, float]:
        ratio = max(value, batch) / min(value, batch)
        far = ratio > _ANOTHER_JOB
        return far, ratio if far else -around[value]

    # the batch that all GPUs divide comes last: with it each number of replicas has whole samples
    return [*sorted(around, key=order)[: _VALUES - 1], _near(batch, question.gpus)]


def _gpus(question: Question) -> list[int]:
    """Numbers of GPUs that the fixed ranks divide, the nearest first: near numbers, powers of two, and one
    GPU for each sample."""
    gpus, (batch, _) = question.gpus, question.cell.shape
    fixed = math.prod(n for axis, n in question.fixed.items() if axis in MESH_AXES)
    power = 1 << (gpus.bit_length() - 1)
    around = {_near(gpus, fixed), _near(power, fixed), _near(2 * power, fixed), batch * fixed} - {gpus}
    return sorted(around, key=lambda n: max(n, gpus) / min(n, gpus))


def _lengths(question: Question) -> list[int]:
    """Near lengths that the GPUs divide, and that twice as many divide, as two chunks on each rank need."""
    _, length = question.cell.shape
    around = dict.fromkeys(_near(length, n) for n in (question.gpus, 2 * question.gpus))
    return [n for n in around if n != length]


# -- why some layouts are absent -----------------------------------------------------------------------------


def absence(
    question: Question,
    result: SearchResult,
    asked_about: Mapping[str, int],
    every: Sequence[Candidate] = (),
    too_large: float = math.inf,
    bar: Bar | None = None,
) -> list[Table | str]:
    """Sections on why no layout with these ranks along axes is named: a table of the layouts that were traced
    or are impossible, the fastest first, and a sentence on all others.

    Args:
        every: the candidates of the search.
        too_large: estimated bytes above which nothing is traced.
        bar: of the candidates.
    """
    named = ", ".join(f"{axis}{n}" for axis, n in asked_about.items())
    if reason := _cannot_be(question, asked_about):
        return [f"no layout with {named} can be: {reason}"]
    best_s = result.best[0].step_s if result.best else None
    traced = [each for each in result.traced if _has(each.cell.sizes.by_axis, asked_about)]
    traced.sort(key=lambda each: (not each.fits, each.step_s))
    lines = TABLES.records("absent", traced, best_s=best_s)
    wanted = {f"{axis}{n}" for axis, n in asked_about.items() if n > 1}
    lines += [
        {"layout": what, "why": reason}
        for what, reason in result.refused.items()
        if wanted <= {part for word in what.split() for part in word.split("x")}
    ]
    kinds, far = {each.kind for each in result.traced}, dict[tuple[str, str], float]()
    left = [each for each in every if each.kind not in kinds and _has(each.layout.sizes, asked_about)]
    kinds |= {each.kind for each in left}
    for which, least_s in bar.far.items() if bar else ():
        layout = Layout(*which, 1)
        kind = kind_of_layout(layout.way.strategy, layout.sizes)
        if _has(layout.sizes, asked_about) and kind not in kinds:
            far[kind] = least_s
    table = Table(f"Layouts with {named}", lines, most=_REASONS)
    untraced = [_untraced(left, far, named, best_s, too_large)] if left or far else []
    return [*([table] if lines else []), *untraced]


def _has(sizes: Mapping[str, int], asked_about: Mapping[str, int]) -> bool:
    return all(sizes.get(axis, 1) == n for axis, n in asked_about.items())


def _cannot_be(question: Question, asked_about: Mapping[str, int]) -> str:
    """Why no layout can have these ranks along axes; "" if some can."""
    ranks = math.prod(n for axis, n in asked_about.items() if axis in MESH_AXES)
    if question.gpus % ranks:
        return f"{ranks} ranks do not divide {question.gpus} GPUs"
    for axis, n in asked_about.items():
        if question.fixed.get(axis, n) != n:
            return f"--fixed {axis}={question.fixed[axis]} leaves them out"
    asked = replace(question, fixed={**question.fixed, **asked_about})
    return why_impossible(asked, kept=[*asked_about])


def _untraced(
    left: Sequence[Candidate],
    far: Mapping[tuple[str, str], float],
    named: str,
    best_s: float | None,
    too_large: float,
) -> str:
    """A sentence on the estimates of layouts that were not traced; ``far``: the estimated seconds of layouts
    that are no candidates, by kind."""
    layouts = {*(each.kind for each in left), *far}
    small = [each for each in left if each.estimated_bytes <= too_large]
    return TABLES.text(
        "untraced",
        named=named,
        layouts=len(layouts),
        large=len(layouts) - len({*(each.kind for each in small), *far}),
        least_bytes=min((each.estimated_bytes for each in left), default=None),
        least_s=min([*(each.estimated_s for each in small), *far.values()], default=None),
        best_s=best_s,
    )
