"""Steps of the strategies that sequence parallelism is compared with, on sequences and on grids: closed form,
virtual ranks and real ranks send the same bytes.
Strategies around each other: virtual ranks, real ranks and closed forms agree, axis by axis."""

import pickle
from fractions import Fraction
from typing import Any

import pytest

from spbench.bench.cell import Cell, Sizes, TrainingOptions
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.impls.place import ALONE
from spbench.impls.registries import backends, strategies, strategy_class
from spbench.impls.strategies.nesting import Nesting, nesting, pairs
from spbench.impls.strategies.upipe import UPipe
from tests.measure.engines.cells import ATTEMPTS, on_real_ranks, seen
from tests.slow import mostly_slow

GRID = "st-dit-tiny"


def cell_of(strategy: str, n: int, model: str = GRID, **changes: Any) -> Cell:
    sizes, batch = strategy_class(strategy).sizes_for(n), 2 if model == GRID else 3
    options = {"model": model, "strategy": strategy, "sizes": sizes, "batch": batch, "seq_len": 24}
    return Cell.model_validate(options | changes)


@pytest.mark.parametrize("n", [2, 3])
def test_what_is_told_is_of_a_rank_that_sends(n: int) -> None:
    """The last rank of a ring sends no state forward, and may yet have the largest peak."""
    told = VirtualEngine().measure(cell_of("lasp", n, "tnl-tiny"))
    metered, planned = (
        sum(row["sent_bytes"] for row in rows if (row["phase"], row["collective"]) == ("forward", "send"))
        for rows in (told.communication, told.formula)
    )
    assert metered == planned > 0


# -- grids ---------------------------------------------------------------------------------------------------


def inference(strategy: str, n: int, **changes: Any) -> Cell:
    return cell_of(strategy, n, precision="bf16", training={"step": "inference"}, **changes)


@pytest.mark.parametrize("strategy", ["dsp", "megatron_sp", "ring_attention"])
def test_inference_is_the_forward_of_a_training_step(strategy: str) -> None:
    """It sends what a forward does, and holds the weights and little else."""
    trained = VirtualEngine().measure(cell_of(strategy, 4, precision="bf16"))
    inferred = VirtualEngine().measure(inference(strategy, 4))
    assert inferred.formula_difference == []
    assert inferred.communication == [row for row in trained.communication if row["phase"] == "forward"]
    assert inferred.peak_memory_bytes < trained.peak_memory_bytes / 3
    assert inferred.peak_held["parameters"] > 0
    assert not inferred.peak_held.get("gradients", 0) + inferred.peak_held.get("optimizer_state", 0)


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [3, 12])
def test_bytes_are_those_of_the_paper(n: int) -> None:
    """Section 3.3, of a layer of two dims forward, M elements in a grid: DSP 2 M/N and Ulysses 4 M/N, of
    which (N-1)/N leave the rank; Megatron-SP 8 M, an all-gather and a reduce-scatter each of attention along
    two dims, attention to the text and the MLP, of which (N-1)/N; Ring Attention 2 M, of which (N-1)/N."""
    grid = 2 * 12 * 24 * 24 * 4  # B T S H float32
    per_layer = {
        ("dsp", "all_to_all"): Fraction(2 * grid, n) * Fraction(n - 1, n),
        ("ulysses", "all_to_all"): Fraction(4 * grid, n) * Fraction(n - 1, n),
        ("ring_attention", "send"): 2 * grid * Fraction(n - 1, n),
    }
    for (strategy, collective), expected in per_layer.items():
        assert sent(strategy, n)["forward", collective] == expected
    by_blocks = sent("megatron_sp", n)
    both = by_blocks["forward", "all_gather"] + by_blocks["forward", "reduce_scatter"]
    assert both == 8 * grid * Fraction(n - 1, n)


def sent(strategy: str, n: int) -> dict[tuple[str, str], Fraction]:
    cell = cell_of(strategy, n, seq_len=12 * 24, model_options={"layers": 1})
    return tracing.trace(cell).communication.sent_bytes()


ZIGZAG: dict[str, Any] = {"strategy_options": {"placement": "zigzag"}}
#: a pair, a model, further fields
CELLS: list[tuple[str, str, dict[str, Any]]] = [
    ("tensor_parallel+ring_self_attention", "bert-tiny", {"precision": "fp16"}),
    ("megatron_sp+ring_self_attention", "bert-tiny-linformer", {"precision": "fp16"}),
    ("megatron_sp+ring_attention", "causal-transformer-tiny", ZIGZAG),
    ("ulysses+ring_attention", "causal-transformer-tiny", ZIGZAG),
    ("tensor_parallel+lasp", "linear-llama3-tiny", {"model_options": {"checkpointing": True}}),
    ("tensor_parallel+dsp", "st-dit-tiny", {}),
]


def nested_cell(strategy: str, model: str, sizes: dict[str, int], changes: dict[str, Any]) -> Cell:
    fields = {"batch": 4, "seq_len": 24, "precision": "fp32"} | changes
    return Cell(model=model, strategy=strategy, sizes=Sizes(**sizes), **fields)


