"""Hybrids: causal transformers in which some layers have a recurrence in place of softmax attention.

A repeating pattern of letters names the mixer of each layer. For example, Qwen3-Next has three layers of
Gated DeltaNet to one of softmax attention, MiniMax-01 (arXiv 2501.08313) seven of lightning attention to one,
Nemotron-H (arXiv 2504.03624) has Mamba-2, and Kimi Linear (arXiv 2510.26692) three layers of Kimi Delta
Attention to one of latent attention.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Self

from torch import nn

from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.recurrence import timed
from spbench.impls.kernels.state_space import on_processors
from spbench.impls.models.blocks import recurrent_mixer
from spbench.impls.models.blocks.architecture import FeedForward
from spbench.impls.models.blocks.decoder import TINY_SIZES
from spbench.impls.models.blocks.experts import MixtureOfExperts
from spbench.impls.models.blocks.feed_forward import Mlp
from spbench.impls.models.blocks.kimi_delta import KimiDeltaAttention
from spbench.impls.models.blocks.linear_mixer import LinearAttention
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttention
from spbench.impls.models.blocks.softmax_options import TINY_LATENT
from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.presets import published
from spbench.impls.models.tnl import decay_rates
from spbench.impls.options import check_choices
from spbench.impls.strategies.base import Strategy

RECURRENCES: Mapping[str, Callable[..., recurrent_mixer.RecurrentLayer]] = {
    "G": recurrent_mixer.GatedDeltaNet,
    "K": KimiDeltaAttention,
    "M": recurrent_mixer.Mamba2,
}
#: the mixer of a layer by the layer's letter in a pattern
LETTERS = {
    "S": "softmax attention",
    "W": "the same in a sliding window",
    "L": "lightning attention",
    "G": "Gated DeltaNet",
    "K": "Kimi Delta Attention",
    "M": "Mamba-2",
}
#: the signs that may follow a letter: the layer has an MLP, or experts
MLP, EXPERTS = "-", "E"


@dataclass(frozen=True)
class HybridModel(CausalTransformerModel):
    """The options of a hybrid.

    Attributes:
        pattern: a letter of :data:`LETTERS` for each layer, repeated. If the pattern has no dash and no E,
            each layer has an MLP, or experts as the options say. Otherwise a layer has an MLP if a dash
            follows its letter, experts if an E does, and else neither, as in Nemotron-H's patterns.
        output_gate: whether the output of softmax attention has a gate, as in Qwen3-Next.
        window: the window of layers W; see :class:`CausalTransformerModel`.
        window_rotary_base: the base of RoPE's angles in layers W (Gemma 3, arXiv 2503.19786); None:
            ``rotary_base``.
        state_heads, state_key_heads: Z and G, heads of values and of keys in layers G, K and M.
        key_size, value_size: D and A, the sizes of a key and of a value in layers G, K and M.
        convolution: the positions that a short convolution sees in layers G, K and M.
        recurrence: how layers G, K and M are computed, one of :data:`WAYS`.
        autotune_states_kib: KiB of the buffer that Triton writes to while it times a recurrence's kernels
            before their first call; see :func:`timed`. 0: the kernels were timed earlier.
        state_processors: the card's multiprocessors, over which backward of Mamba-2 spreads the heads of a
            group, with a partial sum for each share of heads. 0: one sum.
    """

    pattern: str = "S"
    output_gate: bool = False
    window_rotary_base: float | None = None
    state_heads: int = 32
    state_key_heads: int = 16
    key_size: int = 128
    value_size: int = 128
    convolution: int = 4
    recurrence: str = "chunked"
    autotune_states_kib: int = 0
    state_processors: int = 0

    plain_options: ClassVar[Mapping[str, Any]] = {
        **CausalTransformerModel.plain_options,
        "recurrence": "sequential",
    }

    def __post_init__(self) -> None:
        check_choices(self, {"recurrence": recurrent_mixer.WAYS})
        layers = self._layers
        behind = ("", MLP, EXPERTS)
        if not layers or any(layer[0] not in LETTERS or layer[1:] not in behind for layer in layers):
            known = ", ".join(f"{letter} ({what})" for letter, what in LETTERS.items())
            raise ValueError(
                f"pattern has letters of {known}, each with {MLP}, {EXPERTS} or neither, not {self.pattern!r}"
            )
        if EXPERTS in self.pattern and not self.experts:
            raise ValueError(f"pattern {self.pattern!r} has layers with experts; set experts")
        if ("W" in self.pattern) != (self.window is not None):
            raise ValueError(
                f"pattern {self.pattern!r} with window {self.window}: layers W and a window need each other"
            )
        if self.autotune_states_kib and not {*RECURRENCES} & {*self.pattern}:
            raise ValueError("autotune_states_kib needs a layer of G, K or M in pattern")
        if self.window_rotary_base is not None and (self.window is None or self.position != "rotary"):
            raise ValueError("window_rotary_base needs layers W and position: rotary; leave it out")
        super().__post_init__()

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        module = super().build(strategy, seq_len, stage)
        recurrent_mixer.change_rules(module, partial(on_processors, count=self.state_processors))
        if self.autotune_states_kib:
            recurrent_mixer.change_rules(module, partial(timed, nbytes=self.autotune_states_kib * 2**10))
        return module

    @property
    def _layers(self) -> list[str]:
        """The layers of the pattern, each a letter and the dash or E that may follow the letter."""
        return re.findall(f".[{EXPERTS}{MLP}]*", self.pattern)

    def _layer(self, number: int) -> str:
        layers = self._layers
        return layers[number % len(layers)]

    @property
    def period(self) -> int:
        return math.lcm(len(self._layers), super().period)

    def feeding(self, layer: int) -> FeedForward | None:
        if MLP not in self.pattern and EXPERTS not in self.pattern:
            return super().feeding(layer)
        return {MLP: Mlp(), EXPERTS: MixtureOfExperts()}.get(self._layer(layer)[1:])

    def mixing(self, layer: int) -> LinearAttention | SoftmaxAttention | recurrent_mixer.RecurrentLayer:
        letter = self._layer(layer)[0]
        if letter in RECURRENCES:
            return RECURRENCES[letter](
                self.state_heads,
                self.state_key_heads,
                self.key_size,
                self.value_size,
                self.convolution,
                self.recurrence,
            )
        if letter == "L":
            return LinearAttention("silu", tuple(decay_rates(self.heads, layer, self.layers)), gated=True)
        softmax = super().mixing(layer)
        assert isinstance(softmax, SoftmaxAttention)
        softmax = replace(softmax, gated=self.output_gate, window=self.window if letter == "W" else None)
        base = self.window_rotary_base
        return softmax if base is None or letter != "W" else replace(softmax, rotary_base=base)

    def variants(self) -> list[Mapping[str, Any]]:
        # 2 or 4 ranks cannot split 3 heads
        three = {"heads": 3, "kv_heads": None, "state_heads": 3, "state_key_heads": 1}
        # documents that begin right before and right at a boundary of ranks, one longer than a rank's chunk
        documents = {"documents": (5, 1, 11, 7)}
        # windows only in some layers, as in gpt-oss, shorter than documents
        windows = {"pattern": "WS", "window": 5, "sinks": True, "documents": (17, 7)}
        windows |= {"window_rotary_base": 100.0} if self.position == "rotary" else {}
        softmax = [windows] if "S" in self.pattern else []
        return [{"checkpointing": True}, three, documents, *softmax, *self.expert_variants()]

    def shrunk(self) -> Self:
        # a layer of each kind; softmax attention comes first, because its options need such a layer
        kinds = sorted(dict.fromkeys(self._layers), key=lambda layer: layer[0] not in "SW")
        few = replace(self, pattern="".join(kinds), **_TINY_STATES)
        return replace(super(HybridModel, few).shrunk(), layers=len(kinds))


_TINY_STATES: Mapping[str, Any] = {"state_heads": 12, "state_key_heads": 4, "key_size": 4, "value_size": 8}
_TINY: Mapping[str, Any] = {**TINY_SIZES, **_TINY_STATES}

PRESETS = {
    **published("hybrid", HybridModel),
    "gated-deltanet-tiny": HybridModel(**{**_TINY, "state_key_heads": 12}, pattern="G"),
    "mamba2-tiny": HybridModel(**_TINY, pattern="MM-"),
    "kda-tiny": HybridModel(**_TINY, pattern="K"),
    "kimi-linear-tiny": HybridModel(**_TINY, **TINY_LATENT, pattern="KS", position="none"),
    "hybrid-tiny": HybridModel(
        **_TINY, pattern="GS", kv_heads=4, qk_norm=True, output_gate=True, head_dim=8, rotary_share=0.5
    ),
}
