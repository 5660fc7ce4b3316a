"""`spbench fit`: verdicts on its cells, changes that help the fullest cell, and the largest sizes; and its
output: the verdict and changes that help, or with `--budget` the chosen switches, then the parts of the
memory, and details."""

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from spbench.bench import measure
from spbench.bench.cell import Cell, SearchRequest
from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import Progress
from spbench.bench.command_line.record_forms import memory_table
from spbench.bench.errors import UserError
from spbench.bench.files import cache_folder
from spbench.bench.measurement import Outcome
from spbench.bench.tools.choose.anatomy import write_snapshot
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.asking import Asking, Say, Task, within
from spbench.bench.tools.choose.fit_verdict import TABLES, Verdict, ranks_text
from spbench.bench.tools.choose.look import attempt, examine, trace_stage
from spbench.bench.tools.choose.proofs import ENOUGH, MOST, BudgetPlan, Proofs, plan_budget, prove
from spbench.bench.tools.choose.subject import Subject, subject, taken, text_on, tokens_of_rank
from spbench.bench.tools.jobs.flag_changes import flag_changes
from spbench.bench.tools.jobs.job import beside_peak
from spbench.plots.style import length_text, model_name, strategy_name

#: share of the progress that tracing the cells makes, if changes are tried afterwards
_EXAMINED = 0.4
#: settings that define the training job, whatever its layout
_OF_THE_JOB = ("precision", "model_options")


@dataclass(frozen=True)
class Fitting:
    """The answer whether cells fit, with the changes that would help.

    Attributes:
        verdicts: one for each cell that can run.
        others: cells that cannot run, with the reasons.
        proofs: changes of the fullest cell; None: not asked for.
        sizes: the result of :func:`largest`; None: not asked for.
        plan: switches of the fullest cell for a budget; None: not asked for.
        advise: the command line that searches for another layout.
    """

    subject: Subject
    verdicts: Sequence[Verdict]
    others: Sequence[tuple[Cell, str]] = ()
    proofs: Proofs | None = None
    sizes: Mapping[str, int | None] | None = None
    plan: BudgetPlan | None = None
    advise: str = ""

    @property
    def fullest(self) -> Verdict:
        """The verdict with the least spare bytes of cells that do not fit, else of tight ones, else of
        all."""
        return min(
            self.verdicts,
            key=lambda each: (each.fits, each.certainty.word == "fits", each.memory.spare_bytes),
        )

    @property
    def fits(self) -> bool:
        """Whether every cell can run and fits."""
        return not self.others and self.fullest.fits

    def written(self, figure: Path | None, snapshot: Path | None) -> list[Path]:
        """Write a figure and a snapshot of the fullest ranks to the paths, unless None; returns the paths."""
        at, files = self.fullest, []
        if figure is not None:
            from spbench.plots.fit_and_advise import draw_memory  # matplotlib, which takes half a second

            usable = at.measurement["usable_memory_bytes"]
            batch, length = at.cell.shape
            shape = f"batch {batch}, sequence length {length_text(length)}, {at.cell.precision}"
            layout = f"{strategy_name(at.cell.strategy)}, {at.cell.mesh_text}"
            title = f"{model_name(at.cell.model)} on {at.cell.cluster}: {layout}, {shape}"
            files.append(draw_memory(asdict(at.anatomy), usable, title, figure))
        if snapshot is not None:
            files.append(write_snapshot(at.cell, at.anatomy.ranks[0], snapshot))
        return files


