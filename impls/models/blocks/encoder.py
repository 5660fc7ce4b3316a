"""Encoder blocks, with layer norms after each half, as BERT has them, or before each, as single-device code.

The attention can be Linformer's (arXiv 2006.04768), which projects keys and values along the sequence to K
positions, by a matrix each that all heads of a layer share ("headwise sharing", section 4 of the paper).

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden,
Z heads (this rank's), A head size, K Linformer's projected length.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from spbench.impls.kernels.activations import bias_gelu
from spbench.impls.kernels.dropout import bias_dropout_add
from spbench.impls.kernels.layer_norm import LayerNorm
from spbench.impls.kernels.projection import LIBRARIES, mark_library
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.model import AttentionHeads
from spbench.impls.options import Saving, check_choices
from spbench.impls.strategies.base import Strategy

_WAYS = {
    "mask_shape": ("keys", "square", "by_layer"),
    "softmax": ("fused", "plain", "megatron"),
    "bias_dropout_add": ("fused", "plain", "torchscript"),
    "library": LIBRARIES,
}


@dataclass(frozen=True)
class BlockOptions(AttentionHeads):
    """The options of an encoder block: its parts, and the kernels that compute them.

    Attributes:
        mask_shape: "keys" masks padded keys with [B, 1, 1, L]; "square" builds Megatron-LM's mask
            [B, 1, queries, L] by an int64 multiplication of the padding mask with itself; "by_layer": each
            layer of library transformer-engine makes the square mask, keeps it for backward, and sets masked
            probabilities to 0, as TransformerEngine does since 1.10 (UnfusedDotProductAttention).
        linformer: K, or None for full attention.
        checkpointing: recompute each block in backward.
        softmax: "fused", "plain" or "megatron"; see :func:`masked_softmax`.
        bias_dropout_add: "fused", "plain", or "torchscript", which keeps dropout's input too; see
            :func:`bias_dropout_add`.
        fused_bias_gelu: use the kernel that keeps and allocates less than torch's operators.
        pre_norm: norms stand before each half of a block, and one after the last block, as in Megatron-Core's
            BERT.
        library: the library whose layers the blocks have, one of LIBRARIES. Libraries other than torch keep
            queries, keys and values in one tensor.
    """

    layers: int = 12
    hidden: int = 768
    heads: int = 12
    dropout: float = 0.1
    mask_shape: str = "keys"
    linformer: int | None = None
    checkpointing: bool = False
    softmax: str = "fused"
    bias_dropout_add: str = "fused"
    fused_bias_gelu: bool = True
    pre_norm: bool = False
    library: str = "torch"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choices(self, _WAYS)
        if self.linformer is not None and self.library != "torch":
            raise ValueError(f"Linformer is torch's own; library {self.library} has none")
        if self.linformer is not None and self.mask_shape != "keys":
            raise ValueError("Linformer attends to projected keys; its mask_shape is 'keys'")

    @property
    def masks_by_layer(self) -> bool:
        """Whether each layer makes a mask of all queries and keys for itself."""
        return self.mask_shape == "by_layer" and self.library == "transformer-engine"

    def savings(self, stages: int = 1) -> Iterator[Saving]:
        """The changes of options that take less memory; see :meth:`Model.savings`."""
        if not self.checkpointing:
            yield Saving({"checkpointing": True}, "backward runs all blocks again")


class EncoderAttention(nn.Module):
    """Multi-head self-attention without the bias of its last projection: x [B, L, H] -> [B, L, H]."""

    def __init__(self, model: BlockOptions, strategy: Strategy, seq_len: int):
        super().__init__()
        self.model, self.strategy = model, strategy
        self.head_size = model.head_size
        self.qkv = strategy.linear_in(model.hidden, 3 * model.hidden)
        self.out = strategy.linear_out(model.hidden, model.hidden)
        if model.linformer is not None:
            self.key_projection = strategy.sequence_parameter(model.linformer, seq_len)
            self.value_projection = strategy.sequence_parameter(model.linformer, seq_len)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        # the rows of the weight are ordered head by head, so that a split of rows is a split of heads
        heads = self.qkv(x).unflatten(-1, (-1, 3, self.head_size))  # [B, L, Z, 3, A]
        if self.model.library != "torch":
            q, k, v = (part.transpose(1, 2) for part in heads.unbind(-2))
            y = self.attend_in_place(q, k, v, mask)
            return self.out.project(y.transpose(1, 2).flatten(2))
        # each [B, Z, L, A]; copied even if contiguous, because ``attend`` writes into these tensors
        layout = torch.contiguous_format
        q, k, v = (part.transpose(1, 2).clone(memory_format=layout) for part in heads.unbind(-2))
        del heads
        y = self.attend(q, k, v, mask)
        del q, k, v
        if self.model.mask_shape == "by_layer":
            y = y.masked_fill(mask.all(-1, keepdim=True), 0)  # as if all probabilities were 0
        return self.out.project(y.transpose(1, 2).flatten(2))

    def attend_in_place(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """The attention [B, Z, L, A] of q, k and v [B, Z, L, A], which are views of one projection."""
        into = self.strategy.buffer if self.model.library == "megatron-local" else None
        clear = self.model.masks_by_layer
        return self.strategy.whole_attention(
            q,
            k,
            v,
            dropout=self.model.dropout,
            scores="fused",
            into=into,
            mask=mask | mask.mT if clear else mask,
            clear=clear,
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        """The attention [B, Z, L, A] of q, k and v [B, Z, L, A], or Linformer's with ``linformer``."""
        how: dict[str, Any] = {"dropout": self.model.dropout, "softmax": self.model.softmax}
        if self.model.linformer is None:
            return self.strategy.attention(q, k, v, mask, **how)
        # every rank gets all K projected keys, so attention is local: [B, Z, L, A] x [B, Z, K, A]
        absent = self.strategy.block_part(mask, 3).transpose(
            2, 3
        )  # padded positions of this rank, [B, 1, L, 1]
        k = self.strategy.project_sequence(k.masked_fill_(absent, 0), self.key_projection)
        v = self.strategy.project_sequence(v.masked_fill_(absent, 0), self.value_projection)
        return self.strategy.local_attention(q, k, v, None, **how)


