"""The backend ``deepspeed_zero3``: its gradients and bytes on real ranks, with nothing that persists or is
reused, and with prefetches and small buckets."""

from collections.abc import Mapping
from typing import Any

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.registries import model_preset, strategy_class
from tests.impls.backends.one_device import LENGTH
from tests.measure.verify.assertions import assert_green

NOTHING_KEPT = {"stage3_param_persistence_threshold": 0, "stage3_max_reuse_distance": 0}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "no prefetch": NOTHING_KEPT | {"stage3_prefetch_bucket_size": 0, "overlap_comm": False},
    "prefetch": NOTHING_KEPT | {"stage3_prefetch_bucket_size": 5000, "reduce_bucket_size": 4000},
    "reuse": {
        "stage3_param_persistence_threshold": 100,
        "stage3_max_reuse_distance": 20000,
        "stage3_prefetch_bucket_size": 3000,
        "stage3_max_live_parameters": 30000,
        "contiguous_gradients": False,
    },
}
LLAMA = {"separate_projections": True}


@pytest.mark.parametrize("model_options", [LLAMA, LLAMA | {"recompute": "full"}], ids=["once", "again"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
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
