"""Causal attentions of several strategies, ours and peers, on the same ranks: are they right, and what do
they cost?"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.verify.judged import relative_errors
from spbench.impls.place import Place
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.nesting import Nesting

#: the dim of positions in [B, L, Z, A], the memory layout in which a projection leaves q, k and v
POSITIONS = 1
#: times the error of one device, from which on an attention is wrong: the results of blocks are rounded once
#: more when they are merged
WORST_ERROR = 3.0


@dataclass(frozen=True)
class Shape:
    """The sizes of q, k and v, whole."""

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
class Entrant:
    """A strategy with its options, and what the table calls it."""

    label: str
    strategy: type[Strategy] | Nesting
    options: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Found:
    """About one entrant on one rank.

    Attributes:
        errors: of the output and the gradients of q, k and v, relative, beside float64 on one device.
        noise: the same of one device in the contest's dtype, on this rank's positions.
        cpu_ms, wall_ms: of a forward and a backward pass, by round; empty if a rank is wrong.
    """

    errors: Mapping[str, float]
    noise: Mapping[str, float]
    cpu_ms: list[float]
    wall_ms: list[float]

    @property
    def error(self) -> float:
        """The worst of the errors, in multiples of the noise."""
        return max(self.errors[name] / self.noise[name] for name in self.errors)


class Attention:
    """An entrant's attention on this rank.

    Args:
        whole: q, k, v and the gradient of the output [B, L, Z, A] of all ranks.
    """

    def __init__(self, entrant: Entrant, place: Place, whole: Sequence[Tensor]):
        self.strategy = entrant.strategy.configured(place, entrant.options)
        self.inputs = [self.strategy.shard(x, POSITIONS).contiguous() for x in whole]

    def results(self) -> dict[str, Tensor]:
        """Forward and backward once: the output and all gradients [B, L/N, Z, A]."""
        return _results(self.strategy, self.inputs)

    def errors(self, exact: Mapping[str, Tensor], got: Mapping[str, Tensor]) -> dict[str, float]:
        """Errors of whole tensors, or of this rank's part, beside this rank's part of the exact ones."""
        mine = {name: self.strategy.shard(x, POSITIONS) for name, x in exact.items()}
        parts = {
            name: x if x.shape == mine[name].shape else self.strategy.shard(x, POSITIONS)
            for name, x in got.items()
        }
        return relative_errors(mine, parts)

    def milliseconds(self) -> tuple[float, float]:
        """CPU time of this process, all its threads, and wall time, of forward and backward."""
        dist.barrier()
        cpu, wall = time.process_time(), time.perf_counter()
        self.results()
        return (time.process_time() - cpu) * 1e3, (time.perf_counter() - wall) * 1e3


def _results(strategy: Strategy, tensors: Sequence[Tensor]) -> dict[str, Tensor]:
    *given, d_o = tensors
    inputs = [x.detach().requires_grad_() for x in given]
    o = strategy.causal_attention(*(x.transpose(1, 2) for x in inputs)).transpose(1, 2)
    gradients = torch.autograd.grad(o, inputs, d_o)
    return {"output": o, **{f"gradient of {n}": g for n, g in zip("qkv", gradients, strict=True)}}


class _OneDevice(Strategy):
    """torch's attention of whole sequences."""

    def causal_attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def contest(
    mesh: DeviceMesh, entrants: Sequence[Entrant], shape: Shape, dtype: torch.dtype, rounds: int
) -> dict[str, Found]:
    """What is found on this rank, by label: each is checked, then those that are right are timed in turns, in
    each round in another order."""
    whole, one_device = shape.tensors(dtype), _OneDevice()
    exact, rough = _results(one_device, [x.double() for x in whole]), _results(one_device, whole)
    attentions = {entrant.label: Attention(entrant, Place.on(mesh), whole) for entrant in entrants}
    found = {
        label: Found(each.errors(exact, each.results()), each.errors(exact, rough), [], [])
        for label, each in attentions.items()
    }
    order = random.Random(0)  # the same on all ranks
    right = [label for label in attentions if _right_on_all(found[label])]
    for _ in range(rounds):
        for label in order.sample(right, len(right)):
            cpu_ms, wall_ms = attentions[label].milliseconds()
            found[label].cpu_ms.append(cpu_ms)
            found[label].wall_ms.append(wall_ms)
    return found


def _right_on_all(found: Found) -> bool:
    worst = torch.tensor(found.error)
    dist.all_reduce(worst, dist.ReduceOp.MAX)
    return bool(worst < WORST_ERROR)
