"""The options of a decoder's layers, and linear attention as what mixes the tokens in one.

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

from spbench.impls.kernels.cross_entropy import CROSS_ENTROPIES
from spbench.impls.kernels.projection import LIBRARIES
from spbench.impls.kernels.rms_norm import rms_norm
from spbench.impls.models.model import AttentionHeads
from spbench.impls.options import check_choices
from spbench.impls.strategies.attention import LINEAR_ATTENTION_WAYS
from spbench.impls.strategies.base import Site, Strategy


def _elu_plus_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "elu_plus_one": _elu_plus_one}

#: what libraries other than torch fuse: the scale, mask and softmax of scores, an MLP's bias and activation,
#: bias, dropout and addition to the hidden states, and RoPE
FUSIONS = ("masked_softmax", "bias_gelu", "bias_swiglu", "bias_dropout", "rope")

_WAYS = {
    "attention_norm": ("hidden", "head"),
    "linear_attention": tuple(LINEAR_ATTENTION_WAYS),
    "rms_norm": ("fused", "plain"),
    "cross_entropy": ("plain", *CROSS_ENTROPIES),
    "library": LIBRARIES,
    "recompute": ("none", "selective", "operators", "full"),
    "recompute_method": ("uniform", "block", "interval"),
}


@dataclass(frozen=True)
class DecoderOptions(AttentionHeads):
    """What the layers of a decoder are made of, and which kernels they use.

    Attributes:
        kv_heads: heads of keys and values in softmax attention, each for ``heads / kv_heads`` of queries
            (grouped-query attention, arXiv 2305.13245); None: as many as ``heads``.
        head_dim: features of a head of softmax attention, A, where they are not ``hidden / heads`` (Qwen3).
        qk_norm: queries and keys of softmax attention are normalised head by head, with a weight of one
            head's size each, before RoPE (Qwen3, arXiv 2505.09388).
        inner: width of the MLP.
        attention_norm: the output of linear attention is normalised over all features ("hidden"), or over
            those of each head ("head"), which a strategy that splits heads needs.
        linear_attention: a key of :data:`LINEAR_ATTENTION_WAYS`.
        norm_epsilon: added to the mean square in every norm.
        rms_norm: "fused" or "plain"; see :func:`rms_norm`.
        cross_entropy: "plain" keeps the log-softmax in full precision and makes its gradient anew; "fused"
            makes one full-precision copy of the logits and works in it, as Megatron-LM's own; "native" makes
            a second one in backward, as Megatron-LM compiles it (--cross-entropy-loss-fusion); "in_place"
            makes none, as TransformerEngine's (--cross-entropy-fusion-impl te).
        separate_projections: queries, keys, values, and the two projections that open the MLP, have a weight
            and a matrix product each, as Hugging Face's and torchtitan's models have; else those of the same
            input are one product.
        library: whose layers the model is made of, one of LIBRARIES; it decides what is kept for backward,
            and which workspaces exist. Other than torch's, they have all :data:`FUSIONS`.
        unfused: those of :data:`FUSIONS` that are left out of a library's, to be made of torch's operators.
        recompute: what backward runs again: "full": runs of layers, of which the input is kept; "selective":
            softmax attention, between its projections (arXiv 2205.05198, section 5); "operators": each layer
            but for softmax attention and every other matrix product (torchtitan's "selective" by "op").
        recompute_method: of full recomputation: "uniform": all layers, in runs of ``recompute_layers``;
            "block": the first ``recompute_layers`` of each pipeline stage, one by one; "interval": one of
            each ``recompute_layers`` layers of a stage, the last of them.
        recompute_layers: see ``recompute_method``.
        recompute_early_stop: of full recomputation: it ends at the last tensor that backward needs, so that a
            run's last product does not run again, as where programs use torch's checkpoint without
            use_reentrant.
        checkpointing: as ``recompute: full``.
    """

    layers: int = 16
    hidden: int = 2048
    heads: int = 16
    kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = False
    inner: int = 5632
    attention_norm: str = "head"
    norm_epsilon: float = 1e-6
    linear_attention: str = "chunked"
    rms_norm: str = "fused"
    cross_entropy: str = "plain"
    separate_projections: bool = False
    library: str = "torch"
    unfused: Sequence[str] = ()
    recompute: str = "none"
    recompute_method: str = "uniform"
    recompute_layers: int = 1
    recompute_early_stop: bool = False
    checkpointing: bool = False

    def __post_init__(self) -> None:
        if self.head_dim is None:
            super().__post_init__()
        elif self.head_dim < 1:
            raise ValueError(f"head_dim is at least 1, not {self.head_dim}")
        check_choices(self, _WAYS)
        object.__setattr__(self, "unfused", tuple(self.unfused))  # a list has no hash
        for name in self.unfused:
            if name not in FUSIONS:
                raise ValueError(f"unfused has words of {', '.join(FUSIONS)}, not {name!r}")
        if self.unfused and not self.fused:
            raise ValueError("unfused is of libraries that fuse; library torch does not, so leave it out")
        if self.checkpointing and self.recompute != "none":
            raise ValueError(
                f"checkpointing is recompute: full; with recompute {self.recompute} leave it out"
            )
        if self.recompute_early_stop and not self.recomputes_layers:
            raise ValueError("recompute_early_stop is of recompute: full; set that, or leave it out")
        if self.separate_projections and self.fused:
            raise ValueError(f"separate_projections is of library: torch, not of {self.library}")
        if self.recompute_layers < 1:
            raise ValueError(f"recompute_layers is at least 1, not {self.recompute_layers}")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")

    @property
    def head_size(self) -> int:
        return super().head_size if self.head_dim is None else self.head_dim

    @property
    def attention_width(self) -> int:
        """Features of all heads of queries."""
        return self.heads * self.head_size

    @property
    def recomputes_layers(self) -> bool:
        """Whether layers are recomputed, whole or but for some operators."""
        return self.checkpointing or self.recompute in ("full", "operators")

    @property
    def keeps_operators(self) -> bool:
        """Whether layers that are recomputed keep the results of some operators."""
        return self.recompute == "operators"

    def recomputed_runs(self, layers: Sequence[int]) -> list[tuple[Sequence[int], bool]]:
        """The layers of a stage in the runs in which they are recomputed or not."""
        if not self.recomputes_layers:
            return [(layers, False)]
        n = self.recompute_layers
        if self.recompute_method == "uniform":
            return [(layers[i : i + n], True) for i in range(0, len(layers), n)]
        if self.recompute_method == "interval":
            return [([layer], place % n == 0) for place, layer in enumerate(layers, 1)]
        return [*(([layer], True) for layer in layers[:n]), (layers[n:], False)]

    @property
    def fused(self) -> bool:
        """Whether the library fuses what stands between products."""
        return self.library != "torch"

    def fuses(self, name: str) -> bool:
        """Whether the library's kernel for one of :data:`FUSIONS` is used."""
        return self.fused and name not in self.unfused

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
        self._angles: Tensor | None = None

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

    def angles(self, head_size: int, base: float) -> Tensor:
        """RoPE's angles [L, A], each twice, in at least float32 as libraries hold them; made once."""
        if self._angles is None:
            powers = torch.arange(0, head_size, 2, dtype=torch.float64, device=self.device)
            theta = (base ** (-powers / head_size)).to(self.positions.dtype)
            angle = theta * self.positions.unsqueeze(-1)
            self._angles = torch.cat((angle, angle), -1)
        return self._angles


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
        """Counts of the layer's parameters, as :class:`SoftmaxAttention` has them."""
        angles = model.hidden if self.lrpe else 0
        return {"split": (self.projections + 1) * model.hidden**2 + angles}

    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        """What the layer asks of a strategy for one batch; ``again``: the layer is recomputed."""
        dims = {"B": batch, "L": seq_len, "Z": model.heads, "A": model.head_size}
        width = (2 if self.lrpe else 1) * model.head_size
        sites = [Site("linear_attention", 1, dims | {"D": width}, again)]
        if model.attention_norm == "hidden":
            sites.append(Site("feature_norm", 1, dims, again))
        return sites


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


def _heads(x: Tensor, model: DecoderOptions) -> Tensor:
    """[B, L, H] -> [B, Z, L, A], a view."""
    return x.unflatten(-1, (-1, model.head_size)).transpose(1, 2)
