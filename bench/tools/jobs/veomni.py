"""Jobs of VeOmni: its YAML of a text model."""

from __future__ import annotations

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFiles
from spbench.bench.tools.jobs.program_files import adapters_of, configuration
from spbench.bench.tools.jobs.transformers_settings import job_of_files
from spbench.bench.tools.jobs.transformers_step import Said, TransformersStep, said_in_table

_TRAIN, _PARALLEL = "train.", "train.accelerator."


def read(files: JobFiles) -> Job | None:
    """A job of VeOmni; None where no file is its configuration.

    Raises:
        UserError: a file is damaged.
    """
    content = configuration(files, ("model", "data", "train"))
    own = content and content["train"]
    if not isinstance(own, dict) or not {"accelerator", "data_parallel_mode", "ulysses_parallel_size"} & {
        *own
    }:
        return None
    assert content is not None
    return job_of_files("veomni", files, content, argument_table("veomni"), _step)


def _step(k: Account) -> TransformersStep:
    fsdp = f"{_PARALLEL}fsdp_config."
    mode, kept = f"{fsdp}fsdp_mode", f"{fsdp}reshard_after_forward"
    _, mode = k.chosen(mode, f"{_TRAIN}data_parallel_mode")
    sharding = "ddp" if k.value(mode) == "ddp" else "fsdp, kept" if k.value(kept) is False else "fsdp"
    mixed = k.chosen(f"{fsdp}mixed_precision.enable", f"{_TRAIN}enable_mixed_precision")
    optimizer = k.chosen(f"{_TRAIN}optimizer.type", f"{_TRAIN}optimizer")
    for name in (f"{_PARALLEL}{each}_size" for each in ("tp", "pp", "cp")):
        if k.count(name) > 1:
            k.refuse("this axis beside Ulysses and FSDP2", name)
    reduce = f"{fsdp}mixed_precision.reduce_dtype"
    return TransformersStep(
        **said_in_table(k),
        sharding=Said(sharding, k.given_of(mode, kept)),
        half=Said(not mixed[0], k.given_of(mixed[1])),
        reduce=Said("fp32" if mixed[0] and k.value(reduce) == "float32" else "weights", k.given_of(reduce)),
        optimizer=Said("adam" if "adamw" in str(optimizer[0]) else optimizer[0], k.given_of(optimizer[1])),
        **adapters_of(k, "model.lora_config", "rank", "r"),
    )
