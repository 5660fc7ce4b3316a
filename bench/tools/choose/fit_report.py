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
from spbench.bench.measure import PEAK, RESERVED, past_errors, priced_by_in_words
from spbench.bench.measure import given as settings_given
from spbench.bench.tools.choose import fit_verdict
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.fit_verdict import TABLES
from spbench.bench.tools.choose.fitting import Fitting, fitting
from spbench.bench.tools.choose.proofs import BudgetPlan, Proofs
from spbench.bench.tools.choose.subject import experts_line, model_line, taken, taken_line, tokens_of_rank
from spbench.bench.tools.jobs.flag_changes import flag_changes
from spbench.bench.tools.jobs.job_files import given_values
from spbench.bench.units import card_gib, shown_price
from spbench.impls import model_preset

#: kinds of memory with a smaller share of the peak are not named
_SMALL = 0.002


def report(answer: Fitting, files: Sequence[Path], must_fit: bool) -> Output:
    """The answer for people and programs; with ``must_fit`` the exit code is 1 if a cell is not sure to
    fit."""
    fullest, proofs = answer.fullest, answer.proofs
    backend = fullest.cell.training.backend
    errors = [each for quantity in (PEAK, RESERVED) if (each := past_errors(backend, quantity))]
    sections: list[Table | str] = []
    details: list[Table | str] = []
    program = answer.subject.job
    sections.append("\n".join([*_verdict_lines(answer), _first_change(answer)]))
    model, said = model_line(fullest.cell, answer.subject.name), answer.subject.said
    sections.append(f"{model}\n{taken_line(fullest.cell, said)}")
    if len(answer.verdicts) + len(answer.others) > 1:
        sections += [f"the fullest: {fullest.cell.key}", _cells_table(answer)]
    sections += [*_help(answer), *_switches_table(answer), *_holding(fullest)]
    # if the fullest does not fit, changes that help take the place of the parts of its memory
    (sections if fullest.fits else details).append(_parts(fullest, program))
    timed = [fullest, *proofs.fitting] if proofs and proofs.fitting else []
    if priced_by := priced_by_in_words([each.measurement for each in timed]):
        sections.append(f"priced by something else, with shares of the step: {priced_by}")
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
        **_meanings(answer),
    )
    code = int(must_fit and not answer.surely_fits)
    return Output(sections, content, cells, (), answer.subject.remarks, files, code, details)


def _verdict_lines(answer: Fitting) -> list[str]:
    """Lines on the fullest cell: whether it fits and by how much, why that is unsure, and its peak."""
    fullest = answer.fullest
    because = [f"tight, as {reason}" for reason in filter(None, [fullest.certainty.reason])]
    return [str(fullest), *because, fullest.peak_line(answer.subject.job)]


# -- what is there -------------------------------------------------------------------------------------------


def _cells_table(answer: Fitting) -> Table:
    table = TABLES.table("cells", "Which cells fit", answer.verdicts, program=answer.subject.job)
    others = [
        dict(zip(table.lines[0], (c.key, "-", "", "", reason), strict=True)) for c, reason in answer.others
    ]
    return replace(table, lines=[*table.lines, *others])


def _holding(verdict: fit_verdict.Verdict) -> Iterator[Table | str]:
    """The sections on needed bytes, next to the numbers that other tools show, and on the peak by kind."""
    anatomy, memory = verdict.anatomy, verdict.memory
    context, nccl = (
        "unknown" if nbytes is None else card_gib(nbytes)
        for nbytes in (memory.context_bytes, memory.nccl_bytes)
    )
    least = f"least of PyTorch {card_gib(memory.tensors_bytes)}, CUDA context {context}, NCCL {nccl}"
    numbers = (
        ("needed", memory.total_bytes, least),
        ("allocated", anatomy.peak_memory_bytes, "torch.cuda.max_memory_allocated"),
        ("reserved", anatomy.reserved_memory_bytes, "torch.cuda.max_memory_reserved where room is ample"),
        ("nvidia-smi", verdict.shown_by_nvidia_smi, "reserved on this card, CUDA context, NCCL"),
    )
    lines = [{"memory": what, "GiB": card_gib(nbytes), "of": meaning} for what, nbytes, meaning in numbers]
    title = "Memory of the fullest ranks: what is needed decides"
    yield Table(title, lines, ("GiB", "memory"), below=("of",))
    shown = ((name, n) for name, n in anatomy.held.items() if n > _SMALL * anatomy.peak_memory_bytes)
    held = ", ".join(f"{name.replace('_', ' ')} {card_gib(n)}" for name, n in shown)
    yield f"allocated at the peak: {held}"
    yield from filter(None, [experts_line(verdict.cell), verdict.on_host()])


