"""Ring Attention and gathered keys and values: bytes, memory, within other strategies, misuse of a ring. The
halo of a window, against a mask of all pairs, for random windows and packings."""

import random
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.plan import plan, rank_classes
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.beside_values import seen_pairs
from spbench.impls.attended import Attended
from spbench.impls.collectives import Ring
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.models.model import model_preset
from spbench.impls.place import Place
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.meetings import Meetings
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.ring_attention import RingAttention
from tests.impls.strategies.test_packed_memory import count, packings
from tests.measure.verify.attention_model import AttentionModel, formula
from tests.slow import slow


@pytest.mark.parametrize("n", [2, 8])
def test_as_many_bytes_as_a_ring_sends(n: int) -> None:
    """Keys and values take N - 1 hops either way; the sums of their gradients take N - 1 here, and in a ring
    one more, to come home."""
    case: Any = {}, AttentionModel(), torch.bfloat16, 2 * n
    gathers, travels = formula(n, AllGatherKV, *case), formula(n, RingAttention, *case)
    assert gathers["forward", "all_gather"] == travels["forward", "send"]
    assert gathers["backward", "all_gather"] == gathers["forward", "all_gather"]
    sums = travels["backward", "send"] - travels["forward", "send"]
    assert gathers["backward", "reduce_scatter"] * n == sums * (n - 1)


def cell(strategy: str, sizes: dict[str, int], **changes: Any) -> Cell:
    settings = {"model": "causal-transformer-tiny", "strategy": strategy, "sizes": sizes, "batch": 4}
    return Cell.model_validate(settings | {"seq_len": 24} | changes)


def peaks_of_ranks(n: int, strategy: str, **options: str) -> tuple[list[int], int]:
    """Peak bytes of every rank, and the largest of the ranks that are traced for their classes."""
    of: Any = {"precision": "bf16", "model_options": {"vocabulary": 16}, "strategy_options": options}
    asked = cell(strategy, {"sp": n}, seq_len=768, **of)
    peaks = [tracing.trace(asked, rank).memory.peak().nbytes for rank in range(n)]
    return peaks, max(peaks[each.first] for each in rank_classes(asked))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("options", [*({"placement": p} for p in PLACEMENTS), {"gradients": "ring"}], ids=str)
@pytest.mark.parametrize("n", [4, slow(3)])
def test_no_peak_is_larger_than_those_of_the_ranks_that_are_traced(n: int, options: dict[str, str]) -> None:
    peaks, traced = peaks_of_ranks(n, "all_gather_kv", **options)
    assert max(peaks) == traced


@pytest.mark.one_in(2)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_no_rank_of_a_ring_holds_more_than_the_last(placement: str) -> None:
    """Which stands for all: one that skips blocks must not keep the gradients of the block before."""
    of: Any = {"batch": 2, "seq_len": 4096, "precision": "bf16", "strategy_options": {"placement": placement}}
    asked = cell("ring_attention", {"sp": 4}, **of)
    peaks = [tracing.trace(asked, rank).memory.peak().nbytes for rank in range(4)]
    assert peaks == [peaks[-1]] * 4


