"""How ms-swift starts a tuning, by transformers or by Megatron-Core."""

from __future__ import annotations

import re
from dataclasses import replace

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.launch import Launch, launched
from spbench.bench.tools.jobs.program_files import script_of
from spbench.bench.tools.jobs.transformers_step import Said

#: variables that say how many processes there are
PROCESSES = ("NPROC_PER_NODE", "NNODES")
#: by options of ms-swift 3 and 2: those of today
_OLDER = {"--train_type": "--tuner_type", "--sft_type": "--tuner_type"}
#: what it starts
_KINDS = ("sft", "pt")
#: characters of their values
_MOST_DIGITS = 11


def tuning_of(files: JobFiles, program: str) -> Launch | None:
    """The command `PROGRAM sft` or `PROGRAM pt` of the script; None where there is none.

    Raises:
        UserError: the script cannot be read, or has several such commands.
    """
    launch = _launch_of(files, program)
    return launch and replace(launch, arguments=[_of_today(word) for word in launch.arguments])


def _of_today(word: str) -> str:
    name, equals, value = word.partition("=")
    return f"{_OLDER.get(name, name)}{equals}{value}"


def _launch_of(files: JobFiles, program: str) -> Launch | None:
    script = script_of(files)
    if script is None:
        return None
    launch = launched(script, re.compile(program), files.environment, _KINDS)
    if launch is None and program == "swift" and "accelerate launch" not in script.text:  # that has a reader
        launch = launched(script, re.compile(r"swift/cli/(sft|pt)\.py"), files.environment)
        return launch and replace(launch, arguments=["sft", *launch.arguments])
    return launch


def gpus_of(launch: Launch) -> int | None:
    """GPUs that it starts processes for; None where the variables are no numbers."""
    if launch.program.endswith(".py"):
        return launch.gpus
    environment = launch.environment
    each, nodes = (environment.get(name, "1") for name in PROCESSES)
    counted = each.isdecimal() and nodes.isdecimal() and len(each + nodes) <= _MOST_DIGITS
    return int(each) * int(nodes) if counted else None


def named_modules(k: Account, name: str) -> Said:
    """The names of modules that an option has: a pattern has signs that names have not."""
    value = k.value(name)
    names = value.split() if isinstance(value, str) and re.fullmatch(r"[\w. -]+", value) else value
    return Said(names, k.given_of(name))
