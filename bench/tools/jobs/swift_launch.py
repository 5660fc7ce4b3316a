"""How ms-swift starts a tuning, by transformers or by Megatron-Core."""

from __future__ import annotations

import re
from collections.abc import Mapping

from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.launch import Launch, launched
from spbench.bench.tools.jobs.program_files import script_of

#: variables that say how many processes there are
PROCESSES = ("NPROC_PER_NODE", "NNODES")
#: characters of their values
_MOST_DIGITS = 11


def tuning_of(files: JobFiles, program: str) -> Launch | None:
    """The command `PROGRAM sft` or `PROGRAM pt` of the script; None where there is none.

    Raises:
        UserError: the script cannot be read, or has several such commands.
    """
    script = script_of(files)
    launch = launched(script, re.compile(program), files.environment) if script else None
    return launch if launch and launch.arguments and launch.arguments[0] in ("sft", "pt") else None


def gpus_of(environment: Mapping[str, str]) -> int | None:
    """GPUs that it starts processes for; None where the variables are no numbers."""
    each, nodes = (environment.get(name, "1") for name in PROCESSES)
    counted = each.isdecimal() and nodes.isdecimal() and len(each + nodes) <= _MOST_DIGITS
    return int(each) * int(nodes) if counted else None
