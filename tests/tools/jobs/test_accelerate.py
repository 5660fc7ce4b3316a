"""`accelerate launch` as a job, and cells as its options: read back they are the same cell."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.tools.jobs import accelerate
from spbench.bench.tools.jobs.flags import differences, program_flags
from spbench.bench.tools.jobs.job import Job
from spbench.bench.tools.jobs.job_files import JobFile, JobFiles
from tests.tools.jobs.job_inputs import INPUTS, read

STEP: dict[str, Any] = {
    "model": "Qwen/Qwen3-8B",
    "cluster": "dgx-h100",
    "precision": "bf16",
    "training": {"moments": "later", "steps": 2},
    "model_options": {"separate_projections": True, "rms_norm": "plain", "attention": "flash_attention_2"},
}
#: by strategy: its axis, its own options, and whether DeepSpeed runs it
LAYOUTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "single": ("", {}, False),
    "tensor_parallel": ("tp", {"loss": "gathered"}, False),
    "ulysses": ("sp", {}, True),
    "ring_attention": ("sp", {"placement": "zigzag"}, False),
    "all_gather_kv": ("sp", {"placement": "zigzag", "gradients": "ring"}, False),
}


def job(text: str, given: dict[str, str] | None = None, cluster: str = "dgx-h100") -> Job:
    made = accelerate.read(JobFiles([JobFile(Path("train.sh"), text.encode())], None, cluster, given or {}))
    assert made is not None
    return made


@st.composite
def cells(draw: st.DrawFn) -> Cell:
    """Layouts and steps that accelerate has."""
    strategy = draw(st.sampled_from(sorted(LAYOUTS)))
    axis, options, by_deepspeed = LAYOUTS[strategy]
    replicas, parts = draw(st.sampled_from([2, 4])), draw(st.sampled_from([1, 2]))
    sizes = {"dp": replicas} | ({axis: draw(st.sampled_from([2, 4]))} if axis else {})
    recompute = draw(st.sampled_from([{}, {"recompute_early_stop": True}, {"recompute_reentrant": True}]))
    backend: dict[str, Any] = {
        "backend": "zero3" if by_deepspeed else draw(st.sampled_from(["zero2", "zero3"]))
    }
    if backend["backend"] == "zero3" and draw(st.booleans()):
        backend |= {"optimizer": "host", "parameters": "host"}
    if by_deepspeed:
        backend["gradient_buffer_kib"] = 976563
    if parts > 1 and not by_deepspeed:
        backend["reduce_at"] = "last"
    return Cell.model_validate(
        STEP
        | {
            "strategy": strategy,
            "strategy_options": options,
            "sizes": sizes,
            "batch": replicas * parts * draw(st.sampled_from([1, 2])),
            "seq_len": draw(st.sampled_from([4096, 32768])),
            "model_options": STEP["model_options"]
            | ({"recompute": "full", **recompute} if recompute else {}),
            "training": STEP["training"] | backend | {"micro_batches": parts},
        }
    )


@settings(max_examples=25, deadline=None, derandomize=True)
@given(cells())
def test_a_cell_read_back_is_the_same(cell: Cell) -> None:
    flags = program_flags("accelerate", cell)
    assert (flags.missing, flags.beside) == ((), ())
    assert list(differences(cell, job(flags.text()).cell())) == []


def test_what_accelerate_has_not_is_named() -> None:
    pipeline = Cell.model_validate(
        STEP | {"strategy": "single", "sizes": {"dp": 2, "pp": 2}, "batch": 4, "seq_len": 4096}
    )
    with pytest.raises(UserError, match=r"accelerate has no .*sizes.pp 2 \(it has 1\)"):
        program_flags("accelerate", pipeline).text()
    unnamed = pipeline.model_copy(update={"model": "llama3-8b"})
    with pytest.raises(UserError, match="accelerate has no model llama3-8b without its name on Hugging Face"):
        program_flags("accelerate", unnamed).text()


def test_a_launch_is_read_with_its_script_and_files() -> None:
    text = (INPUTS / "accelerate.sh").read_text()
    cell = job(text).cell()
    assert (cell.strategy, cell.sizes.sp, cell.sizes.dp, cell.batch, cell.seq_len) == (
        "ulysses",
        4,
        2,
        4,
        65536,
    )
    assert (cell.training.backend, cell.training.micro_batches) == ("zero3", 2)
    beside = (INPUTS / "accelerate_fsdp2.yaml").read_bytes()
    script = (
        "accelerate launch --config_file fsdp2.yaml sft.py --model_name_or_path $MODEL --max_length 8192 "
    )
    script += "--per_device_train_batch_size 1"
    files = [JobFile(Path("a.sh"), script.encode()), JobFile(Path("fsdp2.yaml"), beside)]
    asked = accelerate.read(JobFiles(files, None, "dgx-h100"))
    assert asked is not None
    assert (
        "model_name_or_path=$MODEL: $MODEL is not set in the script; --given MODEL=VALUE" in asked.refusal()
    )
    made = accelerate.read(JobFiles(files, None, "dgx-h100", {"MODEL": "Qwen/Qwen3-8B"}))
    assert made is not None
    assert (made.cell().strategy, made.cell().sizes.dp) == ("all_gather_kv", 2)
    with pytest.raises(UserError, match="several commands train"):
        job(f"{text}\naccelerate launch sft.py\n")


AGAIN = "gradient_checkpointing_kwargs"


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("", "", ("full", True, None, 883, 16384)),
        ("packing", f"{AGAIN}={{'offload': True}}, packing", ("full", True, "host", 883, 16384)),
        ("packing", f"{AGAIN}=dict(offload=True), packing", ("full", True, "host", 883, 16384)),
        ("packing", f"{AGAIN}={{'ofload': True}}, packing", r"kwargs.ofload \(did you mean"),
        ("packing", f"{AGAIN}={{'selective': True}}, packing", "what some operators keep"),
        ("packing", "gradient_checkpointing=False, packing", (None, None, None, 883, 16384)),
        ("max_length=LENGTH, ", "", ("full", True, None, 883, 1024)),
        ("SFTConfig", "DPOConfig", "DPOConfig of TRL: preferences"),
        ("trl import SFTConfig", "ours import SFTConfig", "how long sequences are is not said"),
        ("LENGTH,", "args.length,", r"max_length: \$\(args.length\) is a value that only a run has; --given"),
        ("packing", "**more, packing", r"TrainingArguments.\*\*"),
    ],
)  # fmt: skip
def test_a_script_of_trl_has_trls_defaults(old: str, new: str, expected: tuple[object, ...] | str) -> None:
    """trl/trainer/base_config.py and sft_config.py of TRL 1.16; job 06 takes 56.2 GB with them."""
    changes = {"train.py": (old, new), "accelerate_fsdp2.yaml": ("fsdp_activation_checkpointing: true", "")}
    made = read("deepspeed", ["accelerate_fsdp2.yaml", "train.py"], changes)
    if isinstance(expected, str):
        with pytest.raises(UserError, match=expected):
            made.cell()
        return
    cell = replace(made, strict=False).cell()
    names = "recompute", "recompute_early_stop", "checkpoints", "loss_tile"
    assert (*map(cell.model_options.get, names), cell.seq_len) == expected
