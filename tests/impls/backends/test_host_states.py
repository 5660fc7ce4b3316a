"""States of training on the host: the same weights as one device has, and the same bytes sent."""

from __future__ import annotations

from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.ranks.rank_pool import RankPool
from spbench.impls.registries import backends
from tests.impls.backends.test_backends import assert_right, assert_sends_its_closed_form, cell

OPTIMIZER = {"optimizer": "host"}
PARAMETERS = {"optimizer": "host", "parameters": "host"}


def asked(backend: str, options: dict[str, Any], **changes: Any) -> Cell:
    settings = {"model": "causal-transformer-tiny", "sizes": {"dp": 2, "sp": 2}, **changes}
    training = {"backend": backend, "micro_batches": 2, **options}
    return cell(backend, "ulysses", **settings, training=training)


@pytest.mark.parametrize("options", [OPTIMIZER, PARAMETERS], ids=["optimizer", "parameters"])
def test_weights_are_those_of_one_device(pool: RankPool, options: dict[str, Any]) -> None:
    assert_right(pool, asked("zero3", options), backends()["zero3"])
    assert_sends_its_closed_form(pool, asked("zero3", options, precision="fp16"))
