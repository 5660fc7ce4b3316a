"""Operators without a known price are counted; what torch's inside is not as it was is named. FLOPs of
attention kernels, by which steps are timed: a causal mask halves them, in every kernel.

What FlashAttention's kernels allocate inside backward stands in a trace of a model that names them.
"""

from collections import Counter
from itertools import takewhile

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.engines.traces import from_bytes, to_bytes, trace_key
from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.simulator.program import Category
from spbench.bench.measure.trace import torch_internals
from spbench.bench.measure.trace.operator_prices import _softmax_shape, price_of
from spbench.bench.measure.trace.recorder import FastRecorder, Recorder
from spbench.bench.measure.trace.torch_internals import FakeTensorMode, check_internals
from spbench.impls.attended import Range, Ranges
from spbench.impls.kernels.attention_buffers import inside_backward
from spbench.impls.kernels.flash_attention import flash_attention, flash_attention_backward
from spbench.impls.kernels.permutation import WITHIN_TRANSFERS
from spbench.impls.kernels.ranged_attention import Size
from tests.grid import tabled
from tests.measure.engines.cells import cell, differences

ROWS = (*WITHIN_TRANSFERS, "permute_rows")


@torch.library.custom_op("price_test::mix", mutates_args=())
def mix(x: Tensor) -> Tensor:
    return x.clone()


@mix.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def test_calls_of_operators_without_a_price_are_counted() -> None:
    mode = FakeTensorMode()
    with tracing.fake_mesh({}, 0) as mesh:
        recorder = FastRecorder(mode, mesh, events=True)
        with mode, recorder, recorder.phase("forward"):
            x = torch.ones(4, 6)
            for _ in range(3):
                x = mix(x) + 1
    program = recorder.events.program()
    assert program.unpriced_calls() == {"mix": 3}
    mixed = program.name == program.names.index("mix")
    assert set(program.nbytes[mixed]) == {2 * 4 * 6 * 4}


@pytest.mark.parametrize(("high", "whole"), [(7, True), (0, False)])
def test_a_range_has_the_mask_of_its_own_pairs(high: int, whole: bool) -> None:
    """Rates are a whole block's where as many pairs meet as queries times keys, else a causal one's."""
    q, k = (torch.empty(2, heads, 8, 4, device="meta") for heads in (6, 3))
    ranges = Ranges.of(Range(0, 8, first, 8, -7, high) for first in (0, 8)).text
    heads, queries, keys, size = _softmax_shape([q, k, k, 0.5, ranges], "ranged_flash_attention")
    assert (heads, queries, keys, size) == (2 * 6 * 2, 8, 8, 4)
    assert (2 * 6 * Size.of(ranges).pairs == heads * queries * keys) == whole


def test_attention_to_chosen_keys_has_the_shape_of_its_chosen_keys() -> None:
    """Of DeepSeek-V3.2: keys of 576 features, values of their first 512, and 2,048 keys for each query. The
    scores of the indexer are matmuls."""
    q, rows = torch.empty(1, 8, 128, 576, device="meta"), torch.empty(1, 4096, 576, device="meta")
    chosen = torch.empty(1, 8, 2048, dtype=torch.int32, device="meta")
    forward, backward = torch.ops.spbench.sparse_attention, torch.ops.spbench.sparse_attention_backward
    o, lse = q[..., :512], q[..., 0]
    category, _, flops, _, shape, *_ = price_of(forward.default).of((q, rows, chosen, 0.1, 512), {}, (o, lse))
    assert (category, shape) == (Category.ATTENTION, (128, 8, 2048, 544))
    assert flops == 2 * 8 * 128 * 2048 * (576 + 512)
    arguments = o, q, rows, chosen, o, lse, 0.1, 512
    category, _, flops, _, shape, *_ = price_of(backward.default).of(arguments, {}, (q, rows))
    assert (category, shape) == (Category.ATTENTION, (128, 8, 2048, 550))
    assert flops == 2 * 8 * 128 * 2048 * (3 * 576 + 2 * 512)
    scored = q[:, :, :64, :128], rows[..., :128], q[:, :, :64, 0], torch.empty(8, 2, device="meta")
    scores = torch.empty(1, 8, 4096, device="meta")
    category, _, flops, *_ = price_of(torch.ops.spbench.index_scores.default).of(scored, {}, scores)
    assert (category, flops) == (Category.MATMUL, 2 * 8 * 64 * 4096 * (128 + 1))


