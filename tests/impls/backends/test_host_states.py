"""States of training on the host: the same weights as one device has, the same bytes sent, and planted
faults that are seen. Their memory is compared with that of real ranks in
tests/measure/engines/test_peaks.py. The backend `megatron` with a part of its optimizer on the host. The
backend ``deepspeed_zero3``: its gradients and bytes on real ranks, with nothing that persists or is reused,
and with prefetches and small buckets.
"""

import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.simulator.program import Kind
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.backends import megatron
from spbench.impls.backends.host_optimizer import HostOptimizer, PartOnHost, first_of
from spbench.impls.backends.parameter_coordinator import (
    Coordinator,
    DeepSpeedZero3Options,
    recorded,
    replayed,
)
from spbench.impls.composition import ONE_STAGE
from spbench.impls.place import Place
from spbench.impls.registries import model_preset, strategy_class
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import PRECISIONS, Training, default_dtype, initialize
from tests.cells import make_cell
from tests.grid import data, tabled
from tests.impls.backends.one_device import (
    LENGTH,
    assert_first_wrong,
    assert_right,
    cell,
)
from tests.impls.models.deferred_streams import Device
from tests.measure.verify import backend_faults as faults
from tests.measure.verify.assertions import assert_green
from tests.slow import slow

OPTIMIZER = {"optimizer": "host"}
PARAMETERS = {"optimizer": "host", "parameters": "host"}
SHARED_OUT = {"distributed_optimizer": True, **OPTIMIZER}
OVERLAPPED = {**SHARED_OUT, "overlap_cpu_optimizer_d2h_h2d": True}


def asked(backend: str, options: dict[str, Any], **changes: Any) -> Cell:
    settings = {"model": "causal-transformer-tiny", "sizes": {"dp": 2, "sp": 2}, **changes}
    training = {"backend": backend, "micro_batches": 2, **options}
    return cell(backend, "ulysses", **settings, training=training)


@pytest.mark.parametrize("options", [OPTIMIZER, PARAMETERS], ids=["optimizer", "parameters"])
def test_a_gradient_that_is_not_made_is_missed(pool: RankPool, options: dict[str, Any]) -> None:
    with pytest.raises(RankError, match="backward gave no gradient for some parameters"):
        assert_right(pool, asked("zero3", options, sizes={"dp": 2}), faults.HookNeverFires)


# -- copies that are as late as the waits of streams allow -------------------------------------------------


def weights(device: Device | None, backend: str, precision: str, **options: Any) -> dict[str, Tensor]:
    """Weights of gpt3-tiny after two steps on one rank."""
    model = model_preset("gpt3-tiny", {"dropout": 0.0})
    with default_dtype(PRECISIONS[precision].parameters):
        module = model.build(Strategy(), 16)
        initialize(module, 0, deviation=0.3)
        kind = {"backend": backend, "backend_options": options, "learning_rate": 0.01}
        training = Training(module, Strategy(), PRECISIONS[precision], **kind)
        batches = [model.inputs(2, 16, torch.Generator().manual_seed(i)) for i in range(2)]
        for batch in batches:
            if device is None:
                training.step(batch)
            else:
                with device:
                    training.step(batch)
    return {name: part.values for name, part in training.backend.weight_parts().items()}


LATE = [("ddp", "fp64", OPTIMIZER), ("megatron", "fp64", OVERLAPPED), ("zero1", "bf16", OPTIMIZER)]


