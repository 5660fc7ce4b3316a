"""BERT (``BertForPreTraining``, arXiv 1810.04805): the encoder with the heads of pre-training."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, PositiveInt

from spbench.impls.models.bert import BertModel
from spbench.impls.models.huggingface.config import SizedConfig, not_covered


class BertConfig(SizedConfig):
    """BERT's fields. Whatever ``architectures`` a file names, the model has the heads for masked words and
    for the order of sentences."""

    name: ClassVar[str] = "bert"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        # the model always has the tanh approximation, which costs as much as the exact GELU
        "hidden_act": ["gelu", "gelu_new", "gelu_fast", "gelu_pytorch_tanh"],
        "position_embedding_type": ["absolute"],
        "is_decoder": [False],
        "add_cross_attention": [False],
        "tie_word_embeddings": [True],
    }
    # the model's norms always have an epsilon of 1e-12, as in the files of the paper's authors
    ignored: ClassVar[frozenset[str]] = frozenset({"layer_norm_eps"})

    max_position_embeddings: PositiveInt = 512
    type_vocab_size: PositiveInt = 2
    hidden_dropout_prob: NonNegativeFloat = 0.1
    attention_probs_dropout_prob: NonNegativeFloat = 0.1

    def model(self) -> BertModel:
        if self.intermediate_size != 4 * self.hidden_size:
            raise not_covered("intermediate_size", self.intermediate_size, "it must be 4 times hidden_size")
        if self.attention_probs_dropout_prob != self.hidden_dropout_prob:
            why = f"it must be hidden_dropout_prob, {self.hidden_dropout_prob}"
            raise not_covered("attention_probs_dropout_prob", self.attention_probs_dropout_prob, why)
        return BertModel(
            layers=self.num_hidden_layers,
            hidden=self.hidden_size,
            heads=self.num_attention_heads,
            vocabulary=self.vocab_size,
            vocabulary_multiple=1,
            token_types=self.type_vocab_size,
            max_positions=self.max_position_embeddings,
            dropout=self.hidden_dropout_prob,
        )
