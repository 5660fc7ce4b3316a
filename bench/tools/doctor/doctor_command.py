"""`spbench doctor`: what works on this machine, and what to do about the rest."""

from dataclasses import asdict

import click

from spbench.bench.command_line.options import WORDS, many, printed
from spbench.bench.command_line.output import Output, Table
from spbench.bench.errors import refuse_unknown
from spbench.bench.tools.doctor import device_checks, diagnosis
from spbench.bench.tools.doctor.diagnosis import Check, Observation, diagnose

#: the checks by name, in the order of the diagnosis
CHECKS = {
    "python": Check(diagnosis.python, is_needed=True),
    "packages": Check(diagnosis.packages, is_needed=True),
    "py-spy": Check(diagnosis.py_spy),
    "torch": Check(diagnosis.torch, is_needed=True),
    "triton": Check(diagnosis.triton, limit_s=120),
    "driver": Check(device_checks.driver),
    "cuda": Check(device_checks.cuda, limit_s=180),
    "virtual": Check(device_checks.virtual_ranks, is_needed=True, limit_s=120),
    "distributed": Check(device_checks.real_ranks, is_needed=True, limit_s=120),
    "disk": Check(diagnosis.disks, is_needed=True),
    "shared-memory": Check(diagnosis.shared_memory),
    "open-files": Check(diagnosis.open_files),
    "machine": Check(diagnosis.machine),
}


@click.command("doctor")
@many("--check", WORDS, "Only these checks; by default all.")
@printed
def command(check: tuple[str, ...]) -> Output:
    """Say what works on this machine, and how to mend the rest.

    The command checks Python, torch, CUDA, GPUs, ranks and disks. It exits with 1 if virtual ranks, or real
    ranks on CPUs, cannot run. Each check runs in its own process with a time limit.
    """
    for name in check:
        refuse_unknown("unknown check", name, CHECKS)
    diagnosis = diagnose({name: CHECKS[name] for name in check or CHECKS})
    lines = [{key: value for key, value in asdict(line).items() if key != "is_needed"} for line in diagnosis]
    broken = [line.subject for line in diagnosis if line.is_needed and line.status == "missing"]
    return Output(
        [Table("Diagnosis", lines, ("subject", "status", "found"), ("found", "remedy"))],
        {"works": not broken, "observations": [asdict(line) for line in diagnosis]},
        [asdict(line) for line in diagnosis],
        notes=[_summary(diagnosis, broken)],
        code=int(bool(broken)),
    )


def _summary(diagnosis: list[Observation], broken: list[str]) -> str:
    if broken:
        return f"needed and not working: {', '.join(broken)}; next: mend these, and run spbench doctor again"
    others = sum(line.status != "ok" for line in diagnosis)
    remarks = f"; {others} remark{'s' * (others > 1)}" if others else ""
    return f"nothing that is needed is missing{remarks}; next: spbench run --scenario max_seqlen"