def fitting(
    words: Sequence[str],
    asked: Asked,
    say: Say,
    jobs: int | None,
    suggest: bool,
    longest: bool,
    budget_bytes: int | None = None,
    keep: Callable[[str], None] = lambda text: None,
) -> Fitting:
    """Examine the cells that command-line words name, and try what would help.

    Args:
        words, asked: the arguments of :func:`subject`.
        say: takes the current work in words, and the share of all work that is done.
        jobs: how many workers; None: one for each usable core.
        suggest: try more changes, even if the fullest cell fits.
        longest: search for the largest sizes.
        budget_bytes: bytes that the fullest rank may need, for which switches are chosen; None: no budget.
        keep: takes the lines on the fullest cell before changes or sizes are tried.

    Raises:
        UserError: the words name nothing, or no cell can run.
    """
    about = subject(words, asked)
    with Asking(jobs) as asking:
        examined = [*_examined(about, asking, within(say, 0, _EXAMINED))]
        verdicts = [Verdict(cell, outcome.measurement) for cell, outcome in examined if outcome.measurement]
        others = [(cell, outcome.reason) for cell, outcome in examined if not outcome.measurement]
        if not verdicts:
            raise UserError("{.key}: {}".format(*others[0]))
        answer = Fitting(about, verdicts, others)
        fullest, proofs, sizes, plan = answer.fullest, None, None, None
        if suggest or longest or budget_bytes is not None or not fullest.fits:
            keep("\n".join(_verdict_lines(answer)))
        if budget_bytes is not None:
            plan = plan_budget(fullest.cell, budget_bytes, asking, within(say, _EXAMINED, 1))
        elif suggest or not fullest.fits:
            proofs = prove(fullest, asking, MOST if suggest else ENOUGH, within(say, _EXAMINED, 1))
        if longest:
            behind = _EXAMINED if proofs is None else 1.0
            say("looking for the longest length and the largest micro-batch", behind)
            sizes = largest(fullest.cell, asking)
    command = advise_command(words, fullest.cell, asked)
    return replace(answer, proofs=proofs, sizes=sizes, plan=plan, advise=command)


def largest(cell: Cell, asking: Asking) -> dict[str, int | None]:
    """Search for the largest ``seq_len`` and ``micro_batch`` that fit, each with all other settings as they
    are, and proved by a trace that fits and one that does not; ``batch`` is the global batch in micro-batches
    of ``micro_batch``. None: not even the smallest fits, or the size cannot be searched for."""
    searches = {
        each: cell.model_copy(update={each: None, "search": SearchRequest(quantity=each)})
        for each in ("seq_len", "batch")
    }
    tasks = [Task(each, attempt) for each in searches.values()]
    answers = {task.cell.key: outcome.measurement.get("answer") for task, outcome in asking(tasks)}
    seq_len, batch = (answers[each.key] for each in searches.values())
    micro_batch = batch and batch // (cell.sizes.dp * cell.training.micro_batches)
    return {"seq_len": seq_len, "micro_batch": micro_batch, "batch": batch}


def advise_command(words: Sequence[str], cell: Cell, asked: Asked) -> str:
    """The command line that searches for the fastest layout to train a cell's model, on as many GPUs.

    Args:
        words: the words with which the cell was asked about.
        asked: the options of that command line, of which the model's options and the precision are kept.
    """
    batch, seq_len = cell.shape
    own = {name: value for name, value in asked.settings.items() if name.split(".")[0] in _OF_THE_JOB}
    options = [*(("--model", word) for word in words), ("--cluster", cell.cluster)]
    sizes = {"--gpus": cell.sizes.world, "--seq-len": seq_len, "--batch": batch}
    options += [(flag, str(size)) for flag, size in sizes.items()]
    options += [("--given", f"{name}={value}") for name, value in asked.given.items()]
    options += [("--set", measure.written(own))] if own else []
    return shlex.join(["spbench", "advise", *(word for option in options for word in option)])


def _examined(about: Subject, asking: Asking, say: Say) -> Iterator[tuple[Cell, Outcome]]:
    """Each cell with its outcome, in the order of the subject's cells."""
    cells = about.cells
    tasks = [Task(cell, examine) for cell in cells]
    beside = stages_beside(cells, asking.jobs)
    say(f"tracing a step of {text_on('model', cells[0], about.name)}{text_on('slow', cells[0])}", 0)
    outcomes: dict[str, Outcome] = {}
    for task, outcome in asking([*beside[:1], *tasks, *beside[1:]]):
        if task.run is examine:  # it reads the traces of stages, or meets their errors
            outcomes[task.cell.key] = outcome
            say(f"{about.shown(task.cell)}: {outcome.status}", len(outcomes) / len(cells))
            if outcome.status in ("failed", "timeout"):
                raise RuntimeError(f"{task.cell.key}: {outcome.reason}")
    yield from ((cell, outcomes[cell.key]) for cell in cells)


