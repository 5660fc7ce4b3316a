"""The backend ``deepspeed_zero3``: its gradients and bytes on real ranks, with nothing that persists or is
reused, and with prefetches and small buckets."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from spbench.bench.measure.processes.rank_pool import RankPool
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
        "sub_group_size": 0,
        "implementation": "foreach",
        "reduce_dtype": "fp32",
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


def test_gathers_are_as_many_bytes_as_deepspeed_sends() -> None:
    """In each phase, next to what real DeepSpeed sent for a model of the same sizes."""
    sizes = {"layers": 3, "hidden": 64, "inner": 192, "heads": 4, "kv_heads": 2, "vocabulary": 512}
    model = model_preset("llama3-8b", sizes | LLAMA | {"recompute": "full", "recompute_early_stop": True})
    with torch.device("meta"):
        module = model.build(strategy_class("single")(Place({})), 8, ONE_STAGE)
    names = {p: name for name, p in module.named_parameters()}
    options = DeepSpeedZero3Options(
        stage3_param_persistence_threshold=100,
        stage3_max_reuse_distance=30_000,
        stage3_prefetch_bucket_size=10_000,
        stage3_max_live_parameters=80_000,
    )
    uses, elements = uses_in_order(module, names), {name: p.numel() for p, name in names.items()}
    coordinator = Coordinator(elements, flat_uses(uses), options)
    sent = {"forward": 0, "backward": 0}
    for backward, name in replayed(coordinator, uses):
        sent["backward" if backward else "forward"] += elements[name] * 2
    recorded = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
    assert sent == {phase: sum(nbytes) for phase, nbytes in recorded["gathers"].items()}
    assert sum(elements.values()) * 2 == sum(recorded["reduced"])