def test_the_row_says_so_and_a_kept_trace_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: Cell = cell("ring_self_attention")
    assert run_cell(asked).unpriced_operators == {}
    monkeypatch.setattr(price_of(torch.ops.aten.gelu.default), "known", False)
    trace = tracing.trace(asked, events=True)
    assert trace.measurement(None).unpriced_operators == run_cell(asked).unpriced_operators == {"gelu": 1}
    assert differences(from_bytes(to_bytes(trace), asked), trace) == []


@pytest.mark.parametrize(
    ("operator", "known"),
    [
        (torch.ops.aten.mul.Tensor, True),
        (torch.ops.aten.convolution.default, True),  # torch has a formula
        (torch.ops.aten._foreach_add_.List, True),
        (torch.ops.aten.bernoulli_.float, True),
        (torch.ops.aten.linalg_qr.default, False),
        (torch.ops.aten._cdist_forward.default, False),
    ],
)
def test_a_price_is_known_by_table_formula_or_tag(operator: torch._ops.OpOverload, known: bool) -> None:
    assert price_of(operator).known == known


def test_torchs_grouped_matmul_is_priced_by_its_rows() -> None:
    rows, weights, y = (torch.empty(*shape, device="meta") for shape in ((64, 16), (4, 16, 32), (64, 32)))
    category, _, flops, *_ = price_of(torch.ops.aten._grouped_mm.default).of((rows, weights), {}, y)
    assert (category, flops) == (Category.MATMUL, 2 * 64 * 16 * 32)


def test_rows_on_their_way_take_no_time_of_their_own() -> None:
    free = {name: price_of(getattr(torch.ops.spbench, name).default).free for name in ROWS}
    held = {"sent_rows": True, "summed_rows": True, "exchanged_pieces": True, "permute_rows": False}
    assert free == held


def test_torchs_inside_is_as_it_is_known_to_be() -> None:
    check_internals.__wrapped__()


@pytest.mark.parametrize(
    ("name", "replacement", "told"),
    [
        ("fake_tensor", lambda mode, *metadata: mode.from_tensor(torch.ones(2)), "FakeTensor.__new__"),
        ("storage_key", id, "_cdata"),
        ("schema_of", lambda func: func.name(), "_schema"),
        ("in_backward", lambda: False, "_current_graph_task_id"),
    ],
)
def test_what_has_moved_is_named(
    name: str, replacement: object, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_internals, name, replacement)
    with pytest.raises(UserError, match=rf"^torch {torch.__version__[:4]}.*{told}.*tested with torch 2"):
        check_internals.__wrapped__()


def test_a_name_that_is_gone_is_named() -> None:
    with (
        pytest.raises(UserError, match=r"torch\.cpu\.Stram is not"),
        torch_internals.replaced(torch.cpu, {"Stram": None}),
    ):
        pass