def test_gradients_round_a_ring_leave_half_a_block_out_of_the_peak() -> None:
    """The last rank, which is traced, holds gradients of half of the keys of each other rank."""
    peaks, traced = peaks_of_ranks(4, "all_gather_kv", placement="zigzag", gradients="ring")
    half_a_block = 4 * (768 // 4) * 48 * 2  # of k and v in bfloat16
    assert max(peaks) - half_a_block <= traced <= max(peaks)


@pytest.mark.covering(1)
@pytest.mark.parametrize(
    ("model", "placement"),
    [
        ("causal-transformer-tiny", "zigzag"),
        ("st-dit-tiny", "contiguous"),
        *(slow("causal-transformer-tiny", placement) for placement in ("contiguous", "striped")),
    ],
)
@pytest.mark.parametrize("around", ["tensor_parallel", "megatron_sp", "ulysses"])
def test_within_another_strategy(around: str, model: str, placement: str) -> None:
    axes = ("sp", "cp") if around == "ulysses" else ("tp", "sp")
    sizes = {**dict.fromkeys(axes, 2), "dp": 2}
    of: Any = {"model_options": {"checkpointing": True}, "strategy_options": {"placement": placement}}
    asked = cell(f"{around}+all_gather_kv", sizes, model=model, precision="bf16", **of)
    measured = VirtualEngine().measure(asked)
    assert measured.formula_difference == []
    assert {*axes} <= {row["axis"] for row in measured.communication}


def misuse(mesh: DeviceMesh) -> list[str]:
    ring, x = Ring(mesh.get_group("sp")), torch.zeros(3)
    said = []

    def fails(what: Any) -> None:
        with pytest.raises(RuntimeError) as raised:
            what()
        said.append(str(raised.value))

    fails(ring.finish)
    ring.start(x, torch.zeros(2))
    fails(lambda: ring.start(x))
    x.add_(1)
    fails(ring.finish)
    return said


def test_misuse_of_the_ring_raises(pool: RankPool) -> None:
    for said in pool.run({"sp": 2}, misuse):
        assert [s.split(";")[0] for s in said] == [
            "nothing is under way",
            "tensors are under way already",
            "a tensor was written to while it was being sent",
        ]


def linear_attention_of_ones(mesh: DeviceMesh, values: list[float]) -> float:
    strategy = RingAttention(Place.on(mesh))
    one, mine = (torch.tensor(x, dtype=torch.bfloat16).view(1, 1, 1, 1) for x in (1.0, values[strategy.rank]))
    return strategy.linear_attention(one, one, mine, DecayMask()).item()


def test_linear_attention_adds_up_in_float32(pool: RankPool) -> None:
    """In bfloat16 three times 0.75 added to 256, whose next number is 258, would be lost."""
    assert pool.run({"sp": 4}, linear_attention_of_ones, [0.75, 0.75, 0.75, 256.0])[-1] == 258


def test_only_heads_of_keys_and_values_travel() -> None:
    """A third of them, a third of the bytes."""
    whole, third = (
        formula(3, RingAttention, {}, AttentionModel(kv_heads=n), torch.float32, 24) for n in (12, 4)
    )
    assert third == {key: sent / 3 for key, sent in whole.items()}


def chunk(rank: int, length: int) -> slice:
    return slice(rank * length, (rank + 1) * length)


@pytest.mark.parametrize("drawn", [60, slow(600)])
def test_no_row_more_or_less_than_the_window_needs(drawn: int) -> None:
    draw = random.Random(0)
    for _ in range(drawn):
        size, length = draw.randint(2, 6), draw.randint(1, 9)
        window = draw.randint(1, size * length - 1)
        mask = seen_pairs(Attended(window=window), size * length)
        last = size - 1  # which has all the others before it
        needed = [
            int(mask[chunk(last, length), chunk(last - d, length)].any(0).sum()) for d in range(1, size)
        ]
        rows = Meetings("contiguous", last, size, length, Attended(window=window)).halo
        assert rows == tuple(n for n in needed if n)
        assert sum(needed) == min(window - 1, (size - 1) * length)


@pytest.mark.parametrize("drawn", [40, slow(400)])
def test_queries_see_in_the_halo_what_a_mask_says(drawn: int) -> None:
    """By chunks, as in a ring, and in one piece, as gathered; what comes from the far end is not seen."""
    for attended, size, length in packings(drawn, 7):
        attended = attended if attended.window else Attended(attended.documents, 1 + len(attended.documents))
        mask = seen_pairs(attended, size * length).int()
        for rank in range(size):
            meetings = Meetings("contiguous", rank, size, length, attended)
            halo = meetings.halo or ()
            mine = mask[chunk(rank, length)]
            together = torch.zeros(length, sum(halo) + length, dtype=torch.int)
            count(together, meetings.of_halo())
            assert together.sum() == mine.sum()
            first = rank * length - sum(halo)
            wrapped, seen = max(0, -first), max(0, first)
            assert torch.equal(together[:, wrapped:], mine[:, seen : (rank + 1) * length])
            for owner in range(size):
                met = torch.zeros(length, length, dtype=torch.int)
                if (found := meetings.of(owner)) is not None:
                    queries, keys, what = found
                    count(met[queries, keys], what)
                    back = rank - owner
                    assert keys.start >= length - [length, *halo][back]
                assert torch.equal(met, mine[:, chunk(owner, length)])


@pytest.mark.parametrize("strategy", [RingAttention, AllGatherKV])
@pytest.mark.parametrize(("window", "rows"), [(1, 0), (2, 1), (7, 6), (14, 13), (19, 18), (23, 18)])
def test_as_many_bytes_as_the_window_has(strategy: type[PlacedChunks], window: int, rows: int) -> None:
    """Two bytes an element, gradients four; of 24 positions on 4 ranks there are 18 before the last chunk."""
    model = model_preset("attention-call-tiny", {"window": window})  # 4 heads of keys of 4 features
    sent = {"forward": 0, "backward": 0}
    for t in strategy.planned(4).communication(model.sites(3, 24), 2):
        assert t.collective == "send"
        sent[t.phase] += t.count * t.payload_bytes
    row = 2 * 3 * 4 * 4
    assert sent == {"forward": rows * row * 2, "backward": rows * row * (2 + 4)}


@pytest.mark.parametrize("strategy", [RingAttention, AllGatherKV])
def test_a_window_of_the_whole_sequence_is_none(strategy: type[PlacedChunks]) -> None:
    sites = [model_preset("attention-call-tiny", o).sites(3, 24) for o in ({}, {"window": 24})]
    with_window, without = ([*strategy.planned(4).communication(s, 2)] for s in sites)
    assert with_window == without


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["ring_attention", "all_gather_kv"])
@pytest.mark.parametrize("window", [9, 13, 20, 40])
def test_no_rank_holds_more_than_those_that_are_traced(strategy: str, window: int) -> None:
    """A part of a chunk of 12, all of it, two and four; bytes are the closed form's on each rank."""
    asked = Cell.model_validate(
        {
            "model": "causal-transformer-tiny-gqa",
            "model_options": {"window": window, "sinks": True, "vocabulary": 16},
            "strategy": strategy,
            "sizes": {"sp": 5},
            "batch": 2,
            "seq_len": 60,
            "precision": "bf16",
        }
    )
    traces = [tracing.trace(asked, rank) for rank in range(5)]
    planned = plan(asked)
    for rank, trace in enumerate(traces):
        assert not planned.difference(trace.communication, rank)
    peaks = [trace.memory.peak().nbytes for trace in traces]
    assert max(peaks) == max(peaks[each.first] for each in rank_classes(asked))
