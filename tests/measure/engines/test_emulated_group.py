"""What a rank receives from ranks that are not there."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from spbench.bench.measure.engines.emulated import BACKEND
from spbench.bench.measure.engines.tracing import fake_mesh


def poisoned(*shape: int) -> Tensor:
    return torch.full(shape, math.nan)


#: of torch.distributed, by name: called with this rank's part [4, 3] and a poisoned whole [16, 3]
COLLECTIVES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "all_gather": lambda part, whole: dist.all_gather(list(whole.chunk(4)), part),
    "all_gather_into_tensor": lambda part, whole: dist.all_gather_into_tensor(whole, part),
    "reduce_scatter": lambda part, whole: dist.reduce_scatter(whole[:1], list(part.chunk(4))),
    "reduce_scatter_tensor": lambda part, whole: dist.reduce_scatter_tensor(whole[:1], part),
    "all_to_all": lambda part, whole: dist.all_to_all(list(whole[:4].chunk(4)), list(part.chunk(4))),
    "all_to_all_single": lambda part, whole: dist.all_to_all_single(whole[:4], part),
    "uneven all_to_all_single": lambda part, whole: dist.all_to_all_single(
        whole[:7], part, [1, 2, 2, 2], [1, 1, 1, 1]
    ),
    "recv": lambda part, whole: dist.recv(whole[:2], 2),
    "irecv": lambda part, whole: dist.irecv(whole[:2], 2).wait(),  # type: ignore[union-attr]
}


WRITTEN = {
    "all_gather": 16,
    "all_gather_into_tensor": 16,
    "reduce_scatter": 1,
    "reduce_scatter_tensor": 1,
    "all_to_all": 4,
    "all_to_all_single": 4,
    "uneven all_to_all_single": 7,
    "recv": 2,
    "irecv": 2,
}


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_what_is_received_is_finite(collective: str) -> None:
    whole = poisoned(16, 3)
    with fake_mesh({"sp": 4}, 1, backend=BACKEND):
        COLLECTIVES[collective](torch.randn(4, 3), whole)
    assert whole[: WRITTEN[collective]].isfinite().all()
    assert whole[WRITTEN[collective] :].isnan().all()


def test_a_part_in_its_place_is_gathered_where_it_is() -> None:
    """As fully_shard does, whose part lies in the whole."""
    whole = poisoned(4, 3)
    whole[1] = torch.arange(3.0)
    with fake_mesh({"sp": 4}, 1, backend=BACKEND):
        dist.all_gather_into_tensor(whole, whole[1:2])
    assert (whole == torch.arange(3.0)).all()
