"""Fusions that a library has or leaves out: gradients, bytes kept, and peaks on virtual and real ranks."""

from typing import Any

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.memory.allocator import MIB, rounded
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import model_preset
from spbench.impls.strategies.nesting import nesting
from tests.impls.models.test_kept_by_libraries import SMALL, L, kept_by_a_layer
from tests.measure.engines.cells import on_real_ranks, seen
from tests.measure.verify.assertions import assert_green
from tests.slow import slow

LOCAL = {"library": "megatron-local", "attention": "unfused"}
TRANSFORMER_ENGINE = {"library": "transformer-engine", "position": "rotary"}
#: between them, every fusion that is left out, and every activation and loss that has a kernel of its own
CHOICES: list[dict[str, Any]] = [
    {**LOCAL, "mlp": "swiglu", "cross_entropy": "native", "unfused": ["masked_softmax", "bias_dropout"]},
    {**TRANSFORMER_ENGINE, "attention": "unfused", "mlp": "squared_relu", "unfused": ["rope"]},
    {**LOCAL, "position": "rotary", "rotary_share": 0.5, "unfused": ["rope", "bias_gelu"]},
    {**TRANSFORMER_ENGINE, "mlp": "swiglu", "unfused": ["bias_swiglu"]},
]
SPLIT: dict[str, dict[str, str]] = {"tensor_parallel": {}, "megatron_sp": {"vocabulary": "split"}}


@pytest.mark.parametrize("options", [CHOICES[0], CHOICES[1], *(slow(each) for each in CHOICES[2:])])
@pytest.mark.parametrize("strategy", ["tensor_parallel", slow("megatron_sp")])
def test_gradients_are_those_of_one_device(pool: RankPool, strategy: str, options: dict[str, Any]) -> None:
    model = model_preset("gpt3-tiny", options)
    assert_green(pool, Case(nesting(strategy), model, "model", options=SPLIT[strategy]), {"tp": 2})


@pytest.mark.parametrize("options", [CHOICES[0], *(slow(each) for each in CHOICES[1:])])
def test_virtual_ranks_are_as_real_ones(pool: RankPool, options: dict[str, Any]) -> None:
    settings = {"batch": 4, "seq_len": 32, "precision": "bf16", "training": {"backend": "megatron"}}
    dropout = {"dropout": 0.1, "attention_dropout": 0.1}
    cell = Cell.model_validate(
        {
            "model": "gpt3-tiny",
            "strategy": "tensor_parallel",
            "sizes": {"tp": 2},
            "model_options": options | dropout,
            **settings,
        }
    )
    virtually = [seen(tracing.trace(cell, rank)) for rank in range(2)]
    really = on_real_ranks(pool, {"tp": 2}, cell, virtually)
    assert [r.peak for r in really] == [v.peak for v in virtually]
    assert [r.counts for r in really] == [v.counts for v in virtually]
    assert not any(v.difference for v in virtually)


def kept(**options: Any) -> int:
    """Bytes a token that a layer of a small GPT keeps."""
    cell = {"model": "gpt3-345m", "strategy": "single", "batch": 1, "seq_len": L}
    return kept_by_a_layer(**cell, model_options=SMALL | options) // L


@pytest.mark.slow
def test_what_a_layer_keeps_without_a_fusion() -> None:
    h, heads = SMALL["hidden"], SMALL["heads"]
    inner = SMALL["inner"]
    fused = kept()
    # softmax in float32, not in half precision
    assert kept(unfused=["masked_softmax"]) - fused == 2 * heads * L
    # TransformerEngine has a fusion of its own
    engine = kept(library="transformer-engine")
    assert kept(library="transformer-engine", unfused=["masked_softmax"]) == engine
    # masks alone, and the activation's input
    assert kept(mlp="squared_relu", unfused=["bias_dropout"]) == fused
    # twice the projections before the gate
    gated = kept(mlp="swiglu")
    assert gated - fused == 2 * inner
    # and the result of SiLU beside them
    assert kept(mlp="swiglu", unfused=["bias_swiglu"]) - gated == 2 * inner
    # cos and sin of queries and of keys
    rotary = {"position": "rotary", "library": "transformer-engine"}
    assert kept(**rotary, unfused=["rope"]) - kept(**rotary) == 4 * 2 * h // heads


def test_transformer_engine_gives_up_the_joint_projection_where_it_must_copy() -> None:
    h = SMALL["hidden"]
    # of queries, keys and values in one tensor; with RoPE q and k are others, and v would keep all three
    assert kept(library="transformer-engine", position="rotary") == kept(library="transformer-engine")
    assert kept(position="rotary") - kept() == 2 * 2 * h


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"unfused": ["softmax"]}, "unfused has words of masked_softmax, bias_gelu, .*, not 'softmax'"),
        ({"unfused": ["rope"], "library": "torch"}, "library torch does not"),
        ({"autotune_flush_kib": 1}, "autotune_flush_kib needs cross_entropy: native"),
        (
            {"cross_entropy": "native", "autotune_copies": 1},
            "autotune_copies stand beside autotune_flush_kib",
        ),
        ({"cross_entropy": "native", "autotune_flush_kib": -1}, "at least 0"),
    ],
)
def test_what_cannot_be_left_out_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_preset("gpt3-tiny", LOCAL | options)


def peaks_of_steps(**options: Any) -> list[int]:
    """The peaks of two steps, with two micro-batches whose logits have 16 MiB."""
    cell = Cell(
        model="gpt3-tiny",
        strategy="single",
        batch=4,
        seq_len=64,
        precision="bf16",
        model_options={"layers": 1, "vocabulary": 65536, **options},
        training={"micro_batches": 2, "steps": 2},
    )
    log = tracing.trace(cell).memory
    found = log.peaks(rounded(np.asarray(log.sizes)))
    assert all(peak.phase == "backward" for peak in found if options["cross_entropy"] == "native")
    return [peak.nbytes for peak in found]


def test_the_native_cross_entropy_has_a_second_copy_in_backward() -> None:
    """In forward there are logits of 2 bytes and a copy of 4; in backward two copies and a gradient of 2."""
    native, fused = peaks_of_steps(cross_entropy="native"), peaks_of_steps(cross_entropy="fused")
    assert native[1] - fused[1] == pytest.approx(32 * MIB, rel=0.05)


@pytest.mark.parametrize(
    ("flush_mib", "copies", "more_mib"),
    [
        (4, 0, 4),  # the copies of 32 MiB are made on the host
        (4, 1, 4 + 32),
        (4, 2, 4 + 64),
        (40, 0, 40 + 32),  # as much was taken before, when the kernel that scatters was timed
    ],
)
def test_the_compiler_times_the_kernels_of_the_first_step(flush_mib: int, copies: int, more_mib: int) -> None:
    native = peaks_of_steps(cross_entropy="native")
    tuning = {"autotune_flush_kib": flush_mib * 1024, "autotune_copies": copies}
    first, later = peaks_of_steps(cross_entropy="native", **tuning)
    assert first - native[0] == pytest.approx(more_mib * MIB, abs=4096)  # a sum more, a sum less
    assert later == native[1]


def test_bert_without_a_binary_head(pool: RankPool) -> None:
    model = model_preset("bert-tiny", {"binary_head": False})
    assert_green(pool, Case(nesting("tensor_parallel"), model, "model"), {"tp": 2})
