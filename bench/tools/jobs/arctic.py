"""Jobs of ArcticTraining: its YAML, which has the DeepSpeed configuration in it."""

from __future__ import annotations

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.program_files import (
    OF_DEEPSPEED,
    adapters_of,
    configuration,
    deepspeed_of,
    with_deepspeed,
)
from spbench.bench.tools.jobs.transformers_settings import job_of_files
from spbench.bench.tools.jobs.transformers_step import Said, TransformersStep, said_in_table

_ADAM = ("", "fusedadam", "fused_adam", "cpu_adam", "cpuadam", "adam", "adamw")


def read(files: JobFiles) -> Job | None:
    """A job of ArcticTraining; None where no file is its configuration.

    Raises:
        UserError: a file is damaged.
    """
    content = configuration(
        files, ("type", "model", "data"), ("micro_batch_size", "model", "data", "deepspeed")
    )
    model = content and content["model"]
    if content is None or not isinstance(model, dict) or "name_or_path" not in model:
        return None
    return job_of_files("arctic", files, content, with_deepspeed(argument_table("arctic")), _step)


def _step(k: Account) -> TransformersStep:
    stage, kind = f"{OF_DEEPSPEED}zero_optimization.stage", "model.type"
    if not k.has(stage):
        k.problems.append(f"{stage} is not said")
    tiled = bool(k.value("tiled_mlp_compute"))
    liger = "norm loss" if tiled else "norm swiglu loss"
    optimizer = "optimizer.type"
    named = str(k.value(optimizer)).lower()
    return TransformersStep(
        **said_in_table(k),
        **deepspeed_of(k, stage),
        liger=Said(liger if k.value(kind) == "liger" else "", k.given_of(kind)),
        optimizer=Said("adam" if named in _ADAM else named, k.given_of(optimizer)),
        **adapters_of(k, "model.peft_config", "r"),
    )
