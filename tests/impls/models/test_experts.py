"""Mixtures of experts on several ranks compute what one device does by torch's own operators."""

from __future__ import annotations

import pytest

from spbench.bench.measure.processes.rank_pool import RankPool
from tests.impls.models.mixture_runs import Setting, worst_of_rank

EVEN = {"routing": "even"}

SETTINGS = {
    "ep over sp": Setting({"sp": 2, "ep": 2}, options=EVEN),
    "learned": Setting({"sp": 4, "ep": 4}),
    "learned, ep over dp and sp": Setting({"dp": 2, "sp": 2, "ep": 4}),
    "edp": Setting({"dp": 2, "sp": 2, "ep": 2}, options={"routing": "zipf:1.5"}),
    "etp": Setting({"sp": 4, "ep": 2, "etp": 2}, options={"routing": "zipf:1.5"}),
    "learned etp": Setting({"sp": 4, "etp": 4}, options={"experts": 8}),
    "all_gather": Setting({"sp": 4, "ep": 2, "etp": 2}, options={"dispatcher": "all_gather"}),
    "tp": Setting(
        {"tp": 2, "sp": 2, "ep": 4}, "megatron_sp+ring_attention", options={"permutation": "fused"}
    ),
}


@pytest.mark.parametrize("setting", SETTINGS.values(), ids=SETTINGS)
def test_gradients_and_bytes_equal_one_device(pool: RankPool, setting: Setting) -> None:
    found = pool.run(setting.sizes, worst_of_rank, setting)
    for error, name, unlike in found:
        assert error < 1e-10, name
        assert not unlike, unlike
