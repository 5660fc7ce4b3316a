"""A language model of one layer of causal attention, between an embedding and a head."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

import spbench


@dataclass(frozen=True)
class OneLayerModel(spbench.Model):
    """The options of the model."""

    hidden: int = 48
    heads: int = 12
    vocabulary: int = 96

    sequence_dims: ClassVar[Mapping[str, int]] = {"tokens": 1, "labels": 1, "loss_weights": 1}
    losses: ClassVar[tuple[str, ...]] = ("language",)

    def build(self, strategy, seq_len, stage=spbench.ONE_STAGE):
        if stage.count > 1:
            raise spbench.Unsupported("one layer cannot be split over pipeline stages", "use pp 1")
        return OneLayer(self, strategy)

    def inputs(self, batch, seq_len, generator):
        shape = (batch, seq_len)
        return {
            "tokens": torch.randint(self.vocabulary, shape, generator=generator),
            "labels": torch.randint(self.vocabulary, shape, generator=generator),
            "loss_weights": torch.full(shape, 1 / (batch * seq_len)),
        }

    def rows(self, parts):
        """Rows of the embedding, padded so that it divides into ``parts``."""
        return -(-self.vocabulary // parts) * parts

    def sites(self, batch, seq_len, vocabulary_parts=1, stage=spbench.ONE_STAGE):
        tokens, rows = {"B": batch, "L": seq_len}, self.rows(vocabulary_parts)
        hidden, heads = tokens | {"H": self.hidden}, {"Z": self.heads, "A": self.hidden // self.heads}
        tables, projections = 2 * rows * self.hidden, 4 * self.hidden**2
        return [
            spbench.Site("embedding", 1, hidden | {"V": rows}),
            spbench.Site("linear_in", 1, hidden | {"F": self.hidden}),
            spbench.Site("causal_attention", 1, tokens | heads),
            spbench.Site("linear_out", 1, hidden | {"F": self.hidden}),
            spbench.Site("vocabulary_logits", 1, hidden | {"V": rows}),
            spbench.Site("cross_entropy", 1, tokens | {"V": rows}),
            spbench.Site(
                "parameters",
                1,
                {"elements": tables + projections, "split": tables + projections, "vocabulary": tables},
            ),
        ]

    def parts(self):
        outputs = {"loss": None, "language_loss": None, "hidden": 1}
        return {"model": spbench.ModelPart(self.build, self.inputs, self.sequence_dims, outputs)}


class OneLayer(nn.Module):
    """Tokens [B, L or a part] -> the rank's share of the loss."""

    unbatched: frozenset[str] = frozenset()

    def __init__(self, model, strategy):
        super().__init__()
        self.strategy, self.head_size = strategy, model.hidden // model.heads
        rows = model.rows(strategy.vocabulary_parts)
        self.embedding = strategy.embedding(rows, model.hidden)
        self.project = strategy.grouped_linear_in(model.hidden, model.hidden, 3)
        self.out = strategy.linear_out(model.hidden, model.hidden)
        self.head = strategy.vocabulary_parameter(rows, model.hidden)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = self.embedding(inputs["tokens"])
        q, k, v = (y.unflatten(-1, (-1, self.head_size)).transpose(1, 2) for y in self.project(x))
        o = self.strategy.causal_attention(q.contiguous(), k.contiguous(), v.contiguous())
        x = x + self.out.project(o.transpose(1, 2).flatten(2))
        logits = self.strategy.vocabulary_logits(x, self.head, None)
        token_loss = self.strategy.cross_entropy(logits, inputs["labels"], way="plain")
        loss = (token_loss * inputs["loss_weights"]).sum()
        return {"hidden": x, "loss": loss, "language_loss": loss}


PRESETS = {"one-layer-lm-tiny": OneLayerModel()}