B, Z, L, A = 2, 3, 512, 64
PAIRS = {False: L * L, True: L * (L + 1) // 2}


@pytest.mark.parametrize("causal", [False, True])
def test_attention_over_whole_sequences_counts_what_a_block_of_a_ring_does(causal: bool) -> None:
    with fake_mesh({}, 0) as mesh, FakeTensorMode(), Recorder(mesh, events=True) as recorder:
        q, k, v, d_o = (torch.empty(B, Z, L, A, dtype=torch.bfloat16, requires_grad=True) for _ in range(4))
        with recorder.phase("forward"):
            o = F.scaled_dot_product_attention(q, k, v, is_causal=causal)
            o.backward(d_o.detach())
            block_o, lse = flash_attention(q.detach(), k.detach(), v.detach(), A**-0.5, causal)
            flash_attention_backward(
                d_o.detach(), q.detach(), k.detach(), v.detach(), block_o, lse, A**-0.5, causal
            )
    program = recorder.events.program()
    found = [int(flops) for flops in program.flops if flops]
    forward = 2 * 2 * B * Z * PAIRS[causal] * A
    assert found == [forward, forward * 5 // 2] * 2


@tabled(__file__, "bytes_by_hand")
def test_bytes_by_hand(kernel: str, heads: int, nbytes: list[int]) -> None:
    assert inside_backward(kernel, (2, 8, 200, 80), (2, heads, 200, 80), 2) == nbytes


@pytest.mark.parametrize("strategy", ["single", "ulysses", "ring_attention"])
def test_they_are_in_a_trace_between_results_and_what_follows(strategy: str) -> None:
    sizes = {"sp": 2} if strategy != "single" else {}
    options = {"layers": 1, "heads": 4, "kv_heads": 2, "attention": "flash_attention_2"}
    asked = {"strategy": strategy, "sizes": sizes, "model_options": options, "precision": "bf16"}
    cell = Cell.model_validate({"model": "causal-transformer-tiny", "batch": 1, "seq_len": 512, **asked})
    other = cell.model_copy(update={"model_options": {**options, "attention": "flash"}})
    log, plain = tracing.trace(cell).memory, tracing.trace(other).memory
    added = len(log.sizes) - len(plain.sizes)
    backwards = 2 if strategy == "ring_attention" else 1  # rank 0 of 2 attends to one block, or to two
    assert added in (4, 4 * backwards)
    first = next(i for i, kind in log.tags.items() if kind == "workspaces" and log.sizes[i])
    at = log.events.index(first + 1)
    births, after = log.events[at : at + 4], log.events[at + 4 :]
    assert births == [first + n for n in (1, 2, 3, 4)]
    deaths = [*takewhile(lambda event: event < 0, after)]  # others may die then too
    assert {-n for n in births} <= {*deaths}


def test_a_model_that_names_no_kernel_has_those_of_its_card() -> None:
    """Two clusters whose cards run the same kernel share a trace; one whose file has no kernel has none."""
    options = {"layers": 1, "heads": 4, "kv_heads": 2, "attention": "flash"}
    asked = {"model": "causal-transformer-tiny", "strategy": "single", "batch": 1, "seq_len": 512}
    cells = {
        name: Cell.model_validate({**asked, "model_options": options, "cluster": name, "precision": "bf16"})
        for name in ("a100-sxm-80gb", "h100-sxm", "piz-daint-p100")
    }
    sizes = {name: tracing.trace(cell).memory.sizes for name, cell in cells.items()}
    keys = {name: trace_key(cell, 0, False) for name, cell in cells.items()}
    named = cells["h100-sxm"].model_copy(
        update={"model_options": {**options, "attention": "flash_attention_2"}}
    )
    assert sizes["h100-sxm"] == tracing.trace(named).memory.sizes
    assert len(sizes["a100-sxm-80gb"]) == len(sizes["h100-sxm"]) == len(sizes["piz-daint-p100"]) + 4
    assert keys["a100-sxm-80gb"] == keys["h100-sxm"] != keys["piz-daint-p100"]


def test_flash_attention_2_has_values_of_the_head_size_of_keys() -> None:
    """Latent attention of 2 sequences of 64 positions and 3 heads, 24 features a key and 20 a value: values,
    the output and their gradients take as much as keys, and the output's part is copied. In float32, and by
    kernels of two head sizes, they do not."""
    sizes = {"qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 20, "kv_lora_rank": 8}
    options = {"layers": 1, "heads": 3, "hidden": 44, "inner": 36, **sizes}
    asked = {"model": "causal-transformer-tiny", "strategy": "single", "batch": 2, "seq_len": 64}

    def traced(kernel: str, precision: str = "bf16") -> Counter[int]:
        of_model = {"model_options": {**options, "attention": kernel}}
        return Counter(
            tracing.trace(Cell.model_validate({**asked, **of_model, "precision": precision})).memory.sizes
        )

    ours, two_sizes = traced("flash_attention_2"), traced("cudnn")
    wide = 2 * 3 * 64 * 24 * 2
    # values and the output with zeros, the gradients of both
    assert ours[wide] - two_sizes[wide] == 4
    assert traced("flash_attention_2", "fp32") == traced("cudnn", "fp32")
