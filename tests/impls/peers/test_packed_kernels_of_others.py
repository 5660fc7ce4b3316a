"""Recurrences and packed attention beside the code of others, on a CPU.

Skipped where a package is missing: fla-core and ring-flash-attn are of the extra peers, transformers is not.
"""

from collections.abc import Callable, Iterator
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate, pairwise
from types import ModuleType
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.beside_values import document_of_positions
from spbench.impls.attended import Attended, Range, Ranges
from spbench.impls.discovery import INSTALL
from spbench.impls.kernels.gated_delta import GatedDelta
from spbench.impls.kernels.gated_norm import l2_norm
from spbench.impls.kernels.ranged_attention import (
    attention_to_block,
    attention_to_block_backward,
    ranged_flash_attention,
)
from spbench.impls.kernels.recurrence import gated_recurrence
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.recurrent_mixer import Mamba2
from spbench.impls.peers import flash_attn_stand_in
from spbench.impls.place import Place
from spbench.impls.registries import model_preset
from spbench.impls.strategies.all_gather_kv import AllGatherKV
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.placed_chunks import PlacedChunks
from spbench.impls.strategies.ring_attention import RingAttention
from tests.impls.kernels.made import made

#: two end within a block of 64, one is longer than one
DOCUMENTS = (30, 1, 90, 23)
LENGTH, CUT = sum(DOCUMENTS), [0, *accumulate(DOCUMENTS)]
STARTS = CUT[1:-1]


def assert_like(
    ours: Callable[..., Tensor], others: Callable[..., Tensor], error: float, *inputs: Tensor
) -> None:
    """Outputs and the gradients of all inputs, by the norm of the difference over that of the other's."""
    found = []
    for run in (ours, others):
        y = run(*inputs)
        weight = made(*y.shape, dtype=y.dtype, seed=9).detach()
        found.append([y, *torch.autograd.grad((y * weight).sum(), inputs)])
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).norm() <= error * theirs.norm()


def one_by_one(run: Callable[..., Tensor], *whole: Tensor) -> Tensor:
    """Attention of each document alone, along dim 1."""
    return torch.cat([run(*(x[:, a:b] for x in whole)) for a, b in pairwise(CUT)], 1)


@pytest.mark.parametrize("name", ["naive_recurrent_gated_delta_rule", "naive_chunk_gated_delta_rule"])
def test_gated_delta_rule_of_fla(name: str) -> None:
    """fla's plain forms, which compute in float32."""
    naive: Any = pytest.importorskip("fla.ops.gated_delta_rule.naive")

    def theirs(q: Tensor, k: Tensor, v: Tensor, g: Tensor, b: Tensor) -> Tensor:
        def alone(*parts: Tensor) -> Tensor:
            result: Tensor = getattr(naive, name)(*parts)[0]
            return result

        return one_by_one(alone, q, k, v, b, g)

    q, k = (made(1, LENGTH, 2, 8, dtype=torch.float32, seed=seed) for seed in (0, 1))
    v, g, b = (
        made(1, LENGTH, 2, *size, dtype=torch.float32, seed=s) for s, size in ((2, (6,)), (3, ()), (4, ()))
    )
    inputs = [x.detach().requires_grad_() for x in (q, l2_norm(k), v, -g.abs(), b.sigmoid())]
    assert_like(lambda *x: gated_recurrence(GatedDelta, *x, starts=STARTS), theirs, 3e-6, *inputs)


