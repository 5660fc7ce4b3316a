"""Models whose positions lie on a grid (the frames and the places of a video), as single-device code.

A block mixes positions along one dim of the grid after another. Before each such stage a block asks the
strategy for a layout in which this dim is whole. The models learn to predict the noise in a noisy latent.

Shape letters: B batch, n1, .., nK the grid (this rank's part of it, where a strategy cuts it), H hidden,
Z heads (this rank's), A head size, C channels of a token.
"""

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.activations import bias_gelu
from spbench.impls.models.model import AttentionHeads, Model
from spbench.impls.options import Saving
from spbench.impls.strategies.base import SequenceDim, Site, Strategy, Unsupported
from spbench.impls.strategies.grid import Grid, grid_letters
from spbench.impls.strategies.layers import full_precision


@dataclass(frozen=True)
class GridModel(AttentionHeads, Model):
    """The options that all models on grids have.

    Attributes:
        channels: the channels of a latent position.
        patch: the latent positions that a token covers; the grid counts tokens.
        checkpointing: recompute each block in backward.
        fused_bias_gelu: use the kernel that keeps and allocates less than torch's operators.
    """

    layers: int = 28
    hidden: int = 1152
    heads: int = 16
    channels: int = 4
    patch: int = 1
    checkpointing: bool = False
    fused_bias_gelu: bool = True

    losses: ClassVar[tuple[str, ...]] = ("noise",)
    targets: ClassVar[frozenset[str]] = frozenset({"noise", "loss_weights"})
    plain_options: ClassVar[Mapping[str, Any]] = {"fused_bias_gelu": False, "checkpointing": False}

    def savings(self, stages: int = 1) -> Iterator[Saving]:
        if not self.checkpointing:
            yield Saving({"checkpointing": True}, "backward runs all blocks again")

    @property
    def token_channels(self) -> int:
        """The channels of all latent positions of a token together."""
        return self.channels * self.patch

    @property
    @abstractmethod
    def leading(self) -> tuple[int, ...]:
        """The sizes of the grid's dims but the last; the last size follows from the sequence length."""

    @property
    def grid_dims(self) -> tuple[int, ...]:
        """The numbers of the grid's dims in a tensor [B, n1, .., nK, ...]: 1 to K."""
        return tuple(range(1, len(self.leading) + 2))

    def sizes(self, seq_len: int) -> tuple[int, ...]:
        """The sizes n1, .., nK of the grid of tokens for ``seq_len`` latent positions.

        Raises:
            Unsupported: the positions do not fill such a grid.
        """
        unit = math.prod(self.leading) * self.patch
        if seq_len % unit:
            below = seq_len - seq_len % unit
            raise Unsupported(
                f"{seq_len} positions cannot be laid on a grid of {' x '.join(map(str, self.leading))} times "
                f"patches of {self.patch}",
                f"use {' or '.join(str(n) for n in (below, below + unit) if n)}",
            )
        return (*self.leading, seq_len // unit)

    def tokens(self, batch: int, seq_len: int) -> int:
        """The tokens of a batch of sequences of ``seq_len`` positions, ``patch`` positions a token."""
        return batch * math.prod(self.sizes(seq_len))

    @abstractmethod
    def stages(self) -> Sequence[int]:
        """The grid dim, from 0, along which positions meet in each stage of the model, in order."""

    def plan(self, strategy: Strategy, seq_len: int) -> list[int | None]:
        """The dim along which the strategy cuts the grid in each of :meth:`stages`; None: no cut."""
        return strategy.plan_grid(self.stages(), self.sizes(seq_len))

    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        sizes = self.sizes(seq_len)
        shape = (batch, *sizes, self.token_channels)
        return {
            "noisy": torch.randn(shape, generator=generator),
            "noise": torch.randn(shape, generator=generator),
            "loss_weights": torch.full((batch, *sizes), 1 / (batch * math.prod(sizes))),
        }

    @property
    def sequence_dims(self) -> Mapping[str, SequenceDim]:  # type: ignore[override]
        return dict.fromkeys(("noisy", "noise", "loss_weights"), self.grid_dims)

    def variants(self) -> list[Mapping[str, Any]]:
        # strategies that split heads refuse 3 heads over 2 or 4 ranks; other strategies accept them
        return [{"checkpointing": True}, {"fused_bias_gelu": False, "heads": 3}]

    def block_sites(self, batch: int, sizes: Sequence[int], projections: Sequence[int]) -> list[Site]:
        """The sites (calls of the strategy) of all blocks: a projection from H features to each number of
        ``projections`` and one back, and attention along the dim of each of :meth:`stages`."""
        grid, again = {"B": batch, **grid_letters(sizes)}, self.checkpointing
        sites = [
            Site(kind, self.layers, {**grid, "H": self.hidden, "F": width}, again)
            for width in projections
            for kind in ("linear_in", "linear_out")
        ]
        heads = {**grid, "H": self.hidden, "Z": self.heads, "A": self.head_size}
        return sites + [Site("full_attention", 1, {**heads, "along": dim}, again) for dim in self.stages()]


def one_stage_only(model: str, stage: Stage) -> None:
    """Raise :class:`Unsupported` for more than one pipeline stage, which models on grids cannot build."""
    if stage is not ONE_STAGE and stage.count > 1:
        raise Unsupported(f"{model} has no pipeline stages", "use pp 1")


class GridAttention(nn.Module):
    """Multi-head attention along one dim of the grid, x [B, n1, .., nK, H] -> the same shape."""

    def __init__(self, model: GridModel, strategy: Strategy):
        super().__init__()
        self.strategy, self.head_size = strategy, model.head_size
        self.qkv = strategy.linear_in(model.hidden, 3 * model.hidden)
        self.out = strategy.linear_out(model.hidden, model.hidden)
        self.bias = nn.Parameter(torch.zeros(model.hidden))

    def forward(self, x: Tensor, dim: int) -> Tensor:
        # the rows of the weight are ordered head by head, so that a split of rows is a split of heads
        q, k, v = self.qkv(x).unflatten(-1, (-1, 3, self.head_size)).unbind(-2)
        y = self.strategy.grid_attention(q, k, v, dim)
        del q, k, v
        return self.out.project(y.flatten(-2)) + self.bias


class GridMlp(nn.Module):
    """An MLP with 4 H features and a GELU, x [..., H] -> [..., H]."""

    def __init__(self, model: GridModel, strategy: Strategy):
        super().__init__()
        self.fused = model.fused_bias_gelu
        self.inner = strategy.linear_in(model.hidden, 4 * model.hidden)
        self.out = strategy.linear_out(4 * model.hidden, model.hidden)
        self.bias = nn.Parameter(torch.zeros(model.hidden))

    def forward(self, x: Tensor) -> Tensor:
        assert self.inner.bias is not None
        inner = bias_gelu(self.inner.project(x), self.inner.bias, fused=self.fused)
        return self.out.project(inner) + self.bias


def sinusoids(places: Tensor, width: int) -> Tensor:
    """The fixed embeddings [n, width] (arXiv 1706.03762) of numbers [n], in float32."""
    powers = torch.arange(width // 2, device=places.device, dtype=torch.float32) / (width // 2)
    angle = places.float().unsqueeze(-1) * 10_000.0**-powers
    return torch.cat((angle.cos(), angle.sin()), -1)


def with_positions(grid: Grid) -> Grid:
    """The grid's x [B, n1, .., nK, H] plus the fixed embedding of each position's place along each dim."""
    x = grid.x
    for dim, size in enumerate(grid.sizes):
        table = grid.rows(sinusoids(torch.arange(size, device=x.device), x.shape[-1]), dim).to(x.dtype)
        x = x + table.view(-1, *[1] * (len(grid.sizes) - 1 - dim), x.shape[-1])
    return grid.of(x)


def with_losses(predicted: Tensor, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """``predicted`` noise [B, n1, .., nK, C] and, if the inputs have ``noise``, its losses: ``token_loss``
    [B, n1, .., nK], a token's mean square error over channels, and ``loss`` = ``noise_loss``, this rank's
    share of the weighted sum."""
    if "noise" not in inputs:
        return {"predicted": predicted}
    token_loss = (full_precision(predicted) - inputs["noise"]).square().mean(-1)
    loss = (token_loss * inputs["loss_weights"]).sum()
    return {"predicted": predicted, "loss": loss, "noise_loss": loss, "token_loss": token_loss}


class LoneGridLayer(nn.Module):
    """A block, or attention along the first stage's dim, that takes its own inputs, for verification."""

    def __init__(self, layer: nn.Module, model: GridModel, strategy: Strategy, seq_len: int):
        super().__init__()
        self.layer, self.strategy, self.sizes = layer, strategy, model.sizes(seq_len)
        self.dim = model.stages()[0]
        self.planned = strategy.plan_grid([self.dim], self.sizes)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x, *others = inputs.values()
        grid = self.strategy.grid(x, self.sizes)
        if isinstance(self.layer, GridAttention):
            grid = self.strategy.along(grid, self.dim, self.planned[0])
            grid = grid.of(self.layer(grid.x, self.dim))
        else:
            grid = self.layer(grid, *others)
        return {"y": self.strategy.restored(grid).x}
