"""`spbench doctor`: what works on this machine, and what to do about the rest."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING

import click

from spbench.bench.command_line.options import WORDS, many, printed
from spbench.bench.command_line.output import Output, Table

if TYPE_CHECKING:
    from spbench.bench.tools.doctor.check import Observation


@click.command("doctor")
@many("--check", WORDS, "Only these checks; all if left out.")
@printed
def command(check: tuple[str, ...]) -> Output:
    """Say what works on this machine, and how to mend the rest.

    It looks at Python, torch, CUDA, GPUs, ranks and disks. Exit code 1 if virtual ranks, or real ranks on
    CPUs, cannot run. Each check runs in a process of its own with a time limit.
    """
    from spbench.bench.errors import UserError, suggestion
    from spbench.bench.tools.doctor.check import checks, diagnose

    known = checks()
    if unknown := [name for name in check if name not in known]:
        raise UserError(f"unknown check {unknown[0]!r}{suggestion(unknown[0], known)}")
    found = diagnose({name: known[name] for name in check or known})
    lines = [{key: value for key, value in asdict(line).items() if key != "is_needed"} for line in found]
    broken = [line.subject for line in found if line.is_needed and line.status == "missing"]
    return Output(
        [Table("Diagnosis", lines, ("subject", "status", "found"), ("found", "remedy"))],
        {"works": not broken, "observations": [asdict(line) for line in found]},
        [asdict(line) for line in found],
        notes=[_summary(found, broken)],
        code=int(bool(broken)),
    )


def _summary(found: list[Observation], broken: list[str]) -> str:
    if broken:
        return f"needed and not working: {', '.join(broken)}"
    others = sum(line.status != "ok" for line in found)
    remarks = f"; {others} remark{'s' * (others > 1)}" if others else ""
    return f"nothing that is needed is missing{remarks}"