def stages_beside(cells: Sequence[Cell], jobs: int) -> list[Task]:
    """Tasks that trace single pipeline stages at the same time as the whole cells: each trace is kept on
    disk, where the worker that examines the whole cell reads it. There are none if the cells occupy all
    workers, or if no cache is kept.

    The tasks are the second stage, the last, and the last but one, because an examination begins with the
    first. The second traces most micro-batches, so it comes first. Other stages are traced in few of these.
    """
    if len(cells) >= jobs or cache_folder() is None:
        return []
    return [
        Task(cell.model_copy(), partial(trace_stage, stage=stage))
        for cell in cells
        for stage in dict.fromkeys((1, cell.sizes.pp - 1, cell.sizes.pp - 2))
        if 0 < stage < cell.sizes.pp
    ]


def report(answer: Fitting, files: Sequence[Path], must_fit: bool, beside: Sequence[Any] = ()) -> Output:
    """The answer for people and programs, with records of :func:`beside_peak` on the fullest cell; with
    ``must_fit`` the exit code is 1 if a cell is not sure to fit."""
    fullest, proofs, program = answer.fullest, answer.proofs, answer.subject.job
    backend, meanings = fullest.cell.training.backend, _meanings(answer)
    errors = [*filter(None, (measure.past_errors(backend, quantity) for quantity in ("peak", "reserved")))]
    model, said = text_on("model", fullest.cell, answer.subject.name), answer.subject.said
    sections: list[Table | str] = [
        "\n".join([*_verdict_lines(answer), TABLES.text("first_change", answer, **meanings)]),
        *(each["words"] for each in beside),
        f"{model}\n{text_on('taken', fullest.cell, said=said)}",
    ]
    if len(answer.verdicts) + len(answer.others) > 1:
        sections += [f"the fullest: {fullest.cell.key}", _cells_table(answer)]
    numbers = [{"memory": what, **of} for what, of in TABLES.record("bytes", fullest).items()]
    title = "Memory of the fullest ranks: what is needed decides"
    sections += [*_help(answer), Table(title, numbers, ("GiB", "memory"), below=("of",))]
    lines = TABLES.text("held", fullest), text_on("experts", fullest.cell), TABLES.text("on_host", fullest)
    sections += filter(None, lines)
    title = f"What holds the peak ({fullest.moment_in(program)})"
    # if the fullest does not fit, changes that help take the place of the parts of its memory
    details: list[Table | str] = []
    (sections if fullest.fits else details).append(TABLES.table("parts", title, fullest.peak_parts(program)))
    timed = [fullest, *proofs.fitting] if proofs and proofs.fitting else []
    work = measure.priced_by_in_words([each.measurement for each in timed])
    sections += filter(None, [TABLES.text("priced_by", work=work)])
    details.append(memory_table({fullest.cell.key: fullest.measurement}))
    details.append("\n".join(f"beside real machines: {each}" for each in errors))
    details.append(f"not modelled: {'; '.join(TABLES.forms['not_modelled'])}")
    cells = TABLES.records("verdict", answer.verdicts, ranks=ranks_text)
    cells += [{"cell": cell.key, "fits": None, "reason": reason} for cell, reason in answer.others]
    anatomy = {name: value for name, value in asdict(fullest.anatomy).items() if name != "curve"}
    of_step = {"priced_by": fullest.measurement.get("priced_by") or []}
    lists = {"errors": [vars(e) for e in errors], "files": [*map(str, files)], "measured": beside}
    content = TABLES.record(
        "fit",
        answer,
        cells=cells,
        detail={"cell": fullest.cell.key, **anatomy, **of_step, "by_class": fullest.measurement["by_class"]},
        not_modelled=TABLES.forms["not_modelled"],
        model=model,
        taken={each["what"]: each for each in taken(fullest.cell, said)},
        tokens_of_rank=tokens_of_rank(fullest.cell),
        **lists,
        **meanings,
    )
    fits_surely = answer.fits and all(each.certainty.word == "fits" for each in answer.verdicts)  # none tight
    code = int(must_fit and not fits_surely)
    return Output(sections, content, cells, (), answer.subject.remarks, files, code, details)


