"""Linear attention as the mixer of a decoder's layer.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden (between
projections this rank's features), Z heads (this rank's), A head size, D size of queries and keys.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.kernels.decay import DecayMask
from spbench.impls.kernels.rms_norm import rms_norm
from spbench.impls.models.blocks.architecture import Mixer
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.places import Places
from spbench.impls.strategies.base import Site, Strategy


def _elu_plus_one(x: Tensor) -> Tensor:
    return F.elu(x) + 1


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {"silu": F.silu, "elu_plus_one": _elu_plus_one}


@dataclass(frozen=True)
class LinearAttention(Mixer):
    """The kind of mixer that is causal linear attention, with a norm of the output instead of a denominator.

    Attributes:
        feature_map: the function of queries and keys, a key of FEATURE_MAPS.
        decay: the decay rate of each head of the layer; None: no decay.
        gated: whether a fourth projection of the input multiplies the normalised output.
        lrpe: whether LRPE turns queries and keys and doubles their size; see :class:`LinearAttentionMixer`.
    """

    feature_map: str
    decay: Sequence[float] | None = None
    gated: bool = False
    lrpe: bool = False

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return LinearAttentionMixer(self, model, strategy)

    @property
    def projections(self) -> int:
        """The number of projections of the layer's input: queries, keys, values, and a gate if ``gated``."""
        return 4 if self.gated else 3

    def width(self, model: DecoderOptions) -> int:
        return model.attention_width

    def gathers_once(self, model: DecoderOptions) -> bool:
        return False

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        angles = model.attention_width if self.lrpe else 0
        return {"split": (self.projections + 1) * model.hidden * model.attention_width + angles}

    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        dims = {"B": batch, "L": seq_len, "Z": model.heads, "A": model.head_size}
        width = (2 if self.lrpe else 1) * model.head_size
        sites = [Site("linear_attention", 1, dims | {"D": width} | model.heeded(seq_len), again)]
        if model.attention_norm == "hidden":
            sites.append(Site("feature_norm", 1, dims, again))
        return sites


class LinearAttentionMixer(nn.Module):
    """The module of linear attention, x [B, L, H] -> [B, L, H].

    The strategy takes queries, keys and values as views of the projections, which backward of the feature
    maps and of the gate keeps anyway; a kernel that needs contiguous tensors copies them and keeps no copy.

    LRPE (TransNormerLLM, arXiv 2307.14995) turns every feature by a learned angle for each position: queries
    and keys x become (x cos, x sin), so that their inner product depends on the distance.
    """

    decay: Tensor | None

    def __init__(self, kind: LinearAttention, model: DecoderOptions, strategy: Strategy):
        super().__init__()
        self.kind, self.model, self.strategy = kind, model, strategy
        self.project = strategy.grouped_linear_in(model.hidden, model.attention_width, kind.projections)
        self.out = strategy.linear_out(model.attention_width, model.hidden)
        # half precision would round the rates
        precise = torch.float64 if self.out.weight.dtype is torch.float64 else torch.float32
        decay = None if kind.decay is None else torch.tensor(kind.decay, dtype=precise)
        self.register_buffer("decay", decay, persistent=False)
        if kind.lrpe:
            powers = torch.arange(model.attention_width, dtype=torch.float64) / model.attention_width
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
        mask = DecayMask(self.decay, places.attended, self.model.linear_attention)
        o = self.strategy.linear_attention(q, k, v, mask)
        del q, k, v
        y = self._normalised(o.transpose(1, 2))
        del o
        return self.out.project(y * gate[0] if gate else y)

    def _normalised(self, o: Tensor) -> Tensor:
        """The normalised output [B, L, H] of attention o [B, L, Z, A]."""
        epsilon, way = self.model.norm_epsilon, self.model.rms_norm
        if self.model.attention_norm == "hidden":
            return rms_norm(o.flatten(2), None, epsilon, way=way)
        return rms_norm(o, None, epsilon, way=way).flatten(2)


def _heads(x: Tensor, model: DecoderOptions) -> Tensor:
    """The heads [B, Z, L, A] of x [B, L, H], a view."""
    return x.unflatten(-1, (-1, model.head_size)).transpose(1, 2)
