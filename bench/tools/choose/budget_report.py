"""What `spbench fit` says of changes in words, and what `spbench fit --budget` says: the switches that were
chosen, and each alone."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

from spbench.bench.command_line.output import Column, Table, records
from spbench.bench.command_line.shown_times import shown_band
from spbench.bench.measure import with_band, written
from spbench.bench.tools.choose.fit_verdict import MEMORY_COLUMNS, Verdict, columns
from spbench.bench.tools.choose.fitting import Fitting
from spbench.bench.tools.choose.under_budget import BudgetPlan
from spbench.bench.tools.jobs.flag_changes import flag_changes
from spbench.bench.units import card_gib, shown_price

#: switches that a terminal shows where no details are asked for
_SHOWN = 4


def plan_line(answer: Fitting, plan: BudgetPlan) -> str:
    """The third line of an answer where a budget is given."""
    within = f"{card_gib(plan.budget_bytes)} GiB"
    chosen = plan.chosen
    if chosen is None:
        return f"no switches need at most {within}: {plan.traced} cells traced; --suggest tries other layouts"
    if not plan.alone:
        return f"no switch is needed for {within}"
    price = shown_price(chosen.price(plan.before) or 1.0)
    flags = flags_of(answer, chosen) or f"--set {shlex.quote(settings_of(chosen))}"
    needs = f"{card_gib(chosen.memory.total_bytes)} GiB"
    return f"for {within} at the least cost: {flags} (needs {needs}, step {price})"


def _switch_columns(answer: Fitting, plan: BudgetPlan) -> list[Column]:
    return [
        Column("--set", "set", of=settings_of),
        Column("needs GiB", "total_bytes", card_gib, attrgetter("memory.total_bytes")),
        Column("step", "step_time_s", of=step_of),
        Column("step, relative", "price", of=lambda verdict: shown_price(verdict.price(plan.before) or 1.0)),
        Column("enough", "fits", of=lambda verdict: "yes" if plan.fits(verdict) else "no"),
    ]


def switches_table(answer: Fitting) -> Iterator[Table]:
    """The switches of a budget, each alone."""
    if (plan := answer.plan) is not None and plan.alone:
        title = f"Switches, each alone, the cheapest first ({plan.traced} cells traced)"
        important = ("needs GiB", "step, relative", "enough", "step")
        columns = _switch_columns(answer, plan)
        yield Table.of(title, columns, plan.alone, important=important, below=("--set",), most=_SHOWN)


def plan_content(answer: Fitting, plan: BudgetPlan) -> dict[str, Any]:
    """The switches of a budget for programs."""
    of_switch = [
        Column("--set", "set", of=settings_of),
        *columns(what="change.words", cell="cell.key"),
        Column("fits", "fits", of=plan.fits),
        *MEMORY_COLUMNS,
        *columns(step_time_s="step_s"),
        Column("price", "relative_step_time", of=lambda verdict: verdict.price(plan.before)),
        Column("flags", "flags", of=lambda verdict: flags_of(answer, verdict)),
    ]
    return {
        "budget_bytes": plan.budget_bytes,
        "chosen": next(iter(records(of_switch, [plan.chosen] if plan.chosen else [])), None),
        "alone": records(of_switch, plan.alone),
        "traced": plan.traced,
    }


def settings_of(verdict: Verdict) -> str:
    return written(verdict.change.settings) if verdict.change else ""


def flags_of(answer: Fitting, verdict: Verdict, lack: bool = False) -> str:
    """The change in the job's own arguments; "" where there are none, or with ``lack`` what the program has
    not."""
    job = answer.subject.job
    flags = flag_changes(answer.fullest.cell, verdict.cell, job) if job else None
    if flags is not None and flags.missing and lack:
        return f"{flags.program.split()[0]} has no {'; no '.join(flags.missing)}"
    return str(flags or "")


def step_of(verdict: Verdict) -> str:
    row = {"cell": verdict.cell.model_dump(), "measurement": verdict.measurement}
    return shown_band(with_band(row)["measurement"]) or "not timed"