def test_mamba2_mixer_of_transformers() -> None:
    """The mixer of a layer with the same weights, each document of ours alone in theirs."""
    mamba2: Any = pytest.importorskip("transformers.models.mamba2.modeling_mamba2")
    heads, groups, size, state, hidden = 4, 2, 12, 16, 24
    model: Any = model_preset("mamba2-tiny", {"hidden": hidden})
    config: Any = pytest.importorskip("transformers").Mamba2Config(
        num_heads=heads, n_groups=groups, head_dim=size, state_size=state, hidden_size=hidden, expand=2,
        chunk_size=64, num_hidden_layers=1, layer_norm_epsilon=model.norm_epsilon,
    )  # fmt: skip
    torch.manual_seed(0)
    theirs = mamba2.Mamba2Mixer(config, 0).eval()  # in training it asks for a fused kernel
    ours: Any = Mamba2(heads, groups, state, size).build(model, Strategy())
    values, keys = heads * size, groups * state
    gate, x, b, c, step = theirs.in_proj.weight.split([values, values, keys, keys, heads])
    with torch.no_grad():
        for into, weight in zip(ours.project.parameters(), (c, b, x, gate, step), strict=True):
            into.copy_(weight)
        for name, of_theirs in (
            ("convolutions", theirs.conv1d.weight.squeeze(1)),
            ("biases", theirs.conv1d.bias),
        ):
            x, b, c = of_theirs.split([values, keys, keys])
            for into, weight in zip(getattr(ours, name), (c, b, x), strict=True):
                into.copy_(weight)
        for into, weight in (
            (ours.A_log, theirs.A_log),
            (ours.dt_bias, theirs.dt_bias),
            (ours.D, theirs.D),
            (ours.norm, theirs.norm.weight),
            (ours.out.weight, theirs.out_proj.weight),
        ):
            into.copy_(weight)
    hidden_states = made(2, LENGTH, hidden, dtype=torch.float32)
    places = Places(Strategy(), LENGTH, hidden_states, Attended(DOCUMENTS))
    assert_like(lambda x: ours(x, places), lambda x: one_by_one(theirs, x), 3e-6, hidden_states)


@pytest.mark.parametrize("heads_of_keys", [4, 2])
def test_flex_attention_of_torch(heads_of_keys: int) -> None:
    document = document_of_positions(Attended(DOCUMENTS), LENGTH)

    def seen(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (document[query] == document[key])

    mask = create_block_mask(seen, None, None, LENGTH, LENGTH, device="cpu")

    def theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        result = flex_attention(q, k, v, block_mask=mask, enable_gqa=heads_of_keys < 4)
        assert isinstance(result, Tensor)
        return result

    whole = [(0, LENGTH)]
    ranges = Attended(DOCUMENTS).ranges(whole, whole)
    # which has no backward on CPUs
    q, k, v = (made(2, z, LENGTH, 8, seed=z).detach() for z in (4, heads_of_keys, heads_of_keys))
    torch.testing.assert_close(
        ranged_flash_attention(q, k, v, ranges), theirs(q, k, v), rtol=1e-12, atol=1e-13
    )


def _ranges(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, causal: bool) -> Ranges:
    """What FlashAttention's varied lengths mean: a causal mask ends at the last of both."""
    found = []
    for (a, b), (c, d) in zip(pairwise(cu_seqlens_q.tolist()), pairwise(cu_seqlens_k.tolist()), strict=True):
        m, n = b - a, d - c
        found.append(Range(a, m, c, n, 1 - m, n - m if causal else n - 1))
    return Ranges.of(found)


def _heads_first(*tensors: Tensor) -> list[Tensor]:
    """[T, Z, A] -> [1, Z, T, A] each."""
    return [x.transpose(0, 1).unsqueeze(0) for x in tensors]


def _varlen_forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    softmax_scale: float, causal: bool, **_: Any,
) -> tuple[Tensor, Tensor, None, None]:  # fmt: skip
    seen = _ranges(cu_seqlens_q, cu_seqlens_k, causal)
    o, lse = attention_to_block(*_heads_first(q, k, v), softmax_scale, seen)
    return o.squeeze(0).transpose(0, 1), lse.squeeze(0), None, None


def _varlen_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, softmax_lse: Tensor,
    dq: Tensor, dk: Tensor, dv: Tensor, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor,
    softmax_scale: float, causal: bool, **_: Any,
) -> None:  # fmt: skip
    seen = _ranges(cu_seqlens_q, cu_seqlens_k, causal)
    given = *_heads_first(dout, q, k, v, out), softmax_lse.unsqueeze(0)
    gradients = attention_to_block_backward(*given, softmax_scale, seen)
    for into, gradient in zip((dq, dk, dv), gradients, strict=True):
        into.copy_(gradient.squeeze(0).transpose(0, 1))


