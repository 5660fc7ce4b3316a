"""What a decoder is made of: its options, and for each layer the kinds of its mixer and of its feed-forward
block, which say what they build, hold and ask of a strategy.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from spbench.impls.composition import Stage
from spbench.impls.models.blocks.adapter_options import LatentProjection
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.expert_options import ExpertOptions
from spbench.impls.models.model import Model, PaddedVocabulary
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.tiles import Tiling


class Mixer(ABC):
    """A kind of mixer: what mixes the tokens in a layer."""

    #: the mixer's projections that may have an adapter, but for those from and to latents
    adapted: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        """The module that mixes the tokens, x [B, L, H] -> [B, L, H]."""

    @abstractmethod
    def width(self, model: DecoderOptions) -> int:
        """Features between the projections that open and close the layer."""

    @abstractmethod
    def gathers_once(self, model: DecoderOptions) -> bool:
        """Whether the input is one tensor for several matmuls."""

    @abstractmethod
    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        """Counts of the layer's parameters: those that can be ``split`` over features, of these the
        ``key_value`` ones that grouped heads share, and the ``whole`` ones that every rank holds."""

    @abstractmethod
    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        """What the layer asks of a strategy for one batch; ``again``: the layer is recomputed."""

    def latents(self, model: DecoderOptions) -> Mapping[str, LatentProjection]:
        """The mixer's projections from and to latents, by their names."""
        return {}


class FeedForward(ABC):
    """A kind of feed-forward block."""

    #: whether what adds its result to the hidden states adds the model's bias too
    closing_bias: ClassVar[bool] = True

    @abstractmethod
    def build(self, model: Architecture, strategy: Strategy) -> nn.Module:
        """The block, x [B, L, H] -> [B, L, H], without the bias of its last projection, which is left to what
        adds the result to the hidden states."""

    @abstractmethod
    def sites(self, model: Architecture, batch: int, seq_len: int, again: bool, spared: bool) -> list[Site]:
        """What the block asks of a strategy for one batch.

        Args:
            again: the layer is recomputed.
            spared: its last projection is not, as nothing behind it is needed for backward.
        """

    @abstractmethod
    def parameters(self, model: Architecture) -> dict[str, int]:
        """Counts of the block's parameters, but for the norm before it: those that can be ``split`` over
        features, of them those that :attr:`LayerHooks.of_mlp` makes (``mlp``), and those that every rank
        holds ``whole``."""


@dataclass(frozen=True)
class Architecture(ExpertOptions, DecoderOptions, PaddedVocabulary, Model):
    """The options of a causal language model, beside those of its layers.

    Attributes:
        vocabulary: rows of the word embedding before padding (50272: GPT-2's 50257, as metaseq pads it).
        vocabulary_multiple: the table is padded to a multiple of this times the strategy's parts of it.
        tied: the head shares the weights of the word embedding.
    """

    vocabulary: int = 50272
    vocabulary_multiple: int = 1
    tied: bool = False

    #: of the MLP: whether the activated projection is multiplied by a second one (a gated linear unit)
    gated_mlp: ClassVar[bool] = True
    #: of the MLP: a key of :data:`ACTIVATIONS`
    activation: ClassVar[str] = "silu"
    #: where norms stand: "before" mixer and MLP, "behind" each, "around", or one "shared" by both
    norms: ClassVar[str] = "before"
    #: whether embedded words are multiplied by the root of ``hidden``
    embedding_scaled: ClassVar[bool] = False
    #: of logits: c tanh(x / c) where it is not 0
    logit_cap: ClassVar[float] = 0.0
    #: whether norms have a weight
    weighted_norms: ClassVar[bool] = True
    #: whether projections have biases
    biases: ClassVar[bool] = False
    #: whether the MLP has the input of the mixer, not its result
    parallel_residual: ClassVar[bool] = False
    #: of what a mixer or an MLP adds to the hidden states, and of the embedding
    dropout: ClassVar[float] = 0.0
    #: rows of a table of learned positions; None: there is none
    learned_positions: ClassVar[int | None] = None
    #: modules of multi-token prediction, and the weight of the mean of their losses
    mtp_layers: ClassVar[int] = 0
    mtp_weight: ClassVar[float] = 0.0
    #: whether a mask of all queries and keys is there while forward runs, though no kernel reads it
    loader_mask: ClassVar[bool] = False

    @abstractmethod
    def mixing(self, layer: int) -> Mixer:
        """What mixes the tokens in a layer."""

    @abstractmethod
    def feeding(self, layer: int) -> FeedForward | None:
        """What follows the mixer in a layer; None: nothing."""

    def mlp_width(self, layer: int) -> int:
        """Features of a layer's MLP, or of its shared experts; 0: it has neither."""
        if self.feeding(layer) is None:
            return 0
        return self.shared_inner if self.has_experts(layer) else self.inner

    @property
    def mlp_projections(self) -> int:
        """Projections that open the MLP."""
        return 2 if self.gated_mlp else 1

    @property
    def shares_embedding(self) -> bool:
        """Whether the first and the last pipeline stage both use the word embedding."""
        return self.tied or self.mtp_layers > 0

    def prediction_layers(self, stage: Stage) -> range:
        """The numbers of the layers that a stage's modules of multi-token prediction have."""
        return range(self.layers, self.layers + self.mtp_layers * stage.last)

    @property
    def loss_tiling(self) -> Tiling:
        """How head and loss are computed."""
        if self.loss_tile == "liger":
            return Tiling(share=-(-self.vocabulary // self.hidden), backward_at_once=True)
        return Tiling(self.loss_tile, backward_at_once=bool(self.loss_tile) and self.tiling != "fpdt")
