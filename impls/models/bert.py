"""BERT (Devlin et al., arXiv 1810.04805) with MLM and sentence-order heads, as single-device code.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden,
V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.layer_norm import LayerNorm
from spbench.impls.models.blocks.encoder import (
    BlockOptions,
    EncoderAttention,
    EncoderBlock,
    LoneEncoderLayer,
    attention_mask,
)
from spbench.impls.models.blocks.text import masked_language_batches
from spbench.impls.models.model import Model, ModelPart, PaddedVocabulary, check_positions
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.layers import Linear


@dataclass(frozen=True)
class BertModel(BlockOptions, PaddedVocabulary, Model):
    """The options of a BERT that are not options of its blocks.

    Attributes:
        vocabulary: rows of the word embedding before padding (30522: BERT's WordPiece vocabulary).
        vocabulary_multiple: the embedding's rows are padded to a multiple of this number times the parts
            that a strategy splits the embedding into (128: Megatron-LM's make-vocab-size-divisible-by).
        max_positions: rows of the table of learned positions; None: as many as a sequence has.
        embedding_norm: normalise the sum of embeddings, as BERT does and Megatron-LM's BERT does not.
        fused_cross_entropy: use the kernel of the loss that keeps and allocates less than torch's operators.
        binary_head: whether there are token types and a head for the order of sentences (Megatron-LM's flag).
    """

    vocabulary: int = 30522
    vocabulary_multiple: int = 128
    token_types: int = 2
    max_positions: int | None = None
    embedding_norm: bool = True
    fused_cross_entropy: bool = True
    binary_head: bool = True

    # the padding mask stays whole because every query needs to know which keys are padding
    sequence_dims: ClassVar[Mapping[str, int | None]] = {
        "tokens": 1,
        "token_types": 1,
        "positions": 0,
        "labels": 1,
        "loss_weights": 1,
        "padding": None,
        "order_labels": None,
        "order_weights": None,
    }
    unbatched: ClassVar[frozenset[str]] = frozenset({"positions"})
    plain_options: ClassVar[Mapping[str, Any]] = {
        "softmax": "plain",
        "bias_dropout_add": "plain",
        "fused_bias_gelu": False,
        "fused_cross_entropy": False,
        "checkpointing": False,
        "library": "torch",
    }

    @property
    def losses(self) -> tuple[str, ...]:  # type: ignore[override]  # as the options are
        return ("mlm", "order") if self.binary_head else ("mlm",)

    def variants(self) -> list[Mapping[str, Any]]:
        plain = {k: v for k, v in self.plain_options.items() if k != "checkpointing"}
        always: list[Mapping[str, Any]] = [{"checkpointing": True}, plain]
        # strategies that split heads refuse 3 heads over 2 or 4 ranks; other strategies accept them
        if self.linformer:
            return always
        pre_norm = {"pre_norm": True, "library": "transformer-engine", "mask_shape": "by_layer"}
        return [*always, {"mask_shape": "square"}, {"heads": 3}, pre_norm]

    def shrunk(self) -> BertModel:
        sizes: dict[str, Any] = {"layers": 2, "hidden": 48, "heads": 12, "vocabulary": 96}
        return replace(self, **sizes, vocabulary_multiple=1, dropout=0.0)

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        return Bert(self, strategy, seq_len, stage)

    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        shape = (batch, seq_len)
        padding = torch.zeros(shape, dtype=torch.int64)
        padding[:, seq_len - seq_len // 8 :] = 1  # 1: a padded position, never a key
        chosen = (torch.rand(shape, generator=generator) < 0.15) & (padding == 0)
        chosen[:, 0] = True  # so that the weights below are never divided by 0
        weights = chosen / chosen.sum()
        return {
            "tokens": torch.randint(self.vocabulary, shape, generator=generator),
            "token_types": torch.randint(self.token_types, shape, generator=generator),
            "positions": torch.arange(seq_len),
            "labels": torch.randint(self.vocabulary, shape, generator=generator),
            "loss_weights": weights,
            "padding": padding,
            "order_labels": torch.randint(2, (batch,), generator=generator),
            **({"order_weights": torch.full((batch,), 1 / batch)} if self.binary_head else {}),
        }

    def batches(self, batch: int, seq_len: int, seed: int) -> Iterator[dict[str, Tensor]]:
        return masked_language_batches(self.vocabulary, batch, seq_len, seed)

    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        tokens = {"B": batch, "L": seq_len}
        check_positions(self.max_positions, seq_len)
        rows, layers = self.padded_vocabulary(vocabulary_parts), len(stage.layers(self.layers))
        hidden, again = tokens | {"H": self.hidden}, self.checkpointing
        heads = tokens | {"Z": self.heads, "A": self.head_size}
        inner = hidden | {"F": 4 * self.hidden}
        sites = [Site("linear_in", 2 * layers, inner, again), Site("linear_out", 2 * layers, inner, again)]
        if self.linformer is None:
            mask = {"mask_rows": 1 if self.mask_shape == "keys" else seq_len}
            if self.library == "torch":
                sites.append(Site("attention", layers, heads | mask, again))
            else:
                sites.append(Site("whole_attention", layers, heads, again))
        else:
            sites.append(Site("project_sequence", 2 * layers, heads | {"K": self.linformer}, again))
        sites += self.vocabulary_sites(batch, seq_len, rows, stage, tied=True)
        sites.append(Site("parameters", 1, self.parameters(seq_len, rows, stage)))
        return sites

    def parameters(self, seq_len: int, rows: int, stage: Stage = ONE_STAGE) -> dict[str, int]:
        """Counts of a pipeline stage's parameters, with an embedding of ``rows`` rows: ``elements``, all but
        Linformer's projections; ``split``, the elements that ranks can split over features or vocabulary;
        ``vocabulary``, the split elements of the vocabulary; ``sequence``, Linformer's projections."""
        h, layers = self.hidden, len(stage.layers(self.layers))
        split = layers * (12 * h * h + 7 * h)  # matrices, and biases of the projections that open a half
        elements = split + layers * (2 * h + 4 * h)  # biases that close a half of a block, two layer norms
        if stage.first:
            tables = (self.max_positions or seq_len) + (self.token_types if self.binary_head else 0)
            elements += tables * h + (2 * h if self.embedding_norm else 0)
        vocabulary = (rows * h if stage.first or stage.last else 0) + (rows if stage.last else 0)
        if stage.last:
            elements += h * h + h + 2 * h  # MLM
            elements += (h * h + h) + (2 * h + 2) if self.binary_head else 0  # pooler, sentence order
            elements += 2 * h if self.pre_norm else 0
        return {
            "elements": elements + vocabulary,
            "split": split + vocabulary,
            "vocabulary": vocabulary,
            "sequence": layers * 2 * (self.linformer or 0) * seq_len,
        }

    def parts(self) -> Mapping[str, ModelPart]:
        def hidden_inputs(batch: int, seq_len: int, generator: torch.Generator) -> dict[str, Tensor]:
            x = torch.randn(batch, seq_len, self.hidden, generator=generator, dtype=torch.float64)
            return {"x": x, "padding": self.inputs(batch, seq_len, generator)["padding"]}

        dims = {"x": 1, "padding": None}
        losses = {"loss": None} | {f"{name}_loss": None for name in self.losses}
        outputs = losses | {"hidden": 1, "token_loss": 1}
        return {
            "attention": ModelPart(
                lambda s, n: LoneEncoderLayer(self, s, n, EncoderAttention), hidden_inputs, dims, {"y": 1}
            ),
            "block": ModelPart(
                lambda s, n: LoneEncoderLayer(self, s, n, EncoderBlock), hidden_inputs, dims, {"y": 1}
            ),
            "model": ModelPart(self.build, self.inputs, self.sequence_dims, outputs),
        }


class Embeddings(nn.Module):
    """The embeddings [B, L, H] of tokens [B, L]: dropout(norm(words + positions + token types))."""

    def __init__(self, model: BertModel, strategy: Strategy, seq_len: int):
        super().__init__()
        self.p, self.random, self.axes = model.dropout, strategy.random, strategy.position_axes
        self.words = _words(model, strategy)
        rows = model.max_positions or seq_len
        self.positions = nn.Embedding(rows, model.hidden)
        self.types = nn.Embedding(model.token_types, model.hidden) if model.binary_head else None
        self.norm: nn.Module = LayerNorm(model.hidden) if model.embedding_norm else nn.Identity()

    def forward(self, tokens: Tensor, token_types: Tensor, positions: Tensor) -> Tensor:
        x = self.words(tokens) + self.positions(positions)
        if self.types is not None:
            x = x + self.types(token_types)
        return self.random.dropout(self.norm(x), self.p, self.axes)


def _words(model: BertModel, strategy: Strategy) -> nn.Module:
    return strategy.embedding(model.padded_vocabulary(strategy.vocabulary_parts), model.hidden)


class MaskedLanguageHead(nn.Module):
    """The head that returns the loss of each token [B, L] from x [B, L, H] and labels [B, L], with the word
    embedding's weights as its last matrix."""

    def __init__(self, model: BertModel, strategy: Strategy):
        super().__init__()
        self.strategy, self.way = strategy, "fused" if model.fused_cross_entropy else "plain"
        self.dense = Linear(model.hidden, model.hidden)
        self.norm = LayerNorm(model.hidden)
        self.bias = strategy.vocabulary_parameter(model.padded_vocabulary(strategy.vocabulary_parts))

    def forward(self, x: Tensor, labels: Tensor, words: Tensor) -> Tensor:
        x = self.norm(F.gelu(self.dense(x), approximate="tanh"))
        logits = self.strategy.vocabulary_logits(x, words, self.bias)
        return self.strategy.cross_entropy(logits, labels, way=self.way)


class Bert(nn.Module):
    """The module of a pipeline stage, or of the whole model.

    ``forward(inputs, hidden)`` takes ``hidden`` [B, L, H] of the stage before (None on the first stage). It
    returns ``hidden`` [B, L, H]; on the last stage also this rank's share of ``mlm_loss``, of ``order_loss``
    (with the binary head) and of their sum ``loss``, and ``token_loss`` [B, L]."""

    def __init__(self, model: BertModel, strategy: Strategy, seq_len: int, stage: Stage):
        super().__init__()
        self.model, self.strategy, self.seq_len, self.stage = model, strategy, seq_len, stage
        self.unbatched = model.unbatched
        layers = stage.layers(model.layers)
        if stage.first:
            self.embeddings: nn.Module = Embeddings(model, strategy, seq_len)
        elif stage.last:
            # the head's copy of the tied weights has the name that the first stage's have
            self.embeddings = nn.ModuleDict({"words": _words(model, strategy)})
        self.blocks = nn.ModuleDict({str(i): EncoderBlock(model, strategy, seq_len) for i in layers})
        if stage.last:
            self.norm: nn.Module = LayerNorm(model.hidden) if model.pre_norm else nn.Identity()
            self.head = MaskedLanguageHead(model, strategy)
            if model.binary_head:
                self.pooler = Linear(model.hidden, model.hidden)
                self.order = Linear(model.hidden, 2)

    @property
    def tied(self) -> Tensor:
        """The word embedding [V, H], which the first and the last pipeline stage both hold."""
        weight = self.embeddings.get_submodule("words").weight
        assert isinstance(weight, Tensor)  # not a Parameter: a backend may have made the weight a view
        return weight

    def boundary_shape(self, inputs: Mapping[str, Tensor]) -> tuple[int, int, int]:
        """The shape (B, L, H) of ``hidden``, which one pipeline stage sends to the next."""
        batch, length = inputs["tokens"].shape
        return batch, length, self.model.hidden

    def forward(self, inputs: Mapping[str, Tensor], hidden: Tensor | None = None) -> dict[str, Tensor]:
        mask = attention_mask(inputs["padding"], self.model, self.strategy)
        if hidden is None:
            hidden = self.embeddings(inputs["tokens"], inputs["token_types"], inputs["positions"])
        x = hidden
        del hidden
        for block in self.blocks.values():
            x = block(x, mask)
        return {"hidden": x, **(self._losses(x, inputs) if self.stage.last else {})}

    def _losses(self, x: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = self.norm(x)
        token_loss = self.head(x, inputs["labels"], self.tied)
        if not self.model.binary_head:
            of_tokens = (token_loss * inputs["loss_weights"]).sum()
            return {"loss": of_tokens, "mlm_loss": of_tokens, "token_loss": token_loss}
        first, share = self.strategy.first_token(x)
        order = self.order(torch.tanh(self.pooler(first))).to(token_loss.dtype)
        order_loss = F.cross_entropy(order, inputs["order_labels"], reduction="none")
        of_tokens = (token_loss * inputs["loss_weights"]).sum()
        of_order = share * (order_loss * inputs["order_weights"]).sum()
        losses = {"loss": of_tokens + of_order, "mlm_loss": of_tokens, "order_loss": of_order}
        return {**losses, "token_loss": token_loss}


_BASE = BertModel()
_LARGE = BertModel(layers=24, hidden=1024, heads=16)
PRESETS = {
    "bert-base": _BASE,
    "bert-large": _LARGE,
    "bert-base-linformer": replace(_BASE, linformer=256),
    # for training on a few CPUs: a few hundred steps, about a minute, lower the loss. There is no dropout,
    # because its masks follow the layout of tensors: each strategy would have another curve of losses
    "bert-mini": BertModel(layers=2, hidden=64, heads=4, vocabulary=1024, vocabulary_multiple=1, dropout=0.0),
    # for verification: 1 to 4 ranks divide the number of heads and the sizes
    "bert-tiny": BertModel(layers=2, hidden=48, heads=12, vocabulary=96, vocabulary_multiple=1, dropout=0.0),
    "bert-tiny-linformer": BertModel(
        layers=2, hidden=48, heads=12, vocabulary=96, vocabulary_multiple=1, dropout=0.0, linformer=8
    ),
}
