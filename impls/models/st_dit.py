"""ST-DiT, the diffusion transformer of videos of Open-Sora 1.0 (github.com/hpcaitech/Open-Sora), as
single-device code.

A token is a patch of 2 x 2 latent positions of a frame. A block attends along the places of each frame, then
along the frames of each place, then to the tokens of the text, and ends with an MLP; the time step of the
diffusion modulates the block (adaLN-single, arXiv 2310.00426). The model differs from Open-Sora's code in
three things: the embeddings of places and of frames are sinusoids, added at the start; every text has all its
tokens; and the loss is only the noise's mean square error, so predicted variances have no gradient.

Shape letters: B batch, T frames and S tokens of a frame (this rank's part of T or of S, where a strategy cuts
the grid), H hidden, W text tokens, Z heads (this rank's), A head size, C channels of a token.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.layer_norm import LayerNorm
from spbench.impls.models.blocks import grid_blocks
from spbench.impls.models.blocks.recomputation import recomputed
from spbench.impls.models.model import ModelPart
from spbench.impls.strategies.base import SequenceDim, Site, Strategy
from spbench.impls.strategies.grid import Grid, grid_letters
from spbench.impls.strategies.layers import Linear

#: the numbers of the grid's dims: along frames, and along the places of a frame
TEMPORAL, SPATIAL = 0, 1
#: how many numbers modulate each feature: in a block, and in the last layer
BLOCK_MODULATION, END_MODULATION = 6, 2


@dataclass(frozen=True)
class StDitModel(grid_blocks.GridModel):
    """The options of an ST-DiT, with those of :class:`GridModel`.

    Attributes:
        temporal: T, the frames; a sequence length counts latent positions, T times those of a frame.
        text_tokens, text_hidden: W, the tokens of the text, and the features of each (120 x 4096: Open-Sora
            cuts T5-XXL's encodings to this size).
        time_features: the number of sines and cosines that encode the time step.
        norm_epsilon: the number that every norm adds to the variance.
    """

    patch: int = 4
    temporal: int = 16
    text_tokens: int = 120
    text_hidden: int = 4096
    time_features: int = 256
    norm_epsilon: float = 1e-6

    @property
    def leading(self) -> tuple[int, ...]:
        return (self.temporal,)

    def stages(self) -> list[int]:
        return [SPATIAL, TEMPORAL] * self.layers

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        grid_blocks.one_stage_only("st-dit", stage)
        return StDit(self, strategy, seq_len)

    @property
    def sequence_dims(self) -> Mapping[str, SequenceDim]:  # type: ignore[override]
        return {**super().sequence_dims, "time_steps": None, "text": None}

    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        text = torch.randn(batch, self.text_tokens, self.text_hidden, generator=generator)
        steps = torch.randint(1000, (batch,), generator=generator)
        return {**super().inputs(batch, seq_len, generator), "time_steps": steps, "text": text}

    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        grid_blocks.one_stage_only("st-dit", stage)
        h = self.hidden
        # attention in space, in time and to the text, then the MLP
        sites = self.block_sites(batch, self.sizes(seq_len), [h, h, h, 4 * h])
        text = {"B": batch, "W": self.text_tokens, "H": h, "F": 2 * h}
        sites.append(Site("linear_in_text", self.layers, text, self.checkpointing))
        asked = {"B": batch, **grid_letters(self.sizes(seq_len)), "W": self.text_tokens}
        heads = {"Z": self.heads, "A": self.head_size}
        sites.append(Site("text_attention", self.layers, asked | heads, self.checkpointing))
        sites.append(Site("parameters", 1, self.parameters()))
        return sites

    def parameters(self) -> dict[str, int]:
        """Counts of parameters: ``elements``, all; ``split``, those that ranks can split over features."""
        h, channels = self.hidden, self.token_channels
        split = self.layers * (20 * h * h + 13 * h)  # matrices, and biases of the opening projections
        elements = split + self.layers * (4 + BLOCK_MODULATION) * h
        elements += channels * h + h  # patches
        elements += (self.time_features + h + 2) * h + BLOCK_MODULATION * (h * h + h)  # time steps
        elements += (self.text_hidden + h + 2) * h
        elements += END_MODULATION * h + 2 * channels * (h + 1)
        return {"elements": elements, "split": split}

    def parts(self) -> Mapping[str, ModelPart]:
        def hidden(batch: int, seq_len: int, generator: torch.Generator, *, alone: bool) -> dict[str, Tensor]:
            def random(*shape: int) -> Tensor:
                return torch.randn(batch, *shape, generator=generator, dtype=torch.float64)

            x = {"x": random(*self.sizes(seq_len), self.hidden)}
            if alone:
                return x
            text = random(self.text_tokens, self.hidden)
            # small numbers: scales are about 1, and gates leave the attentions something to attend to
            return {**x, "text": text, "modulation": random(BLOCK_MODULATION, self.hidden) / 5}

        dims: dict[str, SequenceDim] = {"x": self.grid_dims}
        outputs: dict[str, SequenceDim] = {"loss": None, "noise_loss": None}
        outputs |= dict.fromkeys(("predicted", "token_loss"), self.grid_dims)
        return {
            "attention": ModelPart(
                lambda s, n: grid_blocks.LoneGridLayer(grid_blocks.GridAttention(self, s), self, s, n),
                partial(hidden, alone=True),
                dims,
                {"y": self.grid_dims},
            ),
            "block": ModelPart(
                lambda s, n: grid_blocks.LoneGridLayer(StDitBlock(self, s, self.plan(s, n)[:2]), self, s, n),
                partial(hidden, alone=False),
                {**dims, "text": None, "modulation": None},
                {"y": self.grid_dims},
            ),
            "model": ModelPart(self.build, self.inputs, self.sequence_dims, outputs),
        }


class CrossAttention(nn.Module):
    """The attention [B, T, S, H] of all positions x [B, T, S, H] to the text [B, W, H]. Every rank has the
    text, so no text is sent; the text's gradients are partial sums where ranks hold different positions."""

    def __init__(self, model: StDitModel, strategy: Strategy):
        super().__init__()
        self.strategy, self.head_size = strategy, model.head_size
        self.q = strategy.linear_in(model.hidden, model.hidden)
        self.kv = strategy.linear_in_text(model.hidden, 2 * model.hidden)
        self.out = strategy.linear_out(model.hidden, model.hidden)
        self.bias = nn.Parameter(torch.zeros(model.hidden))

    def forward(self, x: Tensor, text: Tensor) -> Tensor:
        q = self.q(x).unflatten(-1, (-1, self.head_size))  # [B, T, S, Z, A]
        k, v = self.kv(text).unflatten(-1, (-1, 2, self.head_size)).unbind(-2)  # [B, W, Z, A]
        y = self.strategy.text_attention(q, k, v)
        return self.out.project(y.flatten(-2)) + self.bias


class StDitBlock(nn.Module):
    """A block of the grid [B, T, S, H], with text [B, W, H] and modulation [B, 6, H]. It returns the grid in
    the layout of the attention along frames. With ``checkpointing`` backward recomputes the block."""

    def __init__(self, model: StDitModel, strategy: Strategy, planned: list[int | None]):
        super().__init__()
        self.strategy, self.checkpointing, self.planned = strategy, model.checkpointing, planned
        self.modulation = nn.Parameter(torch.zeros(BLOCK_MODULATION, model.hidden))
        self.norm = LayerNorm(model.hidden, model.norm_epsilon, weighted=False)
        self.spatial = grid_blocks.GridAttention(model, strategy)
        self.temporal = grid_blocks.GridAttention(model, strategy)
        self.text = CrossAttention(model, strategy)
        self.mlp_norm = LayerNorm(model.hidden, model.norm_epsilon, weighted=False)
        self.mlp = grid_blocks.GridMlp(model, strategy)

    def forward(self, grid: Grid, text: Tensor, modulation: Tensor) -> Grid:
        if self.checkpointing:
            return recomputed(self._block, self.strategy.random, grid, text, modulation)
        return self._block(grid, text, modulation)

    def _block(self, grid: Grid, text: Tensor, modulation: Tensor) -> Grid:
        # each [B, 1, 1, H]
        shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = _numbers(self.modulation + modulation)
        spatial, temporal = self.planned
        grid = self.strategy.along(grid, SPATIAL, spatial)
        x = grid.x
        x = x + gate * self.spatial(modulated(self.norm(x), shift, scale), SPATIAL)
        grid = self.strategy.along(grid.of(x), TEMPORAL, temporal)
        x = grid.x
        x = x + gate * self.temporal(x, TEMPORAL)
        x = x + self.text(x, text)
        x = x + mlp_gate * self.mlp(modulated(self.mlp_norm(x), mlp_shift, mlp_scale))
        return grid.of(x)


def _numbers(modulation: Tensor) -> tuple[Tensor, ...]:
    """The n numbers of a modulation [B, n, H] for each feature, each [B, 1, 1, H]."""
    return modulation[:, :, None, None].unbind(1)


def modulated(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """x [B, T, S, H] scaled and shifted by functions of the time step (adaLN, arXiv 2212.09748)."""
    return x * (1 + scale) + shift


class TwoLayers(nn.Module):
    """Two linear layers with a SiLU or a GELU between, x [..., in_features] -> [..., H]."""

    def __init__(self, in_features: int, hidden: int, activation: str):
        super().__init__()
        self.activation = activation
        self.first, self.second = Linear(in_features, hidden), Linear(hidden, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        return self.second(F.silu(x) if self.activation == "silu" else F.gelu(x, approximate="tanh"))


class StDit(nn.Module):
    """The model's module. ``forward(inputs)`` returns ``predicted`` noise [B, T, S, C]; if the inputs have
    ``noise``, also ``token_loss`` [B, T, S] and this rank's share of the loss, as ``loss`` and as
    ``noise_loss``."""

    unbatched: frozenset[str] = frozenset()

    def __init__(self, model: StDitModel, strategy: Strategy, seq_len: int):
        super().__init__()
        self.model, self.strategy, self.seq_len = model, strategy, seq_len
        self.sizes = model.sizes(seq_len)
        h, channels = model.hidden, model.token_channels
        self.patches = Linear(channels, h)
        self.time = TwoLayers(model.time_features, h, "silu")
        self.time_modulation = Linear(h, BLOCK_MODULATION * h)
        self.text = TwoLayers(model.text_hidden, h, "gelu")
        plan = model.plan(strategy, seq_len)
        self.blocks = nn.ModuleDict(
            {str(i): StDitBlock(model, strategy, plan[2 * i : 2 * i + 2]) for i in range(model.layers)}
        )
        self.modulation = nn.Parameter(torch.zeros(END_MODULATION, h))
        self.norm = LayerNorm(h, model.norm_epsilon, weighted=False)
        self.head = Linear(h, 2 * channels)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        dtype = self.modulation.dtype
        grid = self.strategy.grid(self.patches(inputs["noisy"].to(dtype)), self.sizes)
        grid = grid_blocks.with_positions(grid)
        time = self.time(grid_blocks.sinusoids(inputs["time_steps"], self.model.time_features).to(dtype))
        modulation = self.time_modulation(F.silu(time)).unflatten(-1, (BLOCK_MODULATION, -1))
        text = self.text(inputs["text"].to(dtype))
        for block in self.blocks.values():
            grid = block(grid, text, modulation)
        grid = self.strategy.restored(grid)
        x = modulated(self.norm(grid.x), *_numbers(self.modulation + time[:, None]))
        predicted, _ = self.head(x).chunk(2, -1)  # the second half is the variances
        return grid_blocks.with_losses(predicted, inputs)


PRESETS = {
    # Open-Sora's STDiT-XL/2; its log says 724M, in units of 2^20
    "st-dit-xl": StDitModel(layers=28, hidden=1152, heads=16),
    # the DSP paper says 3B and gives no sizes. A layer has 20 H^2 parameters: 36 layers of 2048 features have
    # 3.0e9. Heads of 64 features are about as large as the XL's, and 32 ranks can split 32 heads
    "st-dit-3b": StDitModel(layers=36, hidden=2048, heads=32),
    # for verification: 1 to 4 ranks divide 12 heads and 12 frames, but 3 and 4 do not divide the 2 positions
    # of a frame. Features are few and epsilon is large, because in half precisions the gradients of attention
    # to inputs without a norm are soon only noise
    "st-dit-tiny": StDitModel(
        layers=2,
        hidden=24,
        heads=12,
        patch=1,
        temporal=12,
        text_tokens=5,
        text_hidden=7,
        time_features=16,
        norm_epsilon=0.1,
    ),
}