def _verdict_lines(answer: Fitting) -> Iterator[str]:
    """Lines on the fullest cell: whether it fits and by how much, why that is unsure, and its peak."""
    texts = (TABLES.text(n, answer.fullest, program=answer.subject.job) for n in ("fits", "tight", "peak"))
    return filter(None, texts)


def _cells_table(answer: Fitting) -> Table:
    table = TABLES.table("cells", "Which cells fit", answer.verdicts, program=answer.subject.job)
    others = [
        dict(zip(table.lines[0], (c.key, "-", "", "", reason), strict=True)) for c, reason in answer.others
    ]
    return replace(table, lines=[*table.lines, *others])


def _help(answer: Fitting) -> Iterator[Table | str]:
    """The sections on changes that help, on the largest sizes that fit, and on the switches that were tried
    for a budget, each alone."""
    meanings = _meanings(answer, lack=True)
    if (proofs := answer.proofs) is not None:
        if proofs.fitting:
            what = "take less memory" if answer.fullest.fits else "make it fit"
            title = f"Changes that {what}, the fastest first ({TABLES.text('tried', proofs)})"
            yield TABLES.table("changes", title, proofs.fitting, **meanings)
        elif proofs.closest is not None:
            yield TABLES.text("closest", proofs.closest, **meanings)
        yield f"for another layout: {answer.advise}"
    if answer.sizes is not None:
        yield TABLES.text("largest", answer)
    if (plan := answer.plan) is not None and plan.alone:
        title = f"Switches, each alone, the cheapest first ({plan.traced} cells traced)"
        yield TABLES.table("switches", title, plan.alone, **meanings)


def _meanings(answer: Fitting, lack: bool = False) -> dict[str, Callable[[Verdict], Any]]:
    """The functions of a verdict on a changed cell that forms call; ``lack``: see :func:`flags_of`."""
    plan = answer.plan
    before = plan.before if plan else answer.fullest

    def argument(verdict: Verdict) -> str:
        """The change in the arguments of the job's program, or else in the words of ``--set``."""
        return flags_of(answer, verdict) or f"--set {shlex.quote(verdict.settings)}"

    return {
        "enough": plan.fits if plan else lambda verdict: verdict.measurement["status"] == "ok",
        "price": lambda verdict: verdict.price(before),
        "flags": lambda verdict: flags_of(answer, verdict, lack),
        "argument": argument,
    }


def flags_of(answer: Fitting, verdict: Verdict, lack: bool = False) -> str:
    """The change in the arguments of the job's program; "" if there are none, but with ``lack`` a sentence on
    what the program lacks."""
    job = answer.subject.job
    flags = flag_changes(answer.fullest.cell, verdict.cell, job) if job else None
    if flags is not None and flags.missing and lack:
        return f"{flags.program.split()[0]} has no {'; no '.join(flags.missing)}"
    return str(flags or "")


def fit(
    subject: Sequence[str],
    suggest: bool,
    longest: bool,
    budget: int | None,
    figure: Path | None,
    snapshot: Path | None,
    must_fit: bool,
    measured: Sequence[str],
    jobs: int | None,
    **options: Any,
) -> Output:
    """The output of `spbench fit`; the arguments are the options of that command, ``options`` those of
    :meth:`Asked.of`."""
    asked = Asked.of(**options)
    if must_fit and longest:
        raise UserError("--must-fit judges the sizes as they are, and --longest looks for others: give one")
    with Progress() as progress:
        answer = fitting(subject, asked, progress.at, jobs, suggest, longest, budget, progress.keep)
    said = beside_peak(answer.fullest.cell, measured) if measured else []
    return report(answer, answer.written(figure, snapshot), must_fit, said)