class BiasDropoutAddNorm(nn.Module):
    """The end of each half of a block, LayerNorm(residual + dropout(x + bias)), without the norm where norms
    stand before each half."""

    def __init__(self, model: BlockOptions, strategy: Strategy):
        super().__init__()
        self.model, self.random, self.axes = model, strategy.random, strategy.position_axes
        self.bias = nn.Parameter(torch.zeros(model.hidden))
        self.norm: nn.Module = nn.Identity() if model.pre_norm else LayerNorm(model.hidden)

    def forward(self, x: Tensor, residual: Tensor) -> Tensor:
        p = self.model.dropout
        way = self.model.bias_dropout_add
        if p and way != "plain":
            mask, keep = self.random.mask(x, p, self.axes), way == "torchscript"
            summed = bias_dropout_add(x, self.bias, residual, mask, p, keep_input=keep)
        else:
            summed = residual + self.random.dropout(x + self.bias, p, self.axes)
        return self.norm(summed)


class EncoderBlock(nn.Module):
    """A transformer block, x [B, L, H] -> [B, L, H], which backward recomputes with ``checkpointing``."""

    def __init__(self, model: BlockOptions, strategy: Strategy, seq_len: int):
        super().__init__()
        self.fused_bias_gelu, self.checkpointing = model.fused_bias_gelu, model.checkpointing
        self.random = strategy.random
        self.attention = EncoderAttention(model, strategy, seq_len)
        self.attention_end = BiasDropoutAddNorm(model, strategy)
        self.mlp_in = strategy.linear_in(model.hidden, 4 * model.hidden)
        self.mlp_out = strategy.linear_out(4 * model.hidden, model.hidden)
        self.mlp_end = BiasDropoutAddNorm(model, strategy)
        before = model.pre_norm
        self.attention_norm, self.mlp_norm = (
            LayerNorm(model.hidden) if before else nn.Identity() for _ in range(2)
        )
        mark_library(self, model.library)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return recomputed(self._block, self.random, x, mask) if self.checkpointing else self._block(x, mask)

    def _block(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention_end(self.attention(self.attention_norm(x), mask), x)
        assert self.mlp_in.bias is not None
        inner = bias_gelu(self.mlp_in.project(self.mlp_norm(x)), self.mlp_in.bias, fused=self.fused_bias_gelu)
        return self.mlp_end(self.mlp_out.project(inner), x)


class LoneEncoderLayer(nn.Module):
    """An attention layer or a block that takes its own inputs, for verification."""

    def __init__(
        self,
        model: BlockOptions,
        strategy: Strategy,
        seq_len: int,
        layer: type[EncoderAttention] | type[EncoderBlock],
    ):
        super().__init__()
        self.model, self.strategy = model, strategy
        self.layer = layer(model, strategy, seq_len)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        mask = attention_mask(inputs["padding"], self.model, self.strategy)
        y = self.layer(inputs["x"], mask)
        if self.model.mask_shape != "keys":
            # a padded query has no key: no loss reads the query's result, and the fused softmax has no true
            # gradient for the query (see masked_softmax), so verification sets the result to 0
            padded = self.strategy.shard(inputs["padding"], 1) > 0
            y = y.masked_fill(padded.unsqueeze(-1), 0)
        return {"y": y}


def attention_mask(padding: Tensor, model: BlockOptions, strategy: Strategy) -> Tensor:
    """The boolean mask, true where a query must not attend to a key, from padding [B, L] (1: padded), which
    every rank has whole.

    The mask is [B, 1, 1, L] for mask_shape "keys" and for layers that make their own square masks. Else the
    mask is [B, 1, queries, L], with padded queries masked too, from an int64 tensor [B, L, L], which
    Megatron-LM builds whole whatever rows a rank needs."""
    if model.mask_shape == "keys" or model.masks_by_layer:
        return (padding > 0)[:, None, None, :]
    present = 1 - padding
    product = present[:, None, :] * present[:, :, None]
    return strategy.block_part(product, 1)[:, None] < 1
