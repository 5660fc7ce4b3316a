"""Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434, section 2.1) as the mixer of a layer.

A matmul projects the input down to a latent vector for each position; others project the latent up to the
keys and values of all heads. Queries come from a latent of their own, or from the input. Each latent may be
normalised. RoPE turns further features of each query, and one further key, which all heads share. So queries
and keys have another head size than values, and the softmax is scaled by all features of a key.

A rank of tensor parallelism has all weights that project down, and its heads' part of the weights that
project up, as in Megatron-Core (core/transformer/multi_latent_attention.py). RoPE turns pairs of neighbours
in Megatron-Core, but pairs of halves in this package, which changes neither shapes nor costs.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden, Z heads
(this rank's), Q and C features of the latents of queries and of keys and values; of a head N features of a
query and key without a position and R that RoPE turns, A of a value.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.kernels.rotary import keys_and_values, turned_queries
from spbench.impls.models.blocks.adapter_options import CLOSING, LATENT, QKV, LatentProjection
from spbench.impls.models.blocks.adapters import OpeningAdapters
from spbench.impls.models.blocks.attention_mixer import AttentionMixer
from spbench.impls.models.blocks.decoder_options import DecoderOptions
from spbench.impls.models.blocks.norms import norm_of
from spbench.impls.models.blocks.places import Places
from spbench.impls.models.blocks.recomputation import used_without_results
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttention
from spbench.impls.models.blocks.softmax_options import LatentSizes
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.layers import GroupedLinear, Linear


@dataclass(frozen=True)
class LatentAttention(LatentSizes, SoftmaxAttention):
    """The kind of mixer that is latent attention."""

    adapted: ClassVar[Sequence[str]] = (CLOSING,)

    @property
    def key_size(self) -> int:
        """The features of a query and of a key of one head, N + R."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def up_size(self) -> int:
        """The features of a head's key and value that come from the latent, N + A."""
        return self.qk_nope_head_dim + self.v_head_dim

    @property
    def row_size(self) -> int:
        """The features of the latent and of the key features that all heads share, C + R."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    def build(self, model: DecoderOptions, strategy: Strategy) -> nn.Module:
        return LatentAttentionMixer(self, model, strategy)

    def width(self, model: DecoderOptions) -> int:
        return model.heads * self.v_head_dim

    def latents(self, model: DecoderOptions) -> Mapping[str, LatentProjection]:
        h, heads = model.hidden, model.heads
        queries = heads * self.key_size
        if self.q_lora_rank is None:
            of_queries = {QKV[0]: LatentProjection(h, queries, True)}
        else:
            of_queries = {
                LATENT[0]: LatentProjection(h, self.q_lora_rank, False),
                LATENT[1]: LatentProjection(self.q_lora_rank, queries, True),
            }
        return of_queries | {
            LATENT[2]: LatentProjection(h, self.row_size, False),
            LATENT[3]: LatentProjection(self.kv_lora_rank, heads * self.up_size, True),
        }

    def parameters(self, model: DecoderOptions) -> dict[str, int]:
        h, heads, of_norm = model.hidden, model.heads, self.latent_norms * (2 if model.norm == "layer" else 1)
        up = heads * ((self.q_lora_rank or h) * self.key_size + self.kv_lora_rank * self.up_size)
        down = h * self.row_size + of_norm * self.kv_lora_rank
        if self.q_lora_rank is not None:
            down += (h + of_norm) * self.q_lora_rank
        return {"split": up + self.width(model) * h + self.sinks * heads, "key_value": 0, "whole": down}

    def sites(self, model: DecoderOptions, batch: int, seq_len: int, again: bool) -> list[Site]:
        up_again = again or model.recomputes("mla_up_proj")

        def opens(features: int, to: int) -> Site:
            sizes = {"B": batch, "L": seq_len, "H": features, "F": to}
            return Site("linear_in", 1, sizes | model.gathered_dims, up_again)

        tokens, heads = {"B": batch, "L": seq_len}, model.heads
        sites = [
            opens(self.q_lora_rank or model.hidden, heads * self.key_size),
            opens(self.kv_lora_rank, heads * self.up_size),
            Site("linear_in", 1, tokens | {"H": self.qk_rope_head_dim, "gathered_once": 1}, again),
        ]
        sizes = {"Z": heads, "A": self.key_size}
        if not self.padded_values and self.key_size != self.v_head_dim:
            sizes |= {"A": self.v_head_dim, "D": self.key_size}
            if not self.needs_all_positions:
                sizes["unlike_values"] = 1
        return [*sites, self.meeting(model, batch, seq_len, sizes, again)]


class LatentAttentionMixer(AttentionMixer):
    """The module of latent attention, x [B, L, H] -> [B, L, H], without the bias of its last projection."""

    kind: LatentAttention

    def __init__(self, kind: LatentAttention, model: DecoderOptions, strategy: Strategy):
        super().__init__(kind, model, strategy)
        hidden, heads = model.hidden, model.heads
        self.q_down = None if kind.q_lora_rank is None else Linear(hidden, kind.q_lora_rank, bias=False)
        self.q_norm = norm_of(model, kind.q_lora_rank) if kind.latent_norms and kind.q_lora_rank else None
        self.q_up = strategy.grouped_linear_in(kind.q_lora_rank or hidden, heads * kind.key_size, 1)
        self.kv_down = Linear(hidden, kind.row_size, bias=False)
        self.kv_norm = norm_of(model, kind.kv_lora_rank) if kind.latent_norms else None
        self.kv_up = strategy.grouped_linear_in(kind.kv_lora_rank, heads * kind.up_size, 1)
        self.close()
        latents = {name: of for name, of in kind.latents(model).items() if model.adapts([name])}
        self.adapters = nn.ModuleDict({name: self._adapter(name, of) for name, of in latents.items()})
        self.adapt_closing()

    def _adapter(self, name: str, of_latent: LatentProjection) -> OpeningAdapters:
        def up(rank: int, place: int = 0) -> nn.Module:
            if of_latent.split:
                return self.strategy.grouped_linear_in(rank, of_latent.outputs, 1)
            return GroupedLinear(rank, of_latent.outputs, 1)

        return OpeningAdapters(self.model, self.strategy, of_latent.inputs, (name,), up, up)

    def _adapted(self, name: str, x: Tensor, y: Tensor) -> Tensor:
        """y, the projection ``name`` of x, plus the output of the projection's adapter, if there is one."""
        if name not in self.adapters:
            return y
        (adapted,) = self.adapters[name](x, (y,))
        return cast(Tensor, adapted)

    def forward(self, x: Tensor, places: Places) -> Tensor:
        return self.closed(self.beside_heads(self._attended(*self._latents(x), places)))

    def _attended(self, of_queries: Tensor, latent: Tensor, shared: Tensor, places: Places) -> Tensor:
        """The attention [B, Z, L, A] of the three tensors that :meth:`_latents` returns."""

        def attend(*heads: Tensor) -> Tensor:
            q, k, v = (x.transpose(1, 2) for x in heads)
            return self.attend_to(q, k, v, places)[..., : self.kind.v_head_dim]

        inputs = of_queries, latent, shared, places
        if not self.model.recomputes("mla_up_proj"):
            return attend(*self._up(*inputs))
        return used_without_results(self._up, attend, self.strategy.random, inputs)

    def _latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The latent of queries [B, L, Q] (or x itself), the latent of keys and values [B, L, C], and the key
        features [B, L, R] that all heads share."""
        of_queries = x if self.q_down is None else self._adapted(LATENT[0], x, self.q_down.project(x))
        down = self._adapted(LATENT[2], x, self.kv_down.project(x))
        latent, shared = down.split([self.kind.kv_lora_rank, self.kind.qk_rope_head_dim], -1)
        # the heads of every rank use this key
        return of_queries, latent, self.strategy.features_for_heads(shared)

    def _normalised(self, of_queries: Tensor, latent: Tensor, copied: bool) -> tuple[Tensor, Tensor]:
        """The two latents after their norms, if they have norms. ``copied``: the latent of keys and values is
        copied before its norm, because libraries' norms take no views."""
        of_queries = of_queries if self.q_norm is None else self.q_norm(of_queries)
        if self.kv_norm is not None:
            latent = self.kv_norm(latent.contiguous() if copied else latent)
        return of_queries, latent

    def _up(
        self, of_queries: Tensor, latent: Tensor, shared: Tensor, places: Places
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, L, Z, N + R], and values [B, L, Z, A], or longer where ``padded_values``."""
        q, k, v = self._projected_up(of_queries, latent, shared, places)
        return q, k, F.pad(v, (0, k.shape[-1] - v.shape[-1])) if self.kind.padded_values else v

    def _projected_up(
        self, of_queries: Tensor, latent: Tensor, shared: Tensor, places: Places
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [B, L, Z, N + R], and values [B, L, Z, A] without padding."""
        kind = self.kind
        of_queries, latent = self._normalised(of_queries, latent, copied=self.model.fused)
        q, kv = self.q_up.project(of_queries, None), self.kv_up.project(latent, None)
        q = self._adapted(QKV[0] if self.q_down is None else LATENT[1], of_queries, q)
        kv = self._adapted(LATENT[3], latent, kv)
        heads, base = q.shape[-1] // kind.key_size, kind.rotary_base
        sizes = [kind.qk_nope_head_dim, kind.v_head_dim]
        if base is not None and self.model.fuses("rope"):
            angles = places.angles(kind.qk_rope_head_dim, base)
            q = turned_queries(q, angles, heads)
            return q.unflatten(-1, (heads, -1)), *keys_and_values(kv, shared, angles, heads, sizes[0])
        q, kv = (y.unflatten(-1, (heads, -1)) for y in (q, kv))
        k, v = kv.split(sizes, -1)
        if not self.model.attention_views:
            v = v.contiguous()  # so that the projection's memory is freed
        shared = self.turned(shared.unsqueeze(2), places).expand(-1, -1, heads, -1)
        plain, turned = q.split([kind.qk_nope_head_dim, kind.qk_rope_head_dim], -1)
        return torch.cat((plain, self.turned(turned, places)), -1), torch.cat((k, shared), -1), v
