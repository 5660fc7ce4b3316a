"""Fusions that a library has or leaves out: gradients and bytes kept.
What a layer keeps for backward, bytes a token, against counts from the libraries' public code.
A step computes the same products by the layers of any library; attention by scores adds its own."""

from typing import Any

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.memory.allocator import MIB, rounded
from spbench.bench.measure.simulator.program import Category
from spbench.bench.measure.trace.operator_prices import MATMULS
from spbench.impls.kernels.projection import TORCH_PRODUCTS, TRANSFORMER_ENGINE_PRODUCTS
from tests.cells import make_cell
from tests.grid import data


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


def peaks_of_steps(**options: Any) -> list[int]:
    """The peaks of two steps, with two micro-batches whose logits have 16 MiB."""
    fields = {"layers": 1, "vocabulary": 65536, **options}
    training = {"micro_batches": 2, "steps": 2}
    cell = make_cell("gpt3-tiny", "single", {}, 4, 64, model_options=fields, training=training)
    log = tracing.trace(cell).memory
    found = log.levels(rounded(np.asarray(log.sizes))).steps
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


def kept_by_a_layer(**cell: Any) -> int:
    """Bytes that forward leaves behind for one more layer of the first rank."""

    def kept(layers: int) -> int:
        options = {**cell["model_options"], "layers": layers, "vocabulary": 128}
        log = trace(Cell(**{**cell, "precision": "bf16", "model_options": options})).memory
        (forward,) = (span for name, span in log.spans() if name == "forward")
        changes = log.signed_bytes()[forward]
        return int(changes.sum())

    return kept(3) - kept(2)


L = 1024
SMALL: dict[str, Any] = data(__file__)["SMALL"]


def test_llama_3_by_transformer_engine() -> None:
    # norm input and output twice, q, k, v after RoPE, attention's output, fc1's and SwiGLU's outputs in bf16;
    # a float32 a head and a norm
    expected = 4 * 2 * 8192 + 2 * 8192 + 4 * 8 * 128 + 2 * 8192 + 4 * 64 + 2 * 4 + 6 * 28672
    cell = {"model": "llama3-70b", "strategy": "single", "batch": 1, "seq_len": L}
    options = {"library": "transformer-engine", "cross_entropy": "in_place"}
    assert kept_by_a_layer(**cell, model_options=options) == L * expected == L * 274_696


@pytest.mark.parametrize(("attention", "outputs"), [("flash", 2), ("cudnn", 1)])
def test_gpt_with_dropout_and_flash_attention(attention: str, outputs: int) -> None:
    # Megatron-LM's gpt3_7b_tp4 on A100 (64,560) and on H100 (62,512)
    h, kv = 4096, 8 * 128
    expected = (
        8 * h + 2 * (h + 2 * kv) // 4 + outputs * 2 * h // 4 + 4 * 32 // 4 + 2 * h + 4 * 4 * h // 4 + 16
    )
    options = {"library": "transformer-engine", "attention": attention, "kv_heads": 8}
    cell = {"model": "gpt3-7b", "strategy": "tensor_parallel", "sizes": {"tp": 4}, "batch": 2, "seq_len": L}
    assert kept_by_a_layer(**cell, model_options=options) == 2 * L * expected


def test_gpt_with_dropout_and_scores() -> None:
    # 10 h + 24 h / tp + 5 L heads / tp, and two float32 a norm
    h, heads = SMALL["hidden"], SMALL["heads"]
    cell = {"model": "gpt3-345m", "strategy": "tensor_parallel", "sizes": {"tp": 2}, "batch": 2, "seq_len": L}
    expected = 10 * h + 24 * h // 2 + 5 * L * heads // 2 + 16
    assert kept_by_a_layer(**cell, model_options=SMALL) == 2 * L * expected


def test_selective_recomputation_keeps_no_scores() -> None:
    h = SMALL["hidden"]
    cell = {"model": "gpt3-345m", "strategy": "single", "batch": 1, "seq_len": L}
    kept = kept_by_a_layer(**cell, model_options=SMALL | {"recompute": "selective"})
    assert kept == L * (10 * h + 24 * h + 16)


def test_full_recomputation_keeps_the_input_of_each_run() -> None:
    options = {"hidden": 512, "heads": 8, "inner": 2048, "recompute": "full"}
    cell = {"model": "gpt3-345m", "strategy": "single", "batch": 1, "seq_len": L}
    assert kept_by_a_layer(**cell, model_options=options) == L * 2 * 512


def test_hugging_faces_layers_keep_cos_and_sin_of_their_own() -> None:
    # cos and sin of A features each in bf16, once a layer for queries and keys together
    cell = {"model": "causal-transformer-1b", "strategy": "single", "batch": 2, "seq_len": L}
    shared, own = (kept_by_a_layer(**cell, model_options={"rope": rope}) for rope in ("shared", "each_layer"))
    assert own - shared == L * 2 * 2 * 128


B, LENGTH, Z, A, LAYERS = 2, 64, 12, 4, 2
#: FLOPs of one product of all queries with all keys, or of scores with values
SCORES = 2 * B * Z * LENGTH * LENGTH * A


def flops(backend: str = "ddp", **options: Any) -> tuple[float, float]:
    """FLOPs of a step of gpt3-tiny: of matmuls, and of attention kernels."""
    fields = {"model_options": {"layers": LAYERS, **options}, "training": {"backend": backend}}
    cell = make_cell("gpt3-tiny", "single", {}, B, LENGTH, **fields)
    program = trace(cell, events=True).program
    of_attention = program.category == Category.ATTENTION
    return float(program.flops[~of_attention].sum()), float(program.flops[of_attention].sum())


@pytest.mark.parametrize("backend", ["ddp", "megatron"])
def test_libraries_compute_the_same(backend: str) -> None:
    plain = flops()
    assert plain[1] > 0
    for library in ("megatron-local", "transformer-engine"):
        assert flops(backend, library=library, cross_entropy="in_place") == plain
        assert flops(backend, library=library, attention_dropout=0.1) == plain


def test_attention_by_scores_makes_six_products_of_all_pairs() -> None:
    (plain, _), (scored, _) = flops(), flops(library="megatron-local", attention="unfused")
    assert scored - plain == 6 * SCORES * LAYERS


def test_full_recomputation_repeats_the_forward_of_layers() -> None:
    once, again = flops(), flops(recompute="full")
    # 12 h^2 of a layer's weights, of the inner width 2 h of the tiny model 8 h^2
    assert again[0] - once[0] == 2 * B * LENGTH * LAYERS * 8 * (Z * A) ** 2


def test_every_product_has_its_flops() -> None:
    assert MATMULS.keys() >= TORCH_PRODUCTS | TRANSFORMER_ENGINE_PRODUCTS