@pytest.mark.parametrize(("backend", "precision", "options"), LATE, ids=[name for name, *_ in LATE])
def test_late_copies_change_nothing(
    backend: str, precision: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights(None, backend, precision, **options)
    late = Device(monkeypatch)
    found = weights(late, backend, precision, **options)
    assert late.faults == []
    assert late.copied > 0
    assert all(torch.equal(found[name], x) for name, x in expected.items())


def does_not_wait_for_gradients(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HostOptimizer, "arrived", lambda self, number: None)


def does_not_wait_for_weights(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    device.deaf.add("compute")


def copies_at_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without waiting for what makes what is copied."""
    device.deaf.add("copies")


@pytest.mark.parametrize("plant", [does_not_wait_for_gradients, does_not_wait_for_weights, copies_at_once])
def test_a_wait_that_is_left_out_is_seen(
    plant: Callable[[Device, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = weights(None, "megatron", "fp64", **OVERLAPPED)
    device = Device(monkeypatch)
    plant(device, monkeypatch)
    found = weights(device, "megatron", "fp64", **OVERLAPPED)
    assert device.faults or not all(torch.equal(found[name], x) for name, x in expected.items())


def test_a_buffer_that_is_used_again_while_it_is_copied_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The weights of ZeRO-1, rounded into one buffer that the host fills again too early."""
    expected = weights(None, "zero1", "bf16", **OPTIMIZER)
    sent = HostOptimizer.updated

    def reused(self: HostOptimizer, number: int) -> None:
        sent(self, number)
        buffer = self.runs[number].buffer
        buffer.zero_()

    monkeypatch.setattr(HostOptimizer, "updated", reused)
    found = weights(Device(monkeypatch), "zero1", "bf16", **OPTIMIZER)
    assert not all(torch.equal(found[name], x) for name, x in expected.items())


# -- refusals ----------------------------------------------------------------------------------------------


ON_HOST = {"distributed_optimizer": True, "optimizer": "host"}
PART = {**ON_HOST, "optimizer_offload_fraction": 0.4}


@tabled(__file__, "the_first_weights_are_on_the_host")
def test_the_first_weights_are_on_the_host(fraction: float, there: list[bool]) -> None:
    assert [*first_of([10, 40, 30, 20], fraction)] == there


class RestNotUpdated(megatron.Megatron):
    """Updates the host's weights alone."""

    def step(self) -> None:
        assert isinstance(self.optimizer, PartOnHost)
        self.optimizer.rest.step = lambda: None  # type: ignore[method-assign]
        super().step()


def test_weights_of_the_device_that_are_not_updated_are_seen(pool: RankPool) -> None:
    assert_first_wrong(pool, asked("megatron", PART, sizes={"dp": 2}), RestNotUpdated, "weight 0")


@pytest.mark.parametrize("precision", ["bf16", slow("fp32")])
def test_where_a_weight_is_updated_changes_nothing(precision: str) -> None:
    whole = weights(None, "megatron", precision, distributed_optimizer=True)
    for name, part in weights(None, "megatron", precision, **PART).items():
        torch.testing.assert_close(part, whole[name], msg=name)


RECORDED: dict[str, Any] = data(__file__)


@pytest.mark.parametrize("model_options", RECORDED["checked models"].values(), ids=RECORDED["checked models"])
@pytest.mark.parametrize("options", RECORDED["checked"].values(), ids=RECORDED["checked"])
def test_gradients_and_bytes_are_right(
    pool: RankPool, options: Mapping[str, Any], model_options: Mapping[str, Any]
) -> None:
    model = model_preset("causal-transformer-tiny", model_options)
    training: dict[str, Any] = {"backend": "deepspeed_zero3", "backend_options": options}
    assert_green(pool, Case(strategy_class("ulysses"), model, "model", seq_len=LENGTH, **training), 2)


COMPARED = pytest.mark.parametrize("compared", RECORDED["compared"].values(), ids=RECORDED["compared"])


@COMPARED
def test_each_gather_of_deepspeed_is_a_run_of_ours(compared: tuple[dict[str, Any], str, str]) -> None:
    """Which weights a gather has depends on the modules that run between; :data:`ROUNDS` stands for them."""
    sizes, options, sent = compared
    with torch.device("meta"):
        module = model_preset("llama3-8b", sizes).build(strategy_class("single")(Place({})), 8, ONE_STAGE)
    elements, events = {name: p.numel() for name, p in module.named_parameters()}, recorded(module)
    both, ours = DeepSpeedZero3Options(**RECORDED["options"] | RECORDED[options]), {False: [0], True: [0]}
    for backward, names in replayed(Coordinator(elements, events, both), events):
        for name in names:  # transformers has two weights in place of an expert's first
            ours[backward] += [elements[name]] * 2 if ".opens." in name else [elements[name] * 2]
    for phase, each in (("forward gathers", ours[False]), ("backward gathers", ours[True])):
        ends, of_weights = [*accumulate(RECORDED[sent][phase])], [*accumulate(each)]
        assert ({*ends} <= {*of_weights}, ends[-1]) == (True, of_weights[-1])


@COMPARED
def test_sums_and_the_norm_are_sent_as_deepspeed_does(compared: tuple[dict[str, Any], str, str]) -> None:
    (sizes, options, _), theirs = compared, RECORDED[compared[2]]
    training = {"backend": "deepspeed_zero3", "micro_batches": 1, **RECORDED["options"] | RECORDED[options]}
    of_ranks = {"sizes": {"dp": 2}, "mesh": ["dp"], "training": training}
    asked = make_cell("llama3-8b", "single", {}, 2, 8, "bf16", model_options=sizes, **of_ranks)
    program = tracing.trace(asked, events=True).program
    assert program is not None
    ours: dict[str, list[int]] = {}
    for event in (program.kind == Kind.COLLECTIVE).nonzero()[0].tolist():
        what = f"{program.phase_of(event)} {program.names[program.name[event]]}"
        ours.setdefault(what, []).append(int(program.nbytes[event]))
    assert ours["backward reduce_scatter"] == theirs["backward sums"]
    assert ours["optimizer all_reduce"] == theirs["optimizer all-reduces"]
    # before the next forward instead of at the end of the step
    persistent = ours["forward all_gather"][: len(theirs["optimizer gathers"])]
    assert sorted(persistent) == sorted(theirs["optimizer gathers"])


@pytest.mark.slow
def test_deepspeed_still_sends_this(tmp_path: Path) -> None:
    for package in ("deepspeed", "transformers"):
        pytest.importorskip(package)
    script, out = Path(__file__).parents[3] / "scripts/deepspeed_collectives.py", tmp_path / "sent.yaml"
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(script), str(out)]
    subprocess.run(command, check=True, timeout=300, env={**os.environ, "DS_ACCELERATOR": "cpu"})
    written = yaml.safe_load(out.read_text())
    assert written["stage 3"] == RECORDED["sent"]
    assert written["experts"] == written["experts again"] == RECORDED["sent by experts"]
