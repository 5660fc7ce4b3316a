"""A transformer over a grid of any number of dims, whose layers attend along one dim after another, as
single-device code.

Models of images, videos and volumes with axial attention (arXiv 1912.12180) have such layers. The model
serves to check strategies on other numbers of dims than the two of :mod:`st_dit`. It predicts the noise in a
latent. The time step of the diffusion is no input, because it would change no message and hardly any work.

Shape letters: B batch, n1, .., nK the grid (this rank's part of it, where a strategy cuts it), H hidden, C
channels of a token."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.layer_norm import LayerNorm
from spbench.impls.models.blocks import grid_blocks
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.model import ModelPart
from spbench.impls.strategies.base import SequenceDim, Site, Strategy
from spbench.impls.strategies.grid import Grid
from spbench.impls.strategies.layers import Linear


@dataclass(frozen=True)
class GridTransformerModel(grid_blocks.GridModel):
    """The options of a transformer over a grid, with those of :class:`GridModel`.

    Attributes:
        leading: the sizes of the grid's dims but the last.
        norm_epsilon: the number that every norm adds to the variance.
    """

    leading: tuple[int, ...] = (16,)
    norm_epsilon: float = 1e-6

    def stages(self) -> list[int]:
        return [*reversed(range(len(self.leading) + 1))] * self.layers

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        grid_blocks.one_stage_only("a transformer over a grid", stage)
        return GridTransformer(self, strategy, seq_len)

    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        grid_blocks.one_stage_only("a transformer over a grid", stage)
        h = self.hidden
        sites = self.block_sites(batch, self.sizes(seq_len), [*[h] * len(self.grid_dims), 4 * h])
        return [*sites, Site("parameters", 1, self.parameters())]

    def parameters(self) -> dict[str, int]:
        """Counts of parameters: ``elements``, all; ``split``, those that ranks can split over features."""
        h, channels, dims = self.hidden, self.token_channels, len(self.grid_dims)
        # matrices, and biases of the projections that open an attention or an MLP
        split = self.layers * (dims * (4 * h * h + 3 * h) + 8 * h * h + 4 * h)
        others = self.layers * (dims + 1) * 3 * h  # a bias and a norm of each attention and MLP
        ends = (channels + 1) * h + 2 * h + channels * (h + 1)
        return {"elements": split + others + ends, "split": split}

    def parts(self) -> Mapping[str, ModelPart]:
        outputs: dict[str, SequenceDim] = {"loss": None, "noise_loss": None}
        outputs |= dict.fromkeys(("predicted", "token_loss"), self.grid_dims)
        return {"model": ModelPart(self.build, self.inputs, self.sequence_dims, outputs)}

    def variants(self) -> list[Mapping[str, Any]]:
        return [{"checkpointing": True}]


class AxialBlock(nn.Module):
    """A layer of the grid [B, n1, .., nK, H]: attention along each dim, then an MLP. It returns the grid in
    the layout of the last attention. With ``checkpointing`` backward recomputes the layer."""

    def __init__(self, model: GridTransformerModel, strategy: Strategy, planned: list[int | None]):
        super().__init__()
        self.strategy, self.checkpointing = strategy, model.checkpointing
        self.stages = [*zip(model.stages(), planned, strict=False)]
        self.norms = nn.ModuleList(LayerNorm(model.hidden, model.norm_epsilon) for _ in planned)
        self.attentions = nn.ModuleList(grid_blocks.GridAttention(model, strategy) for _ in planned)
        self.mlp_norm = LayerNorm(model.hidden, model.norm_epsilon)
        self.mlp = grid_blocks.GridMlp(model, strategy)

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
    """The model's module. ``forward(inputs)`` returns ``predicted`` noise [B, n1, .., nK, C]; if the inputs
    have ``noise``, also ``token_loss`` [B, n1, .., nK] and this rank's share of the loss, as ``loss`` and as
    ``noise_loss``."""

    unbatched: frozenset[str] = frozenset()

    def __init__(self, model: GridTransformerModel, strategy: Strategy, seq_len: int):
        super().__init__()
        self.model, self.strategy, self.seq_len = model, strategy, seq_len
        self.sizes = model.sizes(seq_len)
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
        grid = grid_blocks.with_positions(self.strategy.grid(x, self.sizes))
        for block in self.blocks.values():
            grid = block(grid)
        predicted = self.head(self.norm(self.strategy.restored(grid).x))
        return grid_blocks.with_losses(predicted, inputs)


PRESETS = {
    # the sizes of st-dit-xl, without text and time
    "transformer-2d": GridTransformerModel(layers=28, hidden=1152, heads=16, patch=4),
    # for verification: 1 to 4 ranks divide 12 heads and 12 places, but 3 and 4 do not divide the 2 positions
    # of other dims. Norms have a large epsilon, because half precisions would otherwise compare noise
    "transformer-2d-tiny": GridTransformerModel(
        layers=2, hidden=24, heads=12, leading=(12,), norm_epsilon=0.1
    ),
    "transformer-3d-tiny": GridTransformerModel(
        layers=2, hidden=24, heads=12, leading=(12, 2), norm_epsilon=0.1
    ),
}
