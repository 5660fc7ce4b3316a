"""Jobs of ms-swift: a script that starts `swift sft` or `swift pt`."""

from __future__ import annotations

from spbench.bench.tools.jobs.account import Account, key_account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.command_values import options_of
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.launch import Launch
from spbench.bench.tools.jobs.program_files import deepspeed_of, with_deepspeed, with_trainer
from spbench.bench.tools.jobs.swift_launch import PROCESSES, gpus_of, named_modules, tuning_of
from spbench.bench.tools.jobs.transformers_settings import set_step
from spbench.bench.tools.jobs.transformers_step import (
    Adapted,
    Said,
    TransformersStep,
    either,
    optimizer_of,
    precision_of,
    said,
    said_in_table,
)
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
    tuned = k.value("tuner_type")
    if tuned not in ("full", "lora"):
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
        optimizer=optimizer_of(k, "optim"),
        lora=Said(k.value("lora_rank") if tuned == "lora" else 0, k.given_of("tuner_type", "lora_rank")),
        adapted=Adapted(
            named_modules(k, "target_modules"), named_modules(k, "modules_to_save"), said(k, "use_dora")
        ),
        quantized=Said(k.value("quant_bits") or 0, k.given_of("quant_bits")),
        packed=either(k, dict.fromkeys(("packing", "padding_free"), True), False),
    )
