"""What mixes the tokens in a layer of a causal language model: linear attention or softmax attention.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden (this
rank's features of it between projections), Z heads (this rank's), A head size, D size of queries and keys.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.kernels.rms_norm import rms_norm
from spbench.impls.models.model import AttentionHeads
from spbench.impls.options import check_choices
from spbench.impls.strategies.attention import LINEAR_ATTENTION_WAYS
from spbench.impls.strategies.base import Site, Strategy


def _elu_plus_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "elu_plus_one": _elu_plus_one}

_WAYS = {
    "attention_norm": ("hidden", "head"),
    "linear_attention": tuple(LINEAR_ATTENTION_WAYS),
    "rms_norm": ("fused", "plain"),
    "cross_entropy": ("plain", "fused"),
}


@dataclass(frozen=True)
class DecoderOptions(AttentionHeads):
    """What the layers of a decoder are made of, and which kernels they use.

    Attributes:
        kv_heads: heads of keys and values in softmax attention, each for ``heads / kv_heads`` of queries
            (grouped-query attention, arXiv 2305.13245); None: as many as ``heads``.
        qk_norm: queries and keys of softmax attention are normalised head by head, with a weight of one
            head's size each, before RoPE (Qwen3, arXiv 2505.09388).
        inner: width of the MLP.
        attention_norm: the output of linear attention is normalised over all features ("hidden"), or over
            those of each head ("head"), which a strategy that splits heads needs.
        linear_attention: a key of :data:`LINEAR_ATTENTION_WAYS`.
        norm_epsilon: added to the mean square in every norm.
        rms_norm: "fused" or "plain"; see :func:`rms_norm`.
        cross_entropy: "plain" keeps the log-softmax in full precision and makes its gradient anew; "fused"
            works in place.
        checkpointing: recompute each block in backward.
    """

    layers: int = 16
    hidden: int = 2048
    heads: int = 16
    kv_heads: int | None = None
    qk_norm: bool = False
    inner: int = 5632
    attention_norm: str = "head"
    norm_epsilon: float = 1e-6
    linear_attention: str = "chunked"
    rms_norm: str = "fused"
    cross_entropy: str = "plain"
    checkpointing: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _WAYS)
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")

    @property
    def grouped(self) -> bool:
        """Whether heads of queries share those of keys and values."""
        return self.kv_heads not in (None, self.heads)


class Places:
    """Where the positions lie in the sequence that this rank has between the projections of a block, and what
    all layers share that follows from it. Made when first asked for.

    Args:
        seq_len: of the whole sequence.
        like: a tensor with the activations' dtype and device.
    """

    def __init__(self, strategy: Strategy, seq_len: int, like: Tensor):
        self.strategy, self.seq_len = strategy, seq_len
        self.dtype, self.device = like.dtype, like.device
        self._rotary: tuple[Tensor, Tensor] | None = None

    @cached_property
    def positions(self) -> Tensor:
        """[L], in a precision for angles: bfloat16 cannot tell position 256 from 257."""
        precise = torch.float64 if self.dtype is torch.float64 else torch.float32
        whole = torch.arange(self.seq_len, device=self.device)
        return self.strategy.block_part(whole, 0).to(precise)

    def turned(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin of theta [..., A] times each position: [..., L, A]."""
        angle = theta.to(self.positions.dtype).unsqueeze(-2) * self.positions.unsqueeze(-1)
        return angle.cos().to(self.dtype), angle.sin().to(self.dtype)

    def rotary(self, head_size: int, base: float) -> tuple[Tensor, Tensor]:
        """RoPE's cos and sin [L, A/2], made for the first layer that asks and kept for the others."""
        if self._rotary is None:
            powers = torch.arange(0, head_size, 2, dtype=torch.float64, device=self.device)
            self._rotary = self.turned(base ** (-powers / head_size))
        return self._rotary


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE (arXiv 2104.09864): the pairs (i, i + A/2) of x [B, Z, L, A] turned by cos, sin [L, A/2]."""
    first, second = x.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


@dataclass(frozen=True)
class LinearAttention:
    """A layer of causal linear attention, its output normalised instead of divided by a sum of keys.

    Attributes:
        feature_map: a key of FEATURE_MAPS, on queries and keys.
        decay: the rate of each head of the layer; None: no decay.
        gated: the normalised output is multiplied by a fourth projection of the input.
        lrpe: queries and keys turned by LRPE, which doubles their size; see :class:`LinearAttentionMixer`.
    """

    feature_map: str
    decay: Sequence[float] | None = None
    gated: bool = False
    lrpe: bool = False

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return LinearAttentionMixer(self, model, strategy)

    @property
    def projections(self) -> int:
        """Projections [H, H] of the layer's input."""
        return 4 if self.gated else 3

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        """As :meth:`SoftmaxAttention.parameters`."""
        angles = model.hidden if self.lrpe else 0
        return {"split": (self.projections + 1) * model.hidden**2 + angles}

    def sites(self, model: DecoderOptions, batch: int, seq_len: int) -> list[Site]:
        dims = {"B": batch, "L": seq_len, "Z": model.heads, "A": model.head_size}
        width = (2 if self.lrpe else 1) * model.head_size
        found = [Site("linear_attention", 1, dims | {"D": width}, model.checkpointing)]
        if model.attention_norm == "hidden":
            found.append(Site("feature_norm", 1, dims, model.checkpointing))
        return found


