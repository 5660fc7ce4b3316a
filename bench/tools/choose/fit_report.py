"""The output of `spbench fit`: the verdict and changes that help, or with `--budget` the chosen switches,
then the parts of the memory, and details."""

import shlex
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from spbench.bench.command_line.output import Output, Table
from spbench.bench.command_line.progress import Progress
from spbench.bench.command_line.record_forms import memory_table
from spbench.bench.errors import UserError
from spbench.bench.measure import given as settings_given
from spbench.bench.measure import past_errors, priced_by_in_words
from spbench.bench.tools.choose import fit_verdict
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.fit_verdict import TABLES
from spbench.bench.tools.choose.fitting import Fitting, fitting
from spbench.bench.tools.choose.subject import experts_line, model_line, taken, taken_line, tokens_of_rank
from spbench.bench.tools.jobs.flag_changes import flag_changes
from spbench.bench.tools.jobs.job_files import given_values


def report(answer: Fitting, files: Sequence[Path], must_fit: bool) -> Output:
    """The answer for people and programs; with ``must_fit`` the exit code is 1 if a cell is not sure to
    fit."""
    fullest, proofs, program = answer.fullest, answer.proofs, answer.subject.job
    backend, meanings = fullest.cell.training.backend, _meanings(answer)
    errors = [each for quantity in ("peak", "reserved") if (each := past_errors(backend, quantity))]
    model, said = model_line(fullest.cell, answer.subject.name), answer.subject.said
    sections: list[Table | str] = [
        "\n".join([*_verdict_lines(answer), TABLES.text("first_change", answer, **meanings)]),
        f"{model}\n{taken_line(fullest.cell, said)}",
    ]
    if len(answer.verdicts) + len(answer.others) > 1:
        sections += [f"the fullest: {fullest.cell.key}", _cells_table(answer)]
    numbers = [{"memory": what, **of} for what, of in TABLES.record("bytes", fullest).items()]
    title = "Memory of the fullest ranks: what is needed decides"
    sections += [*_help(answer), Table(title, numbers, ("GiB", "memory"), below=("of",))]
    lines = TABLES.text("held", fullest), experts_line(fullest.cell), TABLES.text("on_host", fullest)
    sections += filter(None, lines)
    title = f"What holds the peak ({fullest.moment_in(program)})"
    parts = TABLES.table("parts", title, fullest.peak_parts(program))
    # if the fullest does not fit, changes that help take the place of the parts of its memory
    details: list[Table | str] = []
    (sections if fullest.fits else details).append(parts)
    timed = [fullest, *proofs.fitting] if proofs and proofs.fitting else []
    work = priced_by_in_words([each.measurement for each in timed])
    sections += filter(None, [TABLES.text("priced_by", work=work)])
    details.append(memory_table({fullest.cell.key: fullest.measurement}))
    details.append("\n".join(f"beside real machines: {each}" for each in errors))
    details.append(f"not modelled: {'; '.join(TABLES.forms['not_modelled'])}")
    cells = TABLES.records("verdict", answer.verdicts, ranks=fit_verdict.ranks_text)
    cells += [{"cell": cell.key, "fits": None, "reason": reason} for cell, reason in answer.others]
    anatomy = {name: value for name, value in asdict(fullest.anatomy).items() if name != "curve"}
    of_step = {"priced_by": fullest.measurement.get("priced_by") or []}
    content = TABLES.record(
        "fit",
        answer,
        cells=cells,
        detail={"cell": fullest.cell.key, **anatomy, **of_step, "by_class": fullest.measurement["by_class"]},
        errors=[vars(each) for each in errors],
        not_modelled=TABLES.forms["not_modelled"],
        model=model,
        taken={each["what"]: each for each in taken(fullest.cell, said)},
        tokens_of_rank=tokens_of_rank(fullest.cell),
        files=[str(path) for path in files],
        **meanings,
    )
    code = int(must_fit and not answer.surely_fits)
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


def _meanings(answer: Fitting, lack: bool = False) -> dict[str, Callable[[fit_verdict.Verdict], Any]]:
    """The functions of a verdict on a changed cell that forms call; ``lack``: see :func:`flags_of`."""
    plan = answer.plan
    before = plan.before if plan else answer.fullest

    def argument(verdict: fit_verdict.Verdict) -> str:
        """The change in the arguments of the job's program, or else in the words of ``--set``."""
        return flags_of(answer, verdict) or f"--set {shlex.quote(fit_verdict.settings_of(verdict))}"

    return {
        "set": fit_verdict.settings_of,
        "enough": plan.fits if plan else lambda verdict: verdict.measurement["status"] == "ok",
        "price": lambda verdict: verdict.price(before),
        "flags": lambda verdict: flags_of(answer, verdict, lack),
        "argument": argument,
    }


def flags_of(answer: Fitting, verdict: fit_verdict.Verdict, lack: bool = False) -> str:
    """The change in the arguments of the job's program; "" if there are none, but with ``lack`` a sentence on
    what the program lacks."""
    job = answer.subject.job
    flags = flag_changes(answer.fullest.cell, verdict.cell, job) if job else None
    if flags is not None and flags.missing and lack:
        return f"{flags.program.split()[0]} has no {'; no '.join(flags.missing)}"
    return str(flags or "")


def fit(
    subject: Sequence[str],
    cluster: str | None,
    gpus: int | None,
    strategy: str | None,
    micro_batch: int | None,
    changes: Sequence[tuple[str, str]],
    given: Sequence[str],
    where: Sequence[tuple[str, str]],
    variant: str | None,
    suggest: bool,
    longest: bool,
    budget: int | None,
    figure: Path | None,
    snapshot: Path | None,
    must_fit: bool,
    jobs: int | None,
    **sizes: int | None,
) -> Output:
    """The output of `spbench fit`; the arguments are the options of that command, ``sizes`` those of
    --seq-len, --batch and ranks along axes."""
    own = {name if name in ("seq_len", "batch") else f"sizes.{name}": size for name, size in sizes.items()}
    settings = {name: size for name, size in own.items() if size is not None} | settings_given(changes)
    asked = Asked(cluster, gpus, strategy, settings, micro_batch, where, variant, given_values(given))
    if must_fit and longest:
        raise UserError(
            "--must-fit judges the sizes as they are, and --longest looks for others; leave one out"
        )
    with Progress() as progress:

        def verdict_first(answer: Fitting) -> None:
            progress.keep("\n".join(_verdict_lines(answer)))

        answer = fitting(subject, asked, progress.at, jobs, suggest, longest, budget, verdict_first)
    return report(answer, answer.written(figure, snapshot), must_fit)
