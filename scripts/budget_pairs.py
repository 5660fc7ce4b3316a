"""Compare what `spbench fit --budget` chooses with every switch and every pair of switches.

    python scripts/budget_pairs.py            # all jobs
    python scripts/budget_pairs.py 70b        # jobs whose model's name has this text

Each job is answered first; then every pair of its switches that go together is traced. The printed seconds
are only of the answer; set SPBENCH_CACHE to nothing, so that no trace is read from disk.
"""

import itertools
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.asking import Asking
from spbench.bench.tools.choose.fit_verdict import Verdict
from spbench.bench.tools.choose.proofs import BudgetPlan, Tried, plan_budget
from spbench.bench.tools.choose.subject import subject
from spbench.bench.tools.choose.suggestions import as_one, switches
from spbench.bench.units import GIB


class Job(NamedTuple):
    """A job on dgx-h100, with the GiB of memory of its budget."""

    model: str
    strategy: str
    gpus: int
    settings: dict[str, Any]
    gib: int


JOBS = [
    Job("llama3-8b", "ulysses", 8, {"seq_len": 131072, "sizes.sp": 8}, 78),
    Job(
        "llama3-70b",
        "megatron_sp",
        64,
        {
            "seq_len": 32768,
            "sizes.tp": 8,
            "strategy_options.vocabulary": "split",
            "training.backend": "zero3",
        },
        30,
    ),
    Job("Qwen/Qwen3-30B-A3B", "ulysses", 16, {"seq_len": 65536, "sizes.sp": 8, "sizes.ep": 8}, 78),
]


@dataclass(frozen=True)
class BesidePairs:
    """The answer for a job, and the verdicts on all pairs of its switches.

    Attributes:
        seconds: the seconds that the answer took.
        pairs: the verdicts on all pairs that can be run.
        fitting: the single switches and pairs that fit, in ascending step time.
    """

    plan: BudgetPlan
    seconds: float
    pairs: Sequence[Verdict]
    fitting: Sequence[Verdict]


def beside_pairs(job: Job) -> BesidePairs:
    """Answer a job, and trace all pairs of its switches."""
    asked = Asked("dgx-h100", job.gpus, job.strategy, job.settings)
    (cell,) = subject([job.model], asked).cells
    start = time.perf_counter()
    with Asking() as asking:
        plan = plan_budget(cell, job.gib * GIB, asking)
    seconds = time.perf_counter() - start
    with Asking() as asking:
        pairs = Tried(cell, asking).trace(as_one(itertools.combinations(switches(cell), 2)))
    fitting = filter(plan.fits, [*plan.alone, *pairs])
    return BesidePairs(plan, seconds, pairs, sorted(fitting, key=_step_s))


def _step_s(verdict: Verdict) -> float:
    return verdict.step_s or float("inf")


def main() -> int:
    wanted = "".join(sys.argv[1:]).lower()
    for job in JOBS:
        if wanted not in job.model.lower():
            continue
        beside = beside_pairs(job)
        plan, whole = beside.plan, beside.plan.before.step_s or 1.0
        print(
            f"{job.model}, {job.gib} GiB: {plan.traced} traced in {beside.seconds:.0f} s; "
            f"{len(beside.pairs)} pairs, {len(beside.fitting)} of these and of "
            f"{len(plan.alone)} alone fit"
        )
        for name, each in [("chosen", plan.chosen), *(("next", each) for each in beside.fitting[:3])]:
            if each is not None and each.change is not None:
                needed, more = each.memory.total_bytes / GIB, _step_s(each) / whole - 1
                print(f"  {name}: {needed:.1f} GiB, step {more:+.2%}: {dict(each.change.settings)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
