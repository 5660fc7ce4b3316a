"""Pre-norm causal language models without biases, as single-device code.

A layer is x + mixer(norm(x)), then x + mlp(norm(x)); after the last one comes a norm and the head. What
mixes the tokens of each layer is chosen by a subclass, from :mod:`impls.models.blocks.mixers`.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden,
V vocabulary.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.rms_norm import RMSNorm
from spbench.impls.models.blocks.mixers import DecoderOptions, LinearAttention, Places, SoftmaxAttention
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.blocks.text import causal_language_batches
from spbench.impls.models.model import Model, ModelPart, PaddedVocabulary
from spbench.impls.strategies.base import Site, Strategy

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"none": lambda x: x, "silu": F.silu, "gelu": F.gelu}


#: sizes for verification: head count and sizes that divide by 1, 2, 3 and 4. A norm makes something of size
#: one of what is almost zero by chance, as a query's product with a key of 4 features can be; without so
#: large an epsilon, half precisions would compare noise
TINY_SIZES: Mapping[str, Any] = {
    "layers": 2,
    "hidden": 48,
    "heads": 12,
    "inner": 96,
    "vocabulary": 96,
    "norm_epsilon": 0.1,
}


@dataclass(frozen=True)
class DecoderModel(DecoderOptions, PaddedVocabulary, Model):
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
    #: of the MLP: a key of ACTIVATIONS
    activation: ClassVar[str] = "silu"
    #: whether norms have a weight
    weighted_norms: ClassVar[bool] = True

    sequence_dims: ClassVar[Mapping[str, int | None]] = {
        "tokens": 1,
        "labels": 1,
        "loss_weights": 1,
    }
    losses: ClassVar[tuple[str, ...]] = ("language",)
    plain_options: ClassVar[Mapping[str, Any]] = {
        "linear_attention": "quadratic",
        "rms_norm": "plain",
        "cross_entropy": "plain",
        "checkpointing": False,
    }

    @abstractmethod
    def mixing(self, layer: int) -> LinearAttention | SoftmaxAttention:
        """What mixes the tokens in a layer."""

    def __post_init__(self) -> None:
        super().__post_init__()
        asked = [name for name in ("kv_heads", "qk_norm") if getattr(self, name)]
        if asked and not any(isinstance(self.mixing(i), SoftmaxAttention) for i in range(self.layers)):
            raise ValueError(f"{asked[0]} is of softmax attention, which no layer of this model has")

    def variants(self) -> list[Mapping[str, Any]]:
        plain = {k: v for k, v in self.plain_options.items() if k != "checkpointing"}
        # 3 heads cannot be split over 2 or 4 ranks, which only strategies that split heads refuse; one of
        # keys and values is held by all ranks
        one = {"kv_heads": 1} if self.grouped else {}
        return [
            {"checkpointing": True} | one,
            plain | {"heads": 3} | one,
            {"tied": True, "cross_entropy": "fused"},
        ]

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        return Decoder(self, strategy, seq_len, stage)

    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        shape = (batch, seq_len)
        return {
            "tokens": torch.randint(self.vocabulary, shape, generator=generator),
            "labels": torch.randint(self.vocabulary, shape, generator=generator),
            "loss_weights": torch.full(shape, 1 / (batch * seq_len)),
        }

    def batches(self, batch: int, seq_len: int, seed: int) -> Iterator[dict[str, Tensor]]:
        return causal_language_batches(self.vocabulary, batch, seq_len, seed)

    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        rows, layers = self.padded_vocabulary(vocabulary_parts), stage.layers(self.layers)
        hidden, again = {"B": batch, "L": seq_len, "H": self.hidden}, self.checkpointing
        found = [
            Site(kind, len(layers), hidden | {"F": width}, again)
            for width in (self.hidden, self.inner)
            for kind in ("linear_in", "linear_out")
        ]
        mixers = [site for i in layers for site in self.mixing(i).sites(self, batch, seq_len)]
        alike: Counter[tuple[str, tuple[tuple[str, int], ...]]] = Counter()
        for site in mixers:
            alike[site.kind, tuple(site.dims.items())] += site.count
        found += [Site(kind, count, dict(dims), again) for (kind, dims), count in alike.items()]
        found += self.vocabulary_sites(batch, seq_len, rows, stage, tied=self.tied)
        found.append(Site("parameters", 1, self.parameters(rows, stage)))
        return found

    def parameters(self, rows: int, stage: Stage = ONE_STAGE) -> dict[str, int]:
        """Counts of a stage's parameters: all ``elements``, of them those that can be ``split`` over features
        and vocabulary, and of these the ``vocabulary``'s, which has that many ``rows``, and the ``key_value``
        ones that grouped heads share, with the number of these heads."""
        h, layers = self.hidden, stage.layers(self.layers)
        mixers: Counter[str] = Counter()
        for i in layers:
            mixers.update(self.mixing(i).parameters(self))
        norms = h * (2 * len(layers) + stage.last) if self.weighted_norms else 0
        tables = stage.first or stage.last if self.tied else stage.first + stage.last
        vocabulary = tables * rows * h
        split = mixers["split"] + len(layers) * (self.mlp_projections + 1) * h * self.inner + vocabulary
        counts = {"elements": split + mixers["whole"] + norms, "split": split, "vocabulary": vocabulary}
        if self.kv_heads is not None and mixers["key_value"]:
            counts |= {"key_value": mixers["key_value"], "kv_heads": self.kv_heads}
        return counts

    @property
    def mlp_projections(self) -> int:
        """Projections that open the MLP."""
        return 2 if self.gated_mlp else 1

    def parts(self) -> Mapping[str, ModelPart]:
        def hidden_inputs(batch: int, seq_len: int, generator: torch.Generator) -> dict[str, Tensor]:
            return {"x": torch.randn(batch, seq_len, self.hidden, generator=generator, dtype=torch.float64)}

        outputs = {"loss": None, "language_loss": None, "hidden": 1, "token_loss": 1}
        # of the first layer the attention, of the last the block: they may differ
        return {
            "attention": ModelPart(
                lambda s, n: LoneDecoderLayer(self.mixing(0).build(self, s), s, n),
                hidden_inputs,
                {"x": 1},
                {"y": 1},
            ),
            "block": ModelPart(
                lambda s, n: LoneDecoderLayer(DecoderBlock(self, s, self.layers - 1), s, n),
                hidden_inputs,
                {"x": 1},
                {"y": 1},
            ),
            "model": ModelPart(self.build, self.inputs, self.sequence_dims, outputs),
        }


class DecoderMlp(nn.Module):
    """x [B, L, H] -> [B, L, H]: W_out (f(W_1 x) * W_2 x), or W_out f(W_1 x) without a gate."""

    def __init__(self, model: DecoderModel, strategy: Strategy):
        super().__init__()
        self.activation = ACTIVATIONS[model.activation]
        self.project = strategy.grouped_linear_in(model.hidden, model.inner, model.mlp_projections)
        self.out = strategy.linear_out(model.inner, model.hidden)

    def forward(self, x: Tensor) -> Tensor:
        x, *factors = self.project(x)
        x = self.activation(x)
        return self.out.project(x * factors[0] if factors else x)


class DecoderBlock(nn.Module):
    """x [B, L, H] -> [B, L, H], recomputed in backward if asked for."""

    def __init__(self, model: DecoderModel, strategy: Strategy, layer: int):
        super().__init__()
        self.checkpointing, self.random = model.checkpointing, strategy.random
        self.mixer_norm = _norm(model)
        self.mixer = model.mixing(layer).build(model, strategy)
        self.mlp_norm = _norm(model)
        self.mlp = DecoderMlp(model, strategy)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        if self.checkpointing:
            return recomputed(self._block, self.random, x, places)
        return self._block(x, places)

    def _block(self, x: Tensor, places: Places) -> Tensor:
        x = x + self.mixer(self.mixer_norm(x), places)
        return x + self.mlp(self.mlp_norm(x))


def _norm(model: DecoderModel) -> nn.Module:
    weighted, epsilon, way = model.weighted_norms, model.norm_epsilon, model.rms_norm
    return RMSNorm(model.hidden, weighted=weighted, eps=epsilon, way=way)


class LoneDecoderLayer(nn.Module):
    """A mixer or a block with inputs of its own, for verification."""

    def __init__(self, layer: nn.Module, strategy: Strategy, seq_len: int):
        super().__init__()
        self.layer, self.strategy, self.seq_len = layer, strategy, seq_len

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = inputs["x"]
        return {"y": self.layer(x, Places(self.strategy, self.seq_len, x))}


class Decoder(nn.Module):
    """A pipeline stage of the model, or all of it.

    ``forward(inputs, hidden)``, with ``hidden`` [B, L, H] of the stage before (None on the first), returns
    ``hidden`` [B, L, H], before the final norm, and on the last stage ``loss``, this rank's share, the same
    as ``language_loss``, and ``token_loss`` [B, L].
    """

    def __init__(self, model: DecoderModel, strategy: Strategy, seq_len: int, stage: Stage):
        super().__init__()
        self.model, self.strategy, self.seq_len, self.stage = model, strategy, seq_len, stage
        self.unbatched = model.unbatched
        rows = model.padded_vocabulary(strategy.vocabulary_parts)
        if stage.first or (stage.last and model.tied):  # the last holds a copy, under the same name
            self.embedding = strategy.embedding(rows, model.hidden)
        self.blocks = nn.ModuleDict(
            {str(i): DecoderBlock(model, strategy, i) for i in stage.layers(model.layers)}
        )
        if stage.last:
            self.norm = _norm(model)
            if not model.tied:
                self.head = strategy.vocabulary_parameter(rows, model.hidden)

    @property
    def tied(self) -> Tensor | None:
        """The word embedding where the first and the last stage both hold it."""
        if not self.model.tied:
            return None
        weight: Tensor = self.embedding.weight  # type: ignore[assignment]
        return weight

    def boundary_shape(self, inputs: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """The shape of ``hidden``."""
        batch, length = inputs["tokens"].shape
        return batch, length, self.model.hidden

    def forward(self, inputs: Mapping[str, Tensor], hidden: Tensor | None = None) -> dict[str, Tensor]:
        x = self.embedding(inputs["tokens"]) if hidden is None else hidden
        del hidden
        places = Places(self.strategy, self.seq_len, x)
        for block in self.blocks.values():
            x = block(x, places)
        return {"hidden": x, **(self._losses(x, inputs) if self.stage.last else {})}

    def _losses(self, x: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        weight = self.head if (tied := self.tied) is None else tied
        logits = self.strategy.vocabulary_logits(self.norm(x), weight, None)
        fused = self.model.cross_entropy == "fused"
        token_loss = self.strategy.cross_entropy(logits, inputs["labels"], fused=fused)
        loss = (token_loss * inputs["loss_weights"]).sum()
        return {"loss": loss, "language_loss": loss, "token_loss": token_loss}
