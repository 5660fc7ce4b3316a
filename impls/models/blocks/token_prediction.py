"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): modules behind the last layer that
predict further tokens.

Module d (1, 2, ...) has, at position i, the hidden state of the module before (d = 1: of the last layer) and
the token i + d. It normalises the state and the token's embedding, projects both together to H features, and
runs one layer; from the result, normalised, the model's head predicts token i + d + 1. The tokens come with
the inputs, shifted on the host: so any placement of positions on ranks may cut them.

Every rank has the projection whole; Megatron-Core splits its columns over tp and gathers the result
(core/transformer/multi_token_prediction.py).

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, K modules.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from spbench.impls.attended import Attended
from spbench.impls.kernels.fp8_projection import mark_recipe
from spbench.impls.kernels.projection import mark_library
from spbench.impls.models.blocks.decoder_layer import DecoderBlock, make_norm
from spbench.impls.models.blocks.places import Places
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.layers import Linear

if TYPE_CHECKING:
    from spbench.impls.models.blocks.decoder import DecoderModel


class TokenPrediction(nn.Module):
    """(hidden, embedded) [B, L, H] -> (hidden, the same normalised for the head) [B, L, H]."""

    def __init__(self, model: DecoderModel, strategy: Strategy, layer: int):
        super().__init__()
        self.hidden_norm, self.token_norm = make_norm(model), make_norm(model)
        self.project = Linear(2 * model.hidden, model.hidden, bias=False)
        self.block = DecoderBlock(model, strategy, layer)
        self.norm = make_norm(model)
        self.recipe = model.fp8_recipe
        mark_library(self, model.library)
        mark_recipe(self.project, self.recipe)

    def forward(self, hidden: Tensor, embedded: Tensor, places: Places) -> tuple[Tensor, Tensor]:
        mark_recipe(self.project, self.recipe)
        both = torch.cat((self.token_norm(embedded), self.hidden_norm(hidden)), -1)
        x = self.block(self.project.project(both), places)
        return x, self.norm(x)


def shifted(x: Tensor, modules: int) -> Tensor:
    """x [B, L] at the next positions [B, L, K]: of module d those d further; the last d repeat the last."""
    length = x.shape[1]
    places = torch.arange(length).unsqueeze(-1) + torch.arange(1, modules + 1)
    return x[:, places.clamp(max=length - 1)]


def shifted_inputs(
    tokens: Tensor, labels: Tensor, weights: Tensor, attended: Attended, modules: int
) -> dict[str, Tensor]:
    """What the modules take of a whole batch [B, L] of tokens, labels and weights of the loss: tokens, labels
    and weights [B, L, K]. A weight is 0 where the token is of another document or beyond the sequence."""
    length = tokens.shape[1]
    ends = torch.tensor(attended.ends or (length,))
    positions = torch.arange(length)
    end = ends[torch.bucketize(positions, ends, right=True)].unsqueeze(-1)
    within = positions.unsqueeze(-1) + torch.arange(1, modules + 1) < end
    return {
        "mtp_tokens": shifted(tokens, modules),
        "mtp_labels": shifted(labels, modules),
        "mtp_weights": weights.unsqueeze(-1) * within,
    }
