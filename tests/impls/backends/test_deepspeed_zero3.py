"""The backend ``deepspeed_zero3``: its gradients and bytes on real ranks, with nothing that persists or is
reused, and with prefetches and small buckets."""

import os
import subprocess
import sys
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from spbench.bench.measure.engines import tracing
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.simulator.program import COLLECTIVE
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.backends.parameter_coordinator import (
    Coordinator,
    DeepSpeedZero3Options,
    flat_uses,
    replayed,
    uses_in_order,
)
from spbench.impls.composition import ONE_STAGE
from spbench.impls.place import Place
from spbench.impls.registries import model_preset, strategy_class
from tests.cells import make_cell
from tests.grid import data
from tests.impls.backends.one_device import LENGTH
from tests.measure.verify.assertions import assert_green

RECORDED: dict[str, Any] = data(__file__)
SENT: dict[str, list[int]] = RECORDED["sent"]
LLAMA = {"separate_projections": True}


@pytest.mark.parametrize("model_options", [LLAMA, LLAMA | {"recompute": "full"}], ids=["once", "again"])
@pytest.mark.parametrize("options", RECORDED["checked"].values(), ids=RECORDED["checked"])
def test_gradients_and_bytes_are_right(
    pool: RankPool, options: Mapping[str, Any], model_options: Mapping[str, Any]
) -> None:
    case = Case(
        strategy_class("ulysses"),
        model_preset("causal-transformer-tiny", model_options),
        "model",
        seq_len=LENGTH,
        backend="deepspeed_zero3",
        backend_options=options,
    )
    assert_green(pool, case, 2)


SIZES = {"layers": 3, "hidden": 64, "inner": 192, "heads": 4, "kv_heads": 2, "vocabulary": 512}
SIZES |= LLAMA | {"recompute": "full", "recompute_early_stop": True}


def test_each_gather_of_deepspeed_is_a_run_of_weights_in_our_order() -> None:
    """Which weights a gather has depends on the modules that run between; :data:`ROUNDS` stands for them."""
    model = model_preset("llama3-8b", SIZES)
    with torch.device("meta"):
        module = model.build(strategy_class("single")(Place({})), 8, ONE_STAGE)
    names = {p: name for name, p in module.named_parameters()}
    uses, elements = uses_in_order(module, names), {name: p.numel() for p, name in names.items()}
    coordinator = Coordinator(elements, flat_uses(uses), DeepSpeedZero3Options(**RECORDED["options"]))
    ours: dict[str, list[int]] = {"forward": [], "backward": []}
    for backward, name in replayed(coordinator, uses):
        ours["backward" if backward else "forward"].append(elements[name] * 2)
    for phase, each in ours.items():
        ends, of_weights = [*accumulate(SENT[f"{phase} gathers"])], [*accumulate(each)]
        assert {*ends} <= {*of_weights}
        assert ends[-1] == of_weights[-1]


def test_sums_and_the_norm_are_sent_as_deepspeed_does() -> None:
    training = {"backend": "deepspeed_zero3", "micro_batches": 1, **RECORDED["options"]}
    sizes = {"sizes": {"dp": 2}, "mesh": ["dp"], "training": training}
    asked = make_cell("llama3-8b", "single", {}, 2, 8, "bf16", model_options=SIZES, **sizes)
    program = tracing.trace(asked, events=True).program
    assert program is not None
    sent: dict[str, list[int]] = {}
    for event in (program.kind == COLLECTIVE).nonzero()[0].tolist():
        what = f"{program.phase_of(event)} {program.names[program.name[event]]}"
        sent.setdefault(what, []).append(int(program.nbytes[event]))
    assert sent["backward reduce_scatter"] == SENT["backward sums"]
    assert sent["optimizer all_reduce"] == SENT["optimizer all-reduces"]
    # before the next forward instead of at the end of the step
    assert [each for each in sent["forward all_gather"] if each == 128] == SENT["optimizer gathers"]


@pytest.mark.slow
def test_deepspeed_still_sends_this(tmp_path: Path) -> None:
    for package in ("deepspeed", "transformers"):
        pytest.importorskip(package)
    script = Path(__file__).parents[3] / "scripts" / "deepspeed_collectives.py"
    out = tmp_path / "sent.yaml"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(out)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    assert yaml.safe_load(out.read_text()) == SENT
