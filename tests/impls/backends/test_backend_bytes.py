"""Every data-parallel backend sends what its closed form says, and holds less than the one before it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from spbench.bench.measure.engines.plan import model_parameters
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.backends.buckets import FIRST_BUCKET_BYTES, BucketedGradients
from spbench.impls.registries import backends
from tests.impls.backends.one_device import assert_sends_its_closed_form, cell, heavy, heavy_run
from tests.slow import mostly_slow, slow

#: of others the default run compares this in test_megatron.py and tests.measure.engines.test_peaks
ALWAYS = ("ddp", "fsdp1", "zero1")


@pytest.mark.parametrize(
    ("sizes", "precision"),
    [({"sp": 2, "dp": 2}, "fp16"), slow({"dp": 2, "sp": 2}, "fp16"), slow({"dp": 3}, "fp32")],
    ids=["sp2xdp2-fp16", "dp2xsp2-fp16", "dp3-fp32"],
)
@pytest.mark.parametrize("backend", mostly_slow(backends(), *ALWAYS))
def test_closed_form_virtual_and_real_ranks_send_the_same(
    pool: RankPool, backend: str, sizes: dict[str, int], precision: str
) -> None:
    assert_sends_its_closed_form(
        pool, cell(backend, "lasp", 2, sizes=sizes, mesh=[*sizes], precision=precision)
    )


def test_each_stage_of_zero_holds_less() -> None:
    peaks = {name: heavy_run(name, 8).peak_memory_bytes or 0 for name in backends()}
    assert peaks["zero3"] < peaks["zero2"] < peaks["zero1"] < peaks["ddp"], peaks


#: bytes a parameter of weights and of optimizer state, in fp16 on n ranks: half weights 2, float32 weights 4,
#: moments 8, float32 gradients where they are kept 4
HELD: dict[str, Callable[[int], tuple[float, float]]] = {
    "legacy_ddp": lambda n: (2, 4 + 8),
    "unwrapped": lambda n: (2, 4 + 8),
    "ddp": lambda n: (2, 4 + 8 + 4),
    "zero1": lambda n: (2, (4 + 8 + 4) / n),
    "zero2": lambda n: (4 / n, 8 / n),
    "zero3": lambda n: (4 / n, 8 / n),
    "megatron": lambda n: (2, 4 + 8),
    "fsdp_flat": lambda n: (0, (4 + 8) / n),
    "fsdp1": lambda n: (0, (4 + 8) / n),
}


@pytest.mark.parametrize("n", mostly_slow((2, 8), 8))
@pytest.mark.parametrize("backend", backends())
def test_what_is_held_between_steps(backend: str, n: int) -> None:
    at_peak, elements = heavy_run(backend, n).peak_held, model_parameters(heavy(backend, n))
    weights, state = HELD[backend](n)
    # small tensors and padding take more than their share
    assert at_peak["parameters"] == pytest.approx(weights * elements, rel=0.02)
    assert at_peak["optimizer_state"] == pytest.approx(state * elements, rel=0.02)


def test_a_bucket_is_sent_as_soon_as_it_is_full() -> None:
    full, last = (nn.Parameter(torch.empty(FIRST_BUCKET_BYTES // 4, device="meta")) for _ in range(2))
    buckets = BucketedGradients([(None, [last, full])], [last, full]).buckets
    assert [bucket.parameters for bucket in buckets] == [[full], [last]]


def test_outputs_are_freed_where_the_library_does() -> None:
    """Megatron-LM's deallocate_pipeline_outputs."""
    assert [name for name, cls in backends().items() if cls.frees_sent_outputs] == ["megatron"]
