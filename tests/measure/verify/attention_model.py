"""A model that is nothing but attention: q, k and v come in, and all three get gradients."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.decay import DecayMask
from spbench.impls.layout import MeetingKind
from spbench.impls.models.model import Model, ModelPart
from spbench.impls.place import Place
from spbench.impls.strategies.base import Site, Strategy
from tests.measure.engines.cells import sent_bytes


@dataclass(frozen=True)
class AttentionModel(Model):
    """One call of the attention that ``kind`` names.

    Attributes:
        kind: "attention" (keys may be masked), "causal_attention", "full_attention" or "linear_attention".
        masked: "attention" gets a mask of padded keys, else None.
        decay: "linear_attention" gets a rate a head.
        rotary: queries and keys are rotated by their positions (:func:`rotated`).
        key_size: D of linear attention; all else has ``head_size``.
        kv_heads: "causal_attention" gets so many heads of keys and values; None: as many as of queries.
    """

    kind: MeetingKind = "causal_attention"
    heads: int = 12
    head_size: int = 4
    key_size: int = 3
    masked: bool = False
    rotary: bool = False
    decay: bool = True
    way: str = "chunked"
    kv_heads: int | None = None

    sequence_dims: ClassVar[Mapping[str, int | None]] = {
        "q": 2,
        "k": 2,
        "v": 2,
        "padding": None,
        "positions": 0,
    }

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        return OnlyAttention(self, strategy)

    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        key_size = self.key_size if self.kind == "linear_attention" else self.head_size
        kv_heads = self.kv_heads or self.heads
        q, k, v = (
            torch.randn(batch, heads, seq_len, size, generator=generator, dtype=torch.float64)
            for heads, size in ((self.heads, key_size), (kv_heads, key_size), (kv_heads, self.head_size))
        )
        padding = torch.zeros(batch, seq_len, dtype=torch.int64)
        padding[:, seq_len - seq_len // 8 :] = 1
        return {"q": q, "k": k, "v": v, "padding": padding, "positions": torch.arange(seq_len)}

    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        dims = {"B": batch, "L": seq_len, "Z": self.heads, "A": self.head_size}
        if self.kv_heads is not None:
            dims["G"] = self.kv_heads
        letters = dims | ({"D": self.key_size} if self.kind == "linear_attention" else {})
        return [Site(self.kind, 1, letters), Site("parameters", 1, {"elements": self.head_size})]

    def parts(self) -> Mapping[str, ModelPart]:
        return {"attention": ModelPart(self.build, self.inputs, self.sequence_dims, {"y": 2})}


class OnlyAttention(nn.Module):
    """The attention, and a gain for each of its features, for what is trained has parameters."""

    def __init__(self, model: AttentionModel, strategy: Strategy):
        super().__init__()
        self.model, self.strategy = model, strategy
        self.gain = nn.Parameter(torch.ones(model.head_size))

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = (inputs[name] for name in "qkv")
        if self.model.rotary:
            q, k = (rotated(x, inputs["positions"]) for x in (q, k))
        y = self.attend(q, k, v, inputs["padding"] > 0)
        return {"y": y * self.gain.to(y.dtype)}

    def attend(self, q: Tensor, k: Tensor, v: Tensor, padded: Tensor) -> Tensor:
        if self.model.kind == "attention":
            mask = padded[:, None, None] if self.model.masked else None
            return self.strategy.attention(q, k, v, mask, dropout=0.0, softmax="plain")
        if self.model.kind == "causal_attention":
            return self.strategy.causal_attention(q, k, v)
        if self.model.kind == "full_attention":
            return self.strategy.full_attention(q, k, v)
        rates = torch.linspace(0.05, 0.6, self.model.heads, dtype=torch.float64)
        mask = DecayMask(rates if self.model.decay else None, way=self.model.way)
        return self.strategy.linear_attention(q, k, v, mask)


def rotated(x: Tensor, positions: Tensor) -> Tensor:
    """Rotary embedding (RoFormer, arXiv 2104.09864) of x [..., L, A] at positions [L]."""
    size = x.shape[-1] // 2
    rates = 100.0 ** -(torch.arange(size, dtype=torch.float64) / size)
    angles = positions.double().unsqueeze(-1) * rates
    cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


Sent = Mapping[tuple[str, str], Fraction]


def metered(
    mesh: DeviceMesh,
    cls: type[Strategy],
    options: Mapping[str, Any],
    model: AttentionModel,
    dtype: torch.dtype,
    seq_len: int,
    batch: int = 3,
) -> Sent:
    """What the meters see this rank send, forward and backward, by phase and collective."""
    strategy = cls.configured(Place.on(mesh), options)
    whole = model.inputs(batch, seq_len, torch.Generator().manual_seed(0))
    inputs = {name: strategy.shard(x, model.sequence_dims[name]) for name, x in whole.items()}
    inputs = {n: x.to(dtype).requires_grad_() if n in "qkv" else x for n, x in inputs.items()}
    recorder = Recorder(mesh)
    with recorder:
        with recorder.phase("forward"):
            y = model.build(strategy, seq_len)(inputs)["y"]
        with recorder.phase("backward"):
            y.backward(torch.ones_like(y))
    recorder.memory.stop()
    return sent_bytes(recorder.communication)


def formula(
    size: int,
    cls: type[Strategy],
    options: Mapping[str, Any],
    model: AttentionModel,
    dtype: torch.dtype,
    seq_len: int,
    batch: int = 3,
    rank: int = 0,
) -> Sent:
    """The closed form of the same."""
    strategy, sites = cls.planned(size, rank, options), model.sites(batch, seq_len)
    strategy.check(sites)
    sent: Counter[tuple[str, str]] = Counter()
    for t in strategy.communication(sites, dtype.itemsize):
        sent[t.phase, t.collective] += t.sent_bytes(size)  # type: ignore[assignment]
    return {key: Fraction(value) for key, value in sent.items() if value}
