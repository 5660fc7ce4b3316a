"""Latent attention to the positions that an indexer chooses (DeepSeek-V3.2, arXiv 2512.02556, section 2.1;
GLM-5, arXiv 2602.15763), as the mixer of a layer.

The lightning indexer makes queries of J small heads from the latent of queries, one key for each position
from the hidden state (with layer norm), and a weight for each head from the hidden state; RoPE turns the
first R features of its queries and keys. Each position then attends to the K positions with the best scores
(:mod:`spbench.impls.kernels.chosen_attention`).

Keys and values are not projected up: the rows of the up-projection that make keys are multiplied with the
queries instead, and those that make values with the result, so that all heads attend to the same row of C + R
features ("absorbed", Megatron-Core's and prime-rl's form for sparse kernels). A rank thus needs only these
rows of other ranks' positions.

The indexer is frozen: the choice of positions has no gradient, so transformers (deepseek_v32, under
torch.no_grad) and prime-rl (its pull request 2799) train none of its weights, and Megatron-LM trains these
only with a dsa_indexer_loss_coeff, which by default is not set. Left out are that loss (the divergence from
attention's own probabilities, with which DeepSeek made the indexer in a dense warm-up and kept training it),
the Hadamard rotation, which changes no score, and scores in 8 bits.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, Z heads, Q
and C features of the latents of queries and of keys and values; N, R and A as in
:mod:`spbench.impls.models.blocks.latent_mixer`; J heads of the indexer with D features, K chosen positions.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from spbench.impls.kernels.chosen_attention import Choice, Index, Near
from spbench.impls.kernels.layer_norm import LayerNorm
from spbench.impls.models.blocks.attention_mixer import AttentionMixer
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.latent_mixer import LatentAttention, LatentAttentionMixer
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.layers import Linear

#: the number that the layer norm of index keys adds to the variance, in transformers' deepseek_v32
_EPSILON = 1e-6


@dataclass(frozen=True)
class IndexedAttention(LatentAttention):
    """The kind of mixer that is latent attention to chosen positions; ``block``: the positions for which a
    row stands."""

    block: int = 1

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return IndexedMixer(self, model, strategy)

    def untrained(self, model: DecoderOptions) -> int:
        assert self.q_lora_rank is not None
        queries = self.q_lora_rank * self.index_n_heads * self.index_head_dim
        return queries + model.hidden * (self.index_head_dim + self.index_n_heads) + 2 * self.index_head_dim

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        counts = super().parameters(model)
        return counts | {"whole": counts["whole"] + self.untrained(model)}

    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        dims = {"B": batch, "L": seq_len, "Z": model.heads, "F": self.row_size, "D": self.index_head_dim}
        again = again or model.recomputes("core_attn")
        return [Site("indexed_attention", 1, dims | self.heeded(model.attended(seq_len), seq_len), again)]


def turned_first(x: Tensor, size: int, turn: Callable[[Tensor], Tensor]) -> Tensor:
    """x [B, L, ..., features] with the first ``size`` features turned by RoPE."""
    first, rest = x.split([size, x.shape[-1] - size], -1)
    return torch.cat((turn(first), rest), -1)


class Indexer(nn.Module):
    """The frozen indexer: x [B, L, H] and the normalised latent of queries [B, L, Q] -> :class:`Index`."""

    def __init__(self, kind: IndexedAttention, hidden: int):
        super().__init__()
        assert kind.q_lora_rank is not None
        self.heads, self.size, self.turned = kind.index_n_heads, kind.index_head_dim, kind.qk_rope_head_dim
        self.queries = Linear(kind.q_lora_rank, self.heads * self.size, bias=False)
        if kind.block == 1:
            self.key = Linear(hidden, self.size, bias=False)
            self.key_norm = LayerNorm(self.size, _EPSILON)
        self.weights = Linear(hidden, self.heads, bias=False)
        self.requires_grad_(False)

    @torch.no_grad()
    def forward(
        self, x: Tensor, of_queries: Tensor, turn: Callable[[Tensor], Tensor], k: Tensor | None = None
    ) -> Index:
        q = self.queries.project(of_queries).unflatten(-1, (self.heads, self.size))
        if k is None:  # a key for each position
            k = turned_first(self.key_norm(self.key.project(x)), self.turned, turn)
        weights = self.weights.project(x) * (self.heads * self.size) ** -0.5
        return Index(turned_first(q, self.turned, turn), k, weights)


class IndexedMixer(LatentAttentionMixer):
    """The module of latent attention to chosen positions, x [B, L, H] -> [B, L, H]."""

    kind: IndexedAttention

    def __init__(self, kind: IndexedAttention, model: DecoderOptions, strategy: Strategy):
        super().__init__(kind, model, strategy)
        self.indexer = Indexer(kind, model.hidden)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        kind = self.kind
        of_queries, latent, shared = self._latents(x)
        of_queries, latent = self._normalised(of_queries, latent, copied=True)
        index = self.indexer(x, of_queries, lambda y: self.turned(y, places))
        of_keys, of_values = self._up_weights()
        q = self.q_up.project(of_queries, None).unflatten(-1, (self.model.heads, -1))
        plain, turned = q.split([kind.qk_nope_head_dim, kind.qk_rope_head_dim], -1)
        absorbed = torch.einsum("blzn,znc->blzc", plain, of_keys)
        q = torch.cat((absorbed, self.turned(turned, places)), -1)
        rows = torch.cat((latent, self.turned(shared, places)), -1)
        y = torch.einsum("blzc,zac->blza", attend_to_chosen(self, q, rows, index, places), of_values)
        return self.closed(y.flatten(2))

    def _up_weights(self) -> tuple[Tensor, Tensor]:
        """The up-projection's rows of keys [Z, N, C] and of values [Z, A, C]."""
        by_head = self.kv_up.weight.view(self.model.heads, -1, self.kind.kv_lora_rank)
        of_keys, of_values = by_head.split([self.kind.qk_nope_head_dim, self.kind.v_head_dim], 1)
        return of_keys, of_values


def attend_to_chosen(
    mixer: AttentionMixer, q: Tensor, rows: Tensor | None, index: Index | None, places: Places, *near: Tensor
) -> Tensor:
    """The attention [B, L, Z, C] of a mixer's queries [B, L, Z, F] to chosen rows [B, L, F] of all positions,
    or of blocks, and to what lies ``near`` (the fields of :class:`Near`)."""
    kind, ask = mixer.kind, mixer.strategy.indexed_attention
    assert isinstance(kind, IndexedAttention)
    how = Choice(
        *(kind.index_topk, kind.index_tile, kind.indexed_attention, kind.kv_lora_rank, kind.key_size**-0.5),
        *(kind.attended(places.attended, places.seq_len), kind.block),
    )
    asked = q, rows, index, how, Near(*near) if near else None
    if mixer.model.recomputes("core_attn"):
        return recomputed(ask, mixer.strategy.random, *asked)
    return ask(*asked)
