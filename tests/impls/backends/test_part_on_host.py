"""The backend `megatron` with a part of its optimizer on the host."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.scenarios.choices import refusal
from spbench.impls.backends import megatron
from spbench.impls.backends.megatron_options import MegatronOptions
from spbench.impls.backends.part_on_host import PartOnHost, first_of
from tests.impls.backends.one_device import assert_first_wrong, assert_right, assert_sends_its_closed_form
from tests.impls.backends.test_experts import MESHES, with_experts
from tests.impls.backends.test_host_states import asked, weights
from tests.slow import slow

ON_HOST = {"distributed_optimizer": True, "optimizer": "host"}
PART = {**ON_HOST, "optimizer_offload_fraction": 0.4}


@pytest.mark.parametrize(
    ("fraction", "there"),
    [
        (0.01, [True, False, False, False]),  # the weight in which the share ends is there whole
        (0.5, [True, True, False, False]),
        (0.51, [True, True, True, False]),
        (1.0, [True, True, True, True]),
    ],
)
def test_the_first_weights_are_on_the_host(fraction: float, there: list[bool]) -> None:
    assert [*first_of([10, 40, 30, 20], fraction)] == there


@pytest.mark.parametrize("options", [slow(PART), {**PART, "overlap_cpu_optimizer_d2h_h2d": True}])
def test_weights_are_those_of_one_device(pool: RankPool, options: dict[str, Any]) -> None:
    one = asked("megatron", options)
    assert_right(pool, one, megatron.Megatron)
    assert_sends_its_closed_form(pool, asked("megatron", options, precision="bf16"))


def test_weights_with_experts_are_those_of_one_device(pool: RankPool) -> None:
    assert_right(pool, with_experts({"backend": "megatron", **PART}, *MESHES[0]), megatron.Megatron)


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


def test_what_is_no_share_is_refused() -> None:
    for fraction in (0.0, -0.1, 1.1):
        with pytest.raises(ValueError, match="optimizer_offload_fraction is above 0, at most 1"):
            MegatronOptions(distributed_optimizer=True, optimizer="host", optimizer_offload_fraction=fraction)
    with pytest.raises(ValueError, match="optimizer_offload_fraction needs optimizer: host"):
        MegatronOptions(optimizer_offload_fraction=0.5)


def test_loss_scaling_is_refused() -> None:
    reason = refusal(asked("megatron", PART, precision="fp16"))
    assert "a part of the optimizer on the host has no loss scaling; use bf16" in str(reason)