def _module(name: str) -> ModuleType:
    """One of ring-flash-attn's, with kernels of a CPU."""
    flash_attn_stand_in.install()
    module = import_module(f"ring_flash_attn.{name}")
    vars(module).update(
        _flash_attn_varlen_forward=_varlen_forward, _flash_attn_varlen_backward=_varlen_backward
    )
    return module


def _llama3(group: dist.ProcessGroup, cut: Tensor, *parts: Tensor) -> Tensor:
    module: Any = _module("llama3_flash_attn_varlen")
    how = module.llama3_flash_attn_prepare_cu_seqlens(cut, True, group.rank(), group.size())
    *lengths, keys = how
    result: Tensor = module.llama3_flash_attn_varlen_func(
        *parts, *lengths, heads_k_stride=1, local_k_slice=keys, causal=True, group=group
    )
    return result


def _zigzag(group: dist.ProcessGroup, cut: Tensor, *parts: Tensor) -> Tensor:
    module: Any = _module("zigzag_ring_flash_attn_varlen")
    mine = cut // group.size()
    longest = int((mine[1:] - mine[:-1]).max())
    result: Tensor = module.zigzag_ring_flash_attn_varlen_func(
        *parts, mine, longest, causal=True, group=group
    )
    return result


#: theirs, ours, its placement
VARLEN: dict[str, tuple[Callable[..., Tensor], type[PlacedChunks], str]] = {
    "llama3_flash_attn_varlen": (_llama3, AllGatherKV, "contiguous"),
    "zigzag_ring_flash_attn_varlen": (_zigzag, RingAttention, "zigzag_by_document"),
}


def errors_beside_theirs(mesh: DeviceMesh, name: str, dtype: torch.dtype) -> list[float]:
    """On this rank, of the output and the gradients of q, k and v: theirs beside ours, relative."""
    theirs, cls, placement = VARLEN[name]
    attended, place = Attended((32, 8, 64, 24)), Place.on(mesh)  # 2 ranks twice divide each
    strategy = cls.configured(place, {"placement": placement})
    strategy.pack(attended)
    whole = [made(1, z, 128, 8, dtype=dtype, seed=z).detach() for z in (4, 2, 2, 4)]
    *parts, d_o = (strategy.shard(x, 2).contiguous() for x in whole)
    cut = torch.tensor([0, *attended.ends], dtype=torch.int32)
    group = place.group("sp")

    def of_theirs(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        flat = [x.squeeze(0).transpose(0, 1).contiguous() for x in (q, k, v)]
        return theirs(group, cut, *flat).transpose(0, 1).unsqueeze(0)

    found = []
    for run in (lambda *x: strategy.causal_attention(*x, attended), of_theirs):
        inputs = [x.detach().clone().requires_grad_() for x in parts]
        y = run(*inputs)
        found.append([y, *torch.autograd.grad(y, inputs, d_o)])
    return [float((a.detach() - b.detach()).norm() / a.detach().norm()) for a, b in zip(*found, strict=True)]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Ranks of their own, as they find a module ``flash_attn`` that other tests must not find."""
    if find_spec("ring_flash_attn") is None:  # importing it asks for flash_attn
        pytest.skip(f"ring-flash-attn is not installed; {INSTALL}")
    with RankPool(2) as pool:
        yield pool


@pytest.mark.parametrize("name", VARLEN)
def test_varied_lengths_of_ring_flash_attn(ranks: RankPool, name: str) -> None:
    in_bf16 = ranks.run({"sp": 2}, errors_beside_theirs, name, torch.bfloat16)
    assert max(map(max, in_bf16)) < 1e-2
    in_float32 = ranks.run({"sp": 2}, errors_beside_theirs, name, torch.float32)
    outputs, d_q, *_ = zip(*in_float32, strict=True)
    assert max(outputs) < 1e-6
    if name.startswith("zigzag"):
        # buffer.to(torch.float32) is no copy in float32: the next block overwrites the sum of gradients;
        # those of k and v are wrong in some runs
        assert max(d_q) > 0.1
    else:
        assert max(map(max, in_float32)) < 1e-6
