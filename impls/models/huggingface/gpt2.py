"""GPT-2 (``GPT2LMHeadModel``): learned positions, layer norms, biases, GELU, a head tied to the embedding."""

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from pydantic import NonNegativeFloat, PositiveFloat, PositiveInt

from spbench.impls.models.causal_transformer import CausalTransformerModel
from spbench.impls.models.huggingface.config import Config, not_covered

#: values of the models' option ``mlp``, by transformers' names of activations
MLPS = {
    "gelu": "erf_gelu",
    "gelu_new": "gelu",
    "gelu_fast": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
}


def mlp_of(field: str, activation: str) -> str:
    """The value of the models' option ``mlp`` for an MLP with this activation and without a gate.

    Raises:
        ValueError: no MLP has this activation; the message names the ``field`` of the file.
    """
    if activation not in MLPS:
        raise not_covered(field, activation, f"activations here are {', '.join(MLPS)}")
    return MLPS[activation]


class Gpt2Config(Config):
    """GPT-2's layers. The dropouts of the embedding and of layers' results must be the same number."""

    name: ClassVar[str] = "gpt2"
    fixed: ClassVar[Mapping[str, Sequence[Any]]] = {
        "scale_attn_weights": [True],
        "scale_attn_by_inverse_layer_idx": [False],
        "reorder_and_upcast_attn": [False],
        "add_cross_attention": [False],
    }
    # n_ctx is an older name of n_positions; files have both
    ignored: ClassVar[frozenset[str]] = frozenset(
        {
            "n_ctx",
            "summary_activation",
            "summary_first_dropout",
            "summary_proj_to_labels",
            "summary_type",
            "summary_use_proj",
        }
    )

    vocab_size: PositiveInt
    n_positions: PositiveInt
    n_embd: PositiveInt
    n_layer: PositiveInt
    n_head: PositiveInt
    n_inner: PositiveInt | None = None
    activation_function: str = "gelu_new"
    resid_pdrop: NonNegativeFloat = 0.1
    embd_pdrop: NonNegativeFloat = 0.1
    attn_pdrop: NonNegativeFloat = 0.1
    layer_norm_epsilon: PositiveFloat = 1e-5
    tie_word_embeddings: bool = True

    def model(self) -> CausalTransformerModel:
        if self.embd_pdrop != self.resid_pdrop:
            raise not_covered("embd_pdrop", self.embd_pdrop, f"it must be resid_pdrop, {self.resid_pdrop}")
        return CausalTransformerModel(
            layers=self.n_layer,
            hidden=self.n_embd,
            heads=self.n_head,
            inner=self.n_inner or 4 * self.n_embd,
            vocabulary=self.vocab_size,
            tied=self.tie_word_embeddings,
            norm="layer",
            norm_epsilon=self.layer_norm_epsilon,
            mlp=mlp_of("activation_function", self.activation_function),
            biases=True,
            position="learned",
            max_positions=self.n_positions,
            dropout=self.resid_pdrop,
            attention_dropout=self.attn_pdrop,
        )
