"""Attention alone on real ranks: values, all three gradients, bytes, and sizes that strategies refuse. The
attention of UPipe's rounds: one graph for all of them.
Gated recurrences on real ranks: values, every gradient and the closed forms of bytes; planted faults;
sizes that are refused. Gated recurrences of packed documents on real ranks: values, every gradient, bytes,
and planted faults."""

import gc
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.functional import scaled_dot_product_attention

from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import Model, model_preset
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.lasp import Lasp
from spbench.impls.strategies.lasp2 import Lasp2
from spbench.impls.strategies.placements import PLACEMENTS
from spbench.impls.strategies.repeated_attention import RepeatedAttention
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ulysses import Ulysses
from tests.measure.verify import document_faults, recurrence_faults
from tests.measure.verify import recurrence_faults as faults
from tests.measure.verify.assertions import assert_green, assert_red
from tests.measure.verify.attention_model import AttentionModel, formula, metered
from tests.slow import slow

CAUSAL, LINEAR = AttentionModel("causal_attention"), AttentionModel("linear_attention")
UNDECAYED = AttentionModel("linear_attention", decay=False)
THREE_HEADS = AttentionModel("linear_attention", heads=3)
OF_ULYSSES = [
    CAUSAL,
    *(replace(CAUSAL, kv_heads=kv_heads) for kv_heads in (4, 2, 1)),
    LINEAR,
    replace(LINEAR, way="left_product"),
    replace(UNDECAYED, way="quadratic"),
    AttentionModel("attention"),
    AttentionModel("attention", masked=True),
]
OF_LASP: list[tuple[type[Strategy], dict[str, bool]]] = [
    (Lasp, {}),
    (Lasp, {"kernel_fusion": False}),
    (Lasp, {"state_caching": False}),
    (Lasp, {"barrier": True}),
    (Lasp2, {}),
]


def cases() -> Iterator[tuple[type[Strategy], Mapping[str, Any], AttentionModel]]:
    for model in OF_ULYSSES:
        yield Ulysses, {}, model
    for model in (THREE_HEADS, replace(UNDECAYED, heads=2)):
        for strategy, options in OF_LASP:
            yield strategy, options, model
    for cls in (RingAttention, AllGatherKV):
        for placement in PLACEMENTS:
            yield cls, {"placement": placement}, replace(CAUSAL, rotary=True)
            yield cls, {"placement": placement}, replace(CAUSAL, kv_heads=4)
        yield cls, {}, replace(CAUSAL, kv_heads=1)
        yield cls, {}, AttentionModel("attention")
        yield cls, {"placement": "striped"}, AttentionModel("attention")
        yield cls, {}, AttentionModel("full_attention")
    yield RingAttention, {}, LINEAR
    yield RingAttention, {}, UNDECAYED


def named(x: Any) -> str:
    return getattr(x, "name", str(x))


