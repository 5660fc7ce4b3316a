"""Our causal attentions and other packages' on the same ranks: are they right, and what do they cost?"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.verification.discrepancy import relative_errors
from spbench.impls.axes import Place
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.ring_attention import RingAttention
from spbench.impls.strategies.ulysses import Ulysses
from tests.benchmarks import peers
from tests.benchmarks.peers import Attend

#: the dim of positions in [B, L, Z, A], the memory layout in which a projection leaves q, k and v
POSITIONS = 1
OURS = "spbench"
PLACEMENTS = ("contiguous", "zigzag", "striped", "ulysses")


@dataclass(frozen=True)
class Shape:
    """Of q, k and v, whole."""

    batch: int = 1
    seq_len: int = 1024
    heads: int = 8
    head_size: int = 64

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v and the gradient of the output [B, L, Z, A], the same on all ranks."""
        generator = torch.Generator().manual_seed(0)
        sizes = (self.batch, self.seq_len, self.heads, self.head_size)
        return [torch.randn(sizes, generator=generator, dtype=torch.float64).to(dtype) for _ in range(4)]


@dataclass(frozen=True)
class Found:
    """About one package's attention on one rank.

    Attributes:
        errors: of the output and the gradients of q, k and v, relative, beside float64 on one device.
        noise: the same of one device in the contest's dtype, on this rank's positions.
        cpu_ms, wall_ms: of a forward and a backward pass, by round.
    """

    errors: Mapping[str, float]
    noise: Mapping[str, float]
    cpu_ms: list[float]
    wall_ms: list[float]


def strategy(placement: str, place: Place) -> Strategy:
    if placement == "ulysses":
        return Ulysses.configured(place)
    return RingAttention.configured(place, {"placement": placement})


def ours(chosen: Strategy) -> Attend:
    """The strategy's attention with the dims in the peers' order."""
    return lambda q, k, v: chosen.causal_attention(*(x.transpose(1, 2) for x in (q, k, v))).transpose(1, 2)


def contenders(placement: str, group: dist.ProcessGroup, own: Strategy) -> Iterator[tuple[str, Attend]]:
    """(package, attention) of that placement: ours, and each peer's as published and mended."""
    yield OURS, ours(own)
    installed = set(peers.available())
    for peer in peers.PEERS:
        if peer.placement == placement and peer.package in installed:
            yield peer.package, peer.attend(group, False)
            if placement != "ulysses":
                yield f"{peer.package} (mended)", peer.attend(group, True)


def results(attend: Attend, q: Tensor, k: Tensor, v: Tensor, d_o: Tensor) -> dict[str, Tensor]:
    """Forward and backward once: the output and all gradients [B, L or a part, Z, A]."""
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    o = attend(*inputs)
    gradients = torch.autograd.grad(o, inputs, d_o)
    return {"output": o, **{f"gradient of {n}": g for n, g in zip("qkv", gradients, strict=True)}}


def one_device(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def contest(
    mesh: DeviceMesh, placement: str, shape: Shape, dtype: torch.dtype, rounds: int
) -> dict[str, Found]:
    """What is found on this rank, by package: each is checked, then all are timed in turns, in each round in
    another order."""
    peers.install()
    group = mesh.get_group("sp")
    own = strategy(placement, Place.on(mesh))
    whole = shape.tensors(dtype)
    exact, rough = results(one_device, *(x.double() for x in whole)), results(one_device, *whole)
    mine, noisy = ({n: own.shard(x, POSITIONS) for n, x in of.items()} for of in (exact, rough))
    noise = relative_errors(mine, noisy)
    part = [own.shard(x, POSITIONS).contiguous() for x in whole]
    entries = dict(contenders(placement, group, own))
    found = {
        name: Found(relative_errors(mine, results(f, *part)), noise, [], []) for name, f in entries.items()
    }
    order = random.Random(0)  # the same on all ranks
    for _ in range(rounds):
        for name in order.sample(list(entries), len(entries)):
            cpu_ms, wall_ms = _milliseconds(entries[name], part, group)
            found[name].cpu_ms.append(cpu_ms)
            found[name].wall_ms.append(wall_ms)
    return found


def _milliseconds(attend: Attend, part: list[Tensor], group: dist.ProcessGroup) -> tuple[float, float]:
    """CPU time of this process, all its threads, and wall time, of forward and backward."""
    dist.barrier(group)
    cpu, wall = time.process_time(), time.perf_counter()
    results(attend, *part)
    return (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3
