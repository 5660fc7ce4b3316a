"""States of training on the host: the same weights as one device has, the same bytes sent, and planted faults
that are seen. Their memory is compared with that of real ranks in tests/measure/engines/test_peaks.py. The
backend `megatron` with a part of its optimizer on the host."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.processes.stacks import RankError
from spbench.impls.backends import megatron
from spbench.impls.backends.host_optimizer import HostOptimizer, PartOnHost, first_of
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.training.step import PRECISIONS, Training, default_dtype, initialize
from tests.grid import tabled
from tests.impls.backends.one_device import (
    assert_first_wrong,
    assert_right,
    cell,
)
from tests.impls.models.deferred_streams import Device
from tests.measure.verify import backend_faults as faults
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