def sized() -> Iterator[Any]:
    """All cases on 1 to 4 ranks, in two precisions and lengths; by default on 4, in one of these in turns."""
    for number, case in enumerate(cases()):
        for n in (1, 2, 3, 4):
            # 2 n: a position or two a rank
            yield slow(*case, n, [("fp64", 24), ("fp64", 2 * n), ("bf16", 24)])
        yield *case, 4, [("fp64", 8 if number % 2 else 24)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(("strategy", "options", "model", "n", "sizes"), [*sized()], ids=named)
def test_all_three_gradients(
    pool: RankPool,
    strategy: type[Strategy],
    options: Mapping[str, Any],
    model: AttentionModel,
    n: int,
    sizes: list[tuple[str, int]],
) -> None:
    for dtype, seq_len in sizes:
        assert_green(pool, Case(strategy, model, "attention", dtype, 3, seq_len, 0, options), n)


@pytest.mark.parametrize("fault", recurrence_faults.OF_STATES)
def test_planted_faults_of_states_are_red(pool: RankPool, fault: type[Strategy]) -> None:
    # one position of weak decay is less than bf16 can tell
    for dtype in ("fp64",) if fault is recurrence_faults.ChunkDecayOffByOne else ("fp64", "bf16"):
        assert_red(pool, Case(fault, THREE_HEADS, "attention", dtype), 4)


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("heads", "model"),
    [(6, model) for model in OF_ULYSSES] + [(2, CAUSAL)] + [slow(2, model) for model in OF_ULYSSES[1:]],
    ids=str,
)
def test_heads_that_ranks_do_not_divide_are_padded(pool: RankPool, heads: int, model: AttentionModel) -> None:
    model = replace(model, heads=heads, kv_heads=None if model.kv_heads is None else heads // 2)
    assert_green(pool, Case(Ulysses, model, "attention", options={"pad_heads": True}), 4)
    refused = verify_case(pool, Case(Ulysses, model, "attention"), 4)
    assert (refused.status, "option pad_heads" in refused.reason) == ("unsupported", True)


def test_masks_of_own_queries_are_refused() -> None:
    site, _ = AttentionModel("attention").sites(1, 24)
    rows = type(site)(site.kind, 1, {**site.dims, "mask_rows": 24})
    with pytest.raises(Unsupported, match="same for all queries; use mask_shape keys"):
        Ulysses.planned(2).check([rows])


@pytest.mark.parametrize("length", [2048, 4194304])
def test_bytes_of_lasp_do_not_depend_on_the_length(length: int) -> None:
    """Table 1: B d^2 / h elements a layer forward, d = Z A, here as float32; of a rank in the middle."""
    model = AttentionModel("linear_attention", heads=16, head_size=128, key_size=128)
    with fake_mesh({"sp": 64}, 1) as mesh, FakeTensorMode():
        sent = metered(mesh, Lasp, {}, model, torch.bfloat16, length, batch=1)
    state = 2048**2 // 16 * 4
    assert sent == {("forward", "send"): state, ("backward", "send"): state}


@pytest.mark.parametrize("n", [2, 4, 12])
def test_bytes_of_ulysses_are_those_of_the_paper(n: int) -> None:
    """Section 3.2: 4 messages of M/N forward, M = B L Z A elements, of which (N-1)/N leave the rank."""
    sent = formula(n, Ulysses, {}, CAUSAL, torch.float32, 24)
    one_way = 4 * (3 * 24 * 12 * 4) * 4 * (n - 1) / n**2
    assert sent == {("forward", "all_to_all"): one_way, ("backward", "all_to_all"): one_way}


@pytest.mark.parametrize(
    ("n", "kv_heads", "sent"),
    [(2, 4, 4), (4, 4, 4), (3, 4, 12), (4, 2, 4), (12, 4, 12), (3, 1, 3), (4, 1, 4)],
)
def test_keys_are_sent_with_as_few_heads_as_ranks_allow(n: int, kv_heads: int, sent: int) -> None:
    """Their own where N divides them, else the least common multiple; q and the output with all 12."""
    payload = 3 * (24 // n) * 4 * 4
    entries = Ulysses.planned(n).communication(replace(CAUSAL, kv_heads=kv_heads).sites(3, 24), 4)
    forward = {t.purpose: (t.count, t.payload_bytes // payload) for t in entries if t.phase == "forward"}
    assert forward == {"q and the output": (2, 12), "k and v": (2, sent)}


def test_every_rank_has_one_role() -> None:
    for n in range(1, 6):
        assert sorted(rank for role in Lasp.roles("sp", n) for rank in role) == list(range(n))


def test_it_is_given_up_with_its_graph() -> None:
    """A cycle through a graph, which nothing collects, would keep the process groups of a strategy."""

    class Attend:
        def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return scaled_dot_product_attention(q, k, v, is_causal=True)

    attend, x = Attend(), torch.randn(1, 2, 4, 3)
    attention, held = RepeatedAttention(attend), weakref.ref(attend)
    attention.forward(x, x, x)
    del attend, attention
    gc.collect()
    assert held() is None


ONE = {"layers": 1}
#: of Gated DeltaNet with as many heads of keys, of Mamba-2 with fewer
MIXERS = ["gated-deltanet-tiny", "mamba2-tiny"]


@pytest.mark.covering(1)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("fault", faults.OF_RECURRENCES)
def test_planted_faults_are_red(pool: RankPool, fault: type[Strategy], name: str) -> None:
    assert_red(pool, Case(fault, model_preset(name, ONE), "attention"), 3, "output y", "gradient of")


def test_heads_that_ranks_can_share_out_are_sent_as_they_are() -> None:
    strategy, heads = Ulysses.planned(4), torch.zeros(1, 3, 4, 5)
    assert strategy._for_ranks(heads, 2, 4) is heads
    assert strategy._for_ranks(heads[:, :, :2], 2, 4).shape == (1, 3, 4, 5)


#: on 4 ranks of 6 positions: one begins right before an edge, one at it, one is longer than a rank; on 2
#: ranks of 12 several lie within one
DOCUMENTS = (5, 1, 11, 7)


def packed(name: str, **options: object) -> Model:
    return model_preset(name, {"layers": 1, "documents": DOCUMENTS, **options})


@pytest.mark.parametrize(
    ("fault", "name"),
    [
        (fault, name) if (i + j) % 2 == 0 else slow(fault, name)
        for i, fault in enumerate(document_faults.OF_RECURRENCES)
        for j, name in enumerate(MIXERS)
    ],
)
def test_planted_faults_are_red_of_documents(pool: RankPool, fault: type[Strategy], name: str) -> None:
    row = assert_red(pool, Case(fault, packed(name), "model"), 4, "output")
    assert "of other documents" in row.verdict, row
