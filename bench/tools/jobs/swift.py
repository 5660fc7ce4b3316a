"""Jobs of ms-swift: a script that starts `swift sft` or `swift pt`; and how ms-swift starts a
tuning, by transformers or by Megatron-Core.
"""

from __future__ import annotations

import re
from dataclasses import replace

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.launch import Launch, launched, options_of
from spbench.bench.tools.jobs.program_files import deepspeed_of, script_of, with_deepspeed, with_trainer
from spbench.bench.tools.jobs.transformers_settings import set_step
from spbench.bench.tools.jobs.transformers_step import Said, TransformersStep, precision_of, said_in_table
from spbench.bench.tools.jobs.variables import variables

#: by torch_dtype
_DTYPES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


def read(files: JobFiles) -> Job | None:
    """A job of ms-swift; None where the script starts no tuning of its.

    Raises:
        UserError: the script cannot be read, or has several such commands.
    """
    if (launch := tuning_of(files, "swift")) is None:
        return None
    problems: list[str] = []
    table = with_trainer(with_deepspeed(argument_table("swift")))
    k = key_account(table, options_of(launch.arguments[1:], table, problems), overrides=files.environment)
    k.environment = launch.environment
    k.problems += problems
    set_step(k, _step(k, launch), files)
    k.took("how many processes there are", *filter(k.environment.__contains__, PROCESSES))
    return k.job("swift", files, [*k.arguments(), *variables(k)])


def _step(k: Account, launch: Launch) -> TransformersStep:
    environment = launch.environment
    if k.value("tuner_type") not in ("full", "lora"):
        k.refuse("weights of which some are trained", "tuner_type")
    asked = precision_of(k, *([name] * bool(k.value(name)) for name in ("bf16", "fp16")))
    dtype = _DTYPES.get(str(k.value("torch_dtype")), "bf16") if asked.value == "fp32" else asked.value
    tiles = environment.get("CELOSS_PARALLEL_SIZE", "0")
    liger = "norm swiglu loss" if k.value("use_liger_kernel") else ""
    k.ignore("Liger's loss has tiles of its own" if liger else "of the loss alone", "CELOSS_PARALLEL_SIZE")
    if tiles.isdecimal() and int(tiles) and not liger:
        k.set("model_options.loss_tile", int(tiles), "CELOSS_PARALLEL_SIZE")
    k.ignore("its length follows from the model's, or is max_length", "max_model_len")
    return TransformersStep(
        **said_in_table(k),
        gpus=Said(gpus_of(launch)),
        **deepspeed_of(k, "deepspeed", "ddp"),
        precision=Said(dtype, k.given_of("torch_dtype", "bf16", "fp16")),
        liger=Said(liger, k.given_of("use_liger_kernel")),
    )


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
