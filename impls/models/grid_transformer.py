"""A transformer over a grid of any number of dims, whose layers attend along one dim after another, as
single-device code.

It is what models of images, videos and volumes have in common when their attention is axial (arXiv
1912.12180), and it lets strategies be checked on other numbers of dims than the two of :mod:`st_dit`. It
predicts the noise in a latent, without the time step of the diffusion as an input: that would change no
message and hardly any work.

Shape letters: B batch, n1, .., nK the grid (this rank's part of it, where a strategy cuts it), H hidden.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.layer_norm import LayerNorm
from spbench.impls.models.blocks.grid_blocks import (
    GridAttention,
    GridMlp,
    GridModel,
    noise_losses,
    one_stage_only,
    with_positions,
)
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.model import ModelPart
from spbench.impls.strategies.base import SequenceDim, Site, Strategy
from spbench.impls.strategies.grid import Grid
from spbench.impls.strategies.layers import Linear


@dataclass(frozen=True)
class GridTransformerModel(GridModel):
    """The options of a transformer over a grid, beside those of all grids.

    Attributes:
        leading: sizes of the dims of the grid but the last.
        norm_epsilon: added to the variance in every norm.
    """

    leading: tuple[int, ...] = (16,)
    norm_epsilon: float = 1e-6

    def stages(self) -> list[int]:
        return [*reversed(range(len(self.leading) + 1))] * self.layers

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        one_stage_only("a transformer over a grid", stage)
        return GridTransformer(self, strategy, seq_len)

    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        one_stage_only("a transformer over a grid", stage)
        h = self.hidden
        sites = self.block_sites(batch, self.sizes(seq_len), [*[h] * len(self.grid_dims), 4 * h])
        return [*sites, Site("parameters", 1, self.parameters())]

    def parameters(self) -> dict[str, int]:
        """Counts of parameters: all ``elements``, and of them those that can be ``split`` over features."""
        h, channels, dims = self.hidden, self.token_channels, len(self.grid_dims)
        # matrices and the biases of those that open a block
        split = self.layers * (dims * (4 * h * h + 3 * h) + 8 * h * h + 4 * h)
        others = self.layers * (dims + 1) * 3 * h  # a bias and a norm each
        ends = (channels + 1) * h + 2 * h + channels * (h + 1)
        return {"elements": split + others + ends, "split": split}

    def parts(self) -> Mapping[str, ModelPart]:
        outputs: dict[str, SequenceDim] = {"loss": None, "noise_loss": None}
        outputs |= dict.fromkeys(("predicted", "token_loss"), self.grid_dims)
        return {"model": ModelPart(self.build, self.inputs, self.sequence_dims, outputs)}

    def variants(self) -> list[Mapping[str, Any]]:
        return [{"checkpointing": True}]


class AxialBlock(nn.Module):
    """The grid [B, n1, .., nK, H] -> the grid, as the last stage needs it laid out, recomputed in backward if
    asked for."""

    def __init__(self, model: GridTransformerModel, strategy: Strategy, planned: list[int | None]):
        super().__init__()
        self.strategy, self.checkpointing = strategy, model.checkpointing
        self.stages = [*zip(model.stages(), planned, strict=False)]
        self.norms = nn.ModuleList(LayerNorm(model.hidden, model.norm_epsilon) for _ in planned)
        self.attentions = nn.ModuleList(GridAttention(model, strategy) for _ in planned)
        self.mlp_norm = LayerNorm(model.hidden, model.norm_epsilon)
        self.mlp = GridMlp(model, strategy)

    def forward(self, grid: Grid) -> Grid:
        return (
            recomputed(self._block, self.strategy.random, grid) if self.checkpointing else self._block(grid)
        )

    def _block(self, grid: Grid) -> Grid:
        for (dim, planned), norm, attention in zip(self.stages, self.norms, self.attentions, strict=True):
            grid = self.strategy.along(grid, dim, planned)
            grid = grid.of(grid.x + attention(norm(grid.x), dim))
        return grid.of(grid.x + self.mlp(self.mlp_norm(grid.x)))


class GridTransformer(nn.Module):
    """``forward(inputs)`` returns ``predicted`` noise [B, n1, .., nK, C] of a token's channels, and where
    there is ``noise`` in the inputs ``loss``, this rank's share, the same as ``noise_loss``, and
    ``token_loss`` [B, n1, .., nK]."""

    unbatched: frozenset[str] = frozenset()

    def __init__(self, model: GridTransformerModel, strategy: Strategy, seq_len: int):
        super().__init__()
        self.strategy, self.sizes = strategy, model.sizes(seq_len)
        self.patches = Linear(model.token_channels, model.hidden)
        plan, each = model.plan(strategy, seq_len), len(self.sizes)
        self.blocks = nn.ModuleDict(
            {
                str(i): AxialBlock(model, strategy, plan[i * each : (i + 1) * each])
                for i in range(model.layers)
            }
        )
        self.norm = LayerNorm(model.hidden, model.norm_epsilon)
        self.head = Linear(model.hidden, model.token_channels)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        x = self.patches(inputs["noisy"].to(self.head.weight.dtype))
        grid = with_positions(self.strategy.grid(x, self.sizes))
        for block in self.blocks.values():
            grid = block(grid)
        predicted = self.head(self.norm(self.strategy.restored(grid).x))
        return {"predicted": predicted, **(noise_losses(predicted, inputs) if "noise" in inputs else {})}


PRESETS = {
    # the sizes of st-dit-xl, without text and time
    "transformer-2d": GridTransformerModel(layers=28, hidden=1152, heads=16, patch=4),
    # for verification: 12 heads and places divide by 1, 2, 3 and 4; of 24 positions the other dims have 2,
    # which 3 and 4 do not divide. So large an epsilon, or half precisions would compare noise of norms
    "transformer-2d-tiny": GridTransformerModel(
        layers=2, hidden=24, heads=12, leading=(12,), norm_epsilon=0.1
    ),
    "transformer-3d-tiny": GridTransformerModel(
        layers=2, hidden=24, heads=12, leading=(12, 2), norm_epsilon=0.1
    ),
}
