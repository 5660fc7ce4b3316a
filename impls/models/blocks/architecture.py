"""A decoder before it is built: its options, and for each layer the kind of the mixer (attention or another
module that mixes tokens) and of the feed-forward block. A kind says which module it builds, how many
parameters the module has, and which sites (calls of the strategy) it makes.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden."""

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
    """A kind of mixer, the module that mixes the tokens of a layer, such as attention."""

    #: the names of the mixer's projections that may have an adapter, but for projections from and to latents
    adapted: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        """The mixer's module, which maps x [B, L, H] and :class:`Places` to [B, L, H]."""

    @abstractmethod
    def width(self, model: DecoderOptions) -> int:
        """The features of all heads between the projections that open and close the mixer."""

    @abstractmethod
    def gathers_once(self, model: DecoderOptions) -> bool:
        """Whether a strategy that gathers the mixer's input keeps the whole input for backward."""

    @abstractmethod
    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        """Counts of the mixer's parameters: ``split``, those that ranks can split over features;
        ``key_value``, those of ``split`` that grouped heads share; ``whole``, those that every rank holds."""

    def untrained(self, model: DecoderOptions) -> int:
        """The number of the mixer's parameters, of its ``whole`` ones, that no step trains."""
        return 0

    @abstractmethod
    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        """The sites of the mixer for one batch; ``again``: whether backward recomputes the layer."""

    def latents(self, model: DecoderOptions) -> Mapping[str, LatentProjection]:
        """The sizes of the mixer's projections from and to latents, by the projections' names."""
        return {}


class FeedForward(ABC):
    """A kind of feed-forward block."""

    #: whether :class:`AddToHidden`, which adds the block's result to the hidden states, also adds a bias
    closing_bias: ClassVar[bool] = True

    @abstractmethod
    def build(self, model: Architecture, strategy: Strategy) -> nn.Module:
        """The block's module, x [B, L, H] -> [B, L, H], without the bias of its last projection:
        :class:`AddToHidden` adds that bias."""

    @abstractmethod
    def sites(self, model: Architecture, batch: int, seq_len: int, again: bool, spared: bool) -> list[Site]:
        """The block's sites for one batch.

        Args:
            again: whether backward recomputes the layer.
            spared: whether recomputation stops before the block's last projection, which backward needs not.
        """

    @abstractmethod
    def parameters(self, model: Architecture) -> dict[str, int]:
        """Counts of the block's parameters, without its norm: ``split``, those that ranks can split over
        features; ``mlp``, those of ``split`` that :attr:`LayerHooks.of_mlp` makes; ``whole``, those that
        every rank holds."""


@dataclass(frozen=True)
class Architecture(ExpertOptions, DecoderOptions, PaddedVocabulary, Model):
    """The options of a causal language model, with those of its layers and of its experts.

    Attributes:
        vocabulary: rows of the word embedding before padding (50272: GPT-2's 50257, as metaseq pads it).
        vocabulary_multiple: the embedding's rows are padded to a multiple of this number times the parts
            that a strategy splits the embedding into.
        tied: whether the head shares the weights of the word embedding."""

    vocabulary: int = 50272
    vocabulary_multiple: int = 1
    tied: bool = False

    #: whether the MLP multiplies its activated projection by a second projection (a gated linear unit)
    gated_mlp: ClassVar[bool] = True
    #: the activation of the MLP, a key of :data:`ACTIVATIONS`
    activation: ClassVar[str] = "silu"
    #: where norms stand: "before" mixer and MLP, "behind" each, "around", or one "shared" by both
    norms: ClassVar[str] = "before"
    #: whether embedded words are multiplied by the root of ``hidden``
    embedding_scaled: ClassVar[bool] = False
    #: c, where logits x become c tanh(x / c); 0: logits stay as they are
    logit_cap: ClassVar[float] = 0.0
    #: whether norms have a weight
    weighted_norms: ClassVar[bool] = True
    #: whether projections have biases
    biases: ClassVar[bool] = False
    #: whether the MLP takes the mixer's input instead of the hidden states after the mixer
    parallel_residual: ClassVar[bool] = False
    #: the dropout of a mixer's and an MLP's results, and of the embedding
    dropout: ClassVar[float] = 0.0
    #: rows of the table of learned positions; None: the model has no such table
    learned_positions: ClassVar[int | None] = None
    #: the number of modules of multi-token prediction, and the weight of the mean of their losses
    mtp_layers: ClassVar[int] = 0
    mtp_weight: ClassVar[float] = 0.0
    #: whether forward holds a mask of all queries and keys, though no kernel reads the mask
    loader_mask: ClassVar[bool] = False

    @abstractmethod
    def mixing(self, layer: int) -> Mixer:
        """The kind of mixer of a layer."""

    @abstractmethod
    def feeding(self, layer: int) -> FeedForward | None:
        """The kind of feed-forward block of a layer; None: the layer has no such block."""

    def mlp_width(self, layer: int) -> int:
        """The inner features of a layer's MLP or shared experts; 0: the layer has neither."""
        if self.feeding(layer) is None:
            return 0
        return self.shared_inner if self.has_experts(layer) else self.inner

    @property
    def mlp_projections(self) -> int:
        """The number of projections that open the MLP: 2 with a gate, 1 without."""
        return 2 if self.gated_mlp else 1

    @property
    def shares_embedding(self) -> bool:
        """Whether the first and the last pipeline stage both use the word embedding."""
        return self.tied or self.mtp_layers > 0

    def prediction_layers(self, stage: Stage) -> range:
        """The layer numbers of a stage's modules of multi-token prediction, empty but for the last stage."""
        return range(self.layers, self.layers + self.mtp_layers * stage.last)

    @property
    def loss_tiling(self) -> Tiling:
        """The tiles of tokens in which head and loss are computed."""
        if self.loss_tile == "liger":
            return Tiling(share=-(-self.vocabulary // self.hidden), backward_at_once=True)
        return Tiling(self.loss_tile, backward_at_once=bool(self.loss_tile) and self.tiling != "fpdt")