def _parts(verdict: fit_verdict.Verdict, program: str) -> Table:
    """A table of the peak's parts: tensors by kind and by the module whose forward or backward made them."""
    peak = verdict.anatomy.peak_memory_bytes
    experts = bool(getattr(model_preset(*verdict.cell.model_arguments), "experts", 0))
    title = f"What holds the peak ({verdict.moment_in(program)})"
    meanings = {"words": fit_verdict.in_program_words, "of": fit_verdict.part_of_experts}
    about = {"program": program, "peak": peak, "experts": experts}
    return TABLES.table("parts", title, verdict.anatomy.parts, **meanings, **about)


# -- what would help -----------------------------------------------------------------------------------------


def _first_change(answer: Fitting) -> str:
    """The third line of an answer: the fastest change that makes the cell fit, or saves memory."""
    proofs = answer.proofs
    if answer.plan is not None:
        return _plan_line(answer, answer.plan)
    if proofs is None:
        return "no change is needed; --suggest tries those that take less memory"
    if not proofs.fitting:
        what = "takes less memory" if answer.fullest.fits else "makes it fit"
        return f"no change {what}: {_tried(proofs)}"
    first = proofs.fitting[0]
    price = _price(answer, first)
    room = f"{card_gib(first.memory.spare_bytes)} GiB to spare" + (f", step {price}" if price else "")
    what = "takes less memory" if answer.fullest.fits else "makes it fit"
    return f"{what}: {_flags_or_settings(answer, first)} ({room})"


def _plan_line(answer: Fitting, plan: BudgetPlan) -> str:
    """The third line of an answer for a budget: the cheapest switches, or why there are none."""
    chosen, within = plan.chosen, f"{card_gib(plan.budget_bytes)} GiB"
    if chosen is None:
        return f"no switches need at most {within}: {plan.traced} cells traced; --suggest tries other layouts"
    if not plan.alone:
        return f"no switch is needed for {within}"
    price = shown_price(chosen.price(plan.before) or 1.0)
    flags = _flags_or_settings(answer, chosen)
    needs = f"{card_gib(chosen.memory.total_bytes)} GiB"
    return f"for {within} at the least cost: {flags} (needs {needs}, step {price})"


def _flags_or_settings(answer: Fitting, verdict: fit_verdict.Verdict) -> str:
    """A change in the arguments of the job's program, or else in the words of ``--set``."""
    return flags_of(answer, verdict) or f"--set {shlex.quote(fit_verdict.settings_of(verdict))}"


def _switches_table(answer: Fitting) -> Iterator[Table]:
    """A table of the switches that were tried for a budget, each alone."""
    if (plan := answer.plan) is None or not plan.alone:
        return
    title = f"Switches, each alone, the cheapest first ({plan.traced} cells traced)"
    yield TABLES.table("switches", title, plan.alone, **_meanings(answer))


def _price(answer: Fitting, verdict: fit_verdict.Verdict) -> str | None:
    ratio = verdict.price(answer.fullest)
    return shown_price(ratio) if ratio else None


def _tried(proofs: Proofs) -> str:
    pairs = f" and {proofs.pairs_tried} pairs of them" if proofs.pairs_tried else ""
    return f"{proofs.tried} single ones{pairs} tried"


def _help(answer: Fitting) -> Iterator[Table | str]:
    """The sections on changes that help, and on the largest sizes that fit."""
    if (proofs := answer.proofs) is not None:
        what = "take less memory" if answer.fullest.fits else "make it fit"
        if proofs.fitting:
            title = f"Changes that {what}, the fastest first ({_tried(proofs)})"
            yield TABLES.table("changes", title, proofs.fitting, **_meanings(answer, lack=True))
        elif proofs.closest is not None:
            yield _closest(answer, proofs.closest)
        yield f"for another layout: {answer.advise}"
    if (sizes := answer.sizes) is not None:
        batch = f" (batch {sizes['batch']})" if sizes["micro_batch"] else ""
        yield (
            f"the longest length that fits: {sizes['seq_len'] or 'none'}; "
            f"the largest micro-batch: {sizes['micro_batch'] or 'none'}{batch}; each with all else as it is"
        )


def _closest(answer: Fitting, near: fit_verdict.Verdict) -> str:
    price = _price(answer, near)
    needs = f"{card_gib(near.memory.total_bytes)} GiB" + (f" and {price} of the step's time" if price else "")
    return f"the closest change, --set {fit_verdict.settings_of(near)}, needs {needs}: set it and ask again"


def _meanings(answer: Fitting, lack: bool = False) -> dict[str, Callable[[fit_verdict.Verdict], Any]]:
    """The functions of a verdict on a changed cell that tables call; ``lack``: see :func:`flags_of`."""
    plan = answer.plan
    before = plan.before if plan else answer.fullest
    return {
        "set": fit_verdict.settings_of,
        "enough": plan.fits if plan else lambda verdict: verdict.measurement["status"] == "ok",
        "price": lambda verdict: verdict.price(before),
        "flags": lambda verdict: flags_of(answer, verdict, lack),
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