#: each strategy around, and what is within: attention in turns, in a ring, and states
DEFAULT_PAIRS = ("megatron_sp+ring_self_attention", "ulysses+ring_attention")


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("strategy", "model", "changes"),
    [pytest.param(*of, id=of[0], marks=[] if of[0] in DEFAULT_PAIRS else pytest.mark.slow) for of in CELLS],
)
def test_virtual_ranks_are_as_real_ones(
    pool: RankPool, strategy: str, model: str, changes: dict[str, Any]
) -> None:
    """Every rank sends the same operations over the same axes, and holds the same bytes at its peak, where
    Gloo's reduce-scatter makes no copies."""
    (sizes,) = nesting(strategy).meshes(4)
    cell = nested_cell(strategy, model, sizes, changes)
    virtually = [seen(tracing.trace(cell, rank)) for rank in range(4)]
    exact = not any(operation.collective == "reduce_scatter" for v in virtually for operation in v.counts)
    really = on_real_ranks(pool, sizes, cell, virtually, attempts=ATTEMPTS if exact else 1)
    assert [r.counts for r in really] == [v.counts for v in virtually]
    assert not exact or [r.peak for r in really] == [v.peak for v in virtually]
    assert not any(r.difference or v.difference for r, v in zip(really, virtually, strict=True))
    assert {operation.axis for v in virtually for operation in v.counts} >= set(sizes)


@pytest.mark.parametrize("backend", mostly_slow(backends(), "ddp", "megatron", "zero3", "fsdp_flat"))
def test_four_axes_send_what_the_closed_form_says(backend: str) -> None:
    pp = 2 if backends()[backend].pipelined else 1
    training = TrainingOptions(backend=backend, micro_batches=2)
    sizes = {"dp": 2, "pp": pp, "tp": 3, "sp": 4}
    cell = nested_cell("megatron_sp+ring_self_attention", "bert-tiny-linformer", sizes, {"precision": "fp16"})
    measured = VirtualEngine().measure(cell.model_copy(update={"training": training}))
    assert measured.formula_difference == []
    axes = {row["axis"] for row in measured.communication}
    assert axes >= {"tp", "sp"}
    # of what is not split, of heads and features, of columns of the sequence
    summed = {"dp_tp_sp", "dp_sp", "dp_tp"} if backend != "legacy_ddp" else {"tp_sp", "sp", "tp", "dp"}
    assert axes >= summed


def test_a_tensor_between_stages_is_sent_in_parts_of_both_axes() -> None:
    sizes = {"pp": 2, "tp": 2, "sp": 2}
    cell = nested_cell("tensor_parallel+ring_self_attention", "bert-tiny", sizes, {})
    first = tracing.trace(cell, rank=0).measurement(None)
    (sent,) = (row for row in first.communication if (row["phase"], row["axis"]) == ("forward", "pp"))
    assert sent["collective"] == "send"
    assert sent["sent_bytes"] == 4 * 24 * 48 * 4 / (2 * 2)  # B L H in float32


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("ring_attention+ulysses", r"cannot be around another strategy; write ulysses\+ring_attention"),
        ("ring_attention+lasp", r"ring_attention cannot be around another strategy$"),
        ("ulysses+tensor_parallel", "tensor_parallel splits weights, which only the outermost strategy can"),
        ("ulysses+single", "single uses no ranks; leave it out"),
        ("tensor_parallel+ulysses+ulysses+ring_attention", "no axis is left for ring_attention"),
    ],
)
def test_what_cannot_be_around_what(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        nesting(name)


def test_pairs_are_all_that_can_be() -> None:
    found = {pair.name for pair in pairs()}
    inner = {name for name, cls in strategies().items() if cls.axes and not cls.splits_features}
    assert found == {
        *(f"{outer}+{name}" for outer in ("tensor_parallel", "megatron_sp", "odysseus") for name in inner),
        *(f"ulysses+{name}" for name in inner - {"ulysses"}),
        # all that positions of causal attention meet by
        *(f"upipe+{name}" for name in inner - {"upipe"} if UPipe.meets & strategies()[name].meets),
    }


def test_options_of_all_are_given_by_name() -> None:
    found = nesting("ulysses+ring_attention")
    outer = found.configured(ALONE, {"pad_heads": True, "placement": "zigzag"})
    assert (outer.options.pad_heads, outer.within.options.placement) == (True, "zigzag")  # type: ignore[attr-defined]
    assert (outer.axes, outer.within.axes) == (("sp",), ("cp",))
    with pytest.raises(KeyError, match=r"strategy ulysses\+ring_attention has no option 'turn'; it has: "):
        found.configured(ALONE, {"turn": 1})
    with pytest.raises(ValueError, match=r"placement is one of contiguous, .*, by_work, not 'spiral'"):
        found.configured(ALONE, {"placement": "spiral"})


def test_a_nesting_is_pickled_by_its_classes() -> None:
    found = nesting("tensor_parallel+ring_attention")
    assert found.options_type is not None  # a class made here, which cannot be pickled
    assert pickle.loads(pickle.dumps(found)) == Nesting(found.classes)