@dataclass(frozen=True)
class SoftmaxAttention:
    """A layer of causal softmax attention with RoPE of this base."""

    rotary_base: float = 10_000.0

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return SoftmaxAttentionMixer(self, model, strategy)

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        """Counts of the layer's parameters: those that can be ``split`` over features, of these the
        ``key_value`` ones that grouped heads share, and the ``whole`` ones that every rank holds."""
        of_queries = 2 * model.hidden**2
        key_value = 2 * (model.kv_heads or model.heads) * model.head_size * model.hidden
        return {
            "split": of_queries + key_value,
            "key_value": key_value if model.grouped else 0,
            "whole": 2 * model.head_size if model.qk_norm else 0,
        }

    def sites(self, model: DecoderOptions, batch: int, seq_len: int) -> list[Site]:
        heads, again = {"Z": model.heads, "A": model.head_size}, model.checkpointing
        found = []
        if model.kv_heads is not None and model.grouped:
            heads["G"] = model.kv_heads
            found.append(Site("grouped_query_linear_in", 1, heads | {"H": model.hidden}, again))
        if model.qk_norm:
            found.append(Site("shared_by_heads", 2, {"A": model.head_size}, again))
        return [*found, Site("causal_attention", 1, {"B": batch, "L": seq_len} | heads, again)]


class LinearAttentionMixer(nn.Module):
    """x [B, L, H] -> [B, L, H].

    Queries, keys and values are handed over as views of the projections, which the feature maps and the gate
    keep anyway; a kernel that needs them packed makes copies that it does not keep.

    LRPE (TransNormerLLM, arXiv 2307.14995) turns every feature by an angle of its own a position, which it
    learns: queries and keys x become (x cos, x sin), so that their product depends on the distance.
    """

    decay: Tensor | None

    def __init__(self, kind: LinearAttention, model: DecoderOptions, strategy: Strategy):
        super().__init__()
        self.kind, self.model, self.strategy = kind, model, strategy
        self.project = strategy.grouped_linear_in(model.hidden, model.hidden, kind.projections)
        self.out = strategy.linear_out(model.hidden, model.hidden)
        # in half precision the rates would be other ones
        precise = torch.float64 if self.out.weight.dtype is torch.float64 else torch.float32
        decay = None if kind.decay is None else torch.tensor(kind.decay, dtype=precise)
        self.register_buffer("decay", decay, persistent=False)
        if kind.lrpe:
            powers = torch.arange(model.hidden, dtype=torch.float64) / model.hidden
            self.theta = strategy.feature_parameter(10_000.0 ** (-2 * powers))

    def forward(self, x: Tensor, places: Places) -> Tensor:
        q, k, v, *gate = self.project(x)
        q, k, v = (_heads(y, self.model) for y in (q, k, v))
        features = FEATURE_MAPS[self.kind.feature_map]
        q, k = features(q), features(k)
        if self.kind.lrpe:
            cos, sin = places.turned(self.theta.view(-1, self.model.head_size))
            q, k = (torch.cat((y * cos, y * sin), -1) for y in (q, k))
            del cos, sin
        o = self.strategy.linear_attention(q, k, v, self.decay, way=self.model.linear_attention)
        del q, k, v
        y = self._normalised(o.transpose(1, 2))
        del o
        return self.out.project(y * gate[0] if gate else y)

    def _normalised(self, o: Tensor) -> Tensor:
        """[B, L, Z, A] -> [B, L, H]."""
        epsilon, way = self.model.norm_epsilon, self.model.rms_norm
        if self.model.attention_norm == "hidden":
            return rms_norm(o.flatten(2), None, epsilon, way=way)
        return rms_norm(o, None, epsilon, way=way).flatten(2)


class SoftmaxAttentionMixer(nn.Module):
    """x [B, L, H] -> [B, L, H]."""

    def __init__(self, kind: SoftmaxAttention, model: DecoderOptions, strategy: Strategy):
        super().__init__()
        self.kind, self.model, self.strategy = kind, model, strategy
        hidden, kv_heads = model.hidden, model.kv_heads
        self.project: nn.Module
        if kv_heads is not None and model.grouped:
            self.project = strategy.grouped_query_linear_in(hidden, model.head_size, model.heads, kv_heads)
        else:
            self.project = strategy.grouped_linear_in(hidden, hidden, 3)
        if model.qk_norm:
            self.q_norm, self.k_norm = (nn.Parameter(torch.ones(model.head_size)) for _ in "qk")
        self.out = strategy.linear_out(hidden, hidden)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        q, k, v = self._projected(x)
        turn = places.rotary(self.model.head_size, self.kind.rotary_base)
        o = self.strategy.causal_attention(
            rotated(q, *turn).flatten(1, -3), rotated(k, *turn), v.contiguous()
        )
        del q, k, v
        return self.out.project(o.transpose(1, 2).flatten(2))

    def _projected(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [B, Z, L, A] or [B, G, Z/G, L, A], keys and values [B, G, L, A]."""
        if self.model.grouped:
            q, k, v = self.project(x)
        else:
            q, k, v = (y.unflatten(-1, (-1, self.model.head_size)) for y in self.project(x))
        if self.model.qk_norm:
            q, k = self._normalised(q, self.q_norm), self._normalised(k, self.k_norm)
        q, k, v = (y.movedim(1, -2) for y in (q, k, v))
        return q, k, v

    def _normalised(self, x: Tensor, weight: Tensor) -> Tensor:
        """[..., A] -> [..., A]."""
        weight = self.strategy.shared_by_heads(weight)
        return rms_norm(x, weight, self.model.norm_epsilon, way=self.model.rms_norm)


def _heads(x: Tensor, model: DecoderOptions) -> Tensor:
    """[B, L, H] -> [B, Z, L, A], a view."""
    return x.unflatten(-1, (-1, model.head_size)).transpose(1, 2)
