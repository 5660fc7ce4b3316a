"""The options of a decoder whose matmuls are in eight bits, and the sites of the scales of these matmuls."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from spbench.impls.kernels.fp8_casts import E4M3
from spbench.impls.kernels.fp8_delayed import PLACES_OF_A_MATMUL, DelayedScaling
from spbench.impls.kernels.fp8_projection import RECIPES, Fp8Recipe
from spbench.impls.kernels.projection import TRANSFORMER_ENGINE
from spbench.impls.strategies.base import Site, Strategy


@dataclass(frozen=True)
class Fp8Options:
    """The options of projections of layers whose matmuls are in eight bits.

    Attributes:
        fp8: "none", or the recipe of the matmuls' scales, one of :data:`fp8_projection.RECIPES`; the library
            decides which eight-bit copies are kept.
        fp8_history: with fp8 "delayed": the number of passes whose largest magnitude makes a scale.
        fp8_transposes: whether matmuls of TransformerEngine's operands with one scale need transposed copies,
            as on Hopper; on Blackwell they do not.
    """

    fp8: str = "none"
    fp8_history: int = 1
    fp8_transposes: bool = True

    @property
    def fp8_recipe(self) -> Fp8Recipe | None:
        """The recipe of the scales of eight-bit operands; None: no matmul is in eight bits."""
        return None if self.fp8 == "none" else replace(RECIPES[self.fp8], transposes=self.fp8_transposes)

    def delayed_scaling(self, layers: nn.Module, strategy: Strategy) -> DelayedScaling | None:
        """The scales of all eight-bit matmuls of the layers, the same on the ranks of a pipeline stage; None:
        the recipe makes no scales from earlier passes."""
        if (recipe := self.fp8_recipe) is None or not recipe.delayed:
            return None
        numbers = (torch.finfo(E4M3).max, torch.finfo(recipe.gradients).max)
        group = strategy.place.group(*strategy.place.stage_axes)
        return DelayedScaling(layers, self.fp8_history, numbers, group)

    def scale_sites(self: Any, layers: int, predictions: int) -> list[Site]:
        """The site of the delayed scales of a stage's layers and modules of multi-token prediction. A layer
        has two weights of an MLP and two of attention (with latents four or five), a module one more."""
        if self.fp8 != "delayed":
            return []
        attention = 4 + bool(self.q_lora_rank) if self.kv_lora_rank else 2
        weights = (2 + attention) * (layers + predictions) + predictions
        forward, backward = (weights * PLACES_OF_A_MATMUL[each] for each in (True, False))
        return [Site("fp8_scales", 1, {"forward": forward, "backward": backward})]

    def check_fp8(self: Any) -> None:
        """Raise ValueError for options of eight bits that contradict each other or the model."""
        if not self.fp8_transposes and (self.fp8 == "none" or self.library != TRANSFORMER_ENGINE):
            raise ValueError("fp8_transposes: false needs fp8 and library: transformer-engine")
        if self.fp8_history < 1 or (self.fp8_history > 1 and self.fp8 != "delayed"):
            raise ValueError("fp8_history is at least 1, and needs fp8: delayed")
        if self.fp8 == "none":
            return
        if self.fp8 == "delayed" and self.library != TRANSFORMER_ENGINE:
            raise ValueError(f"fp8: delayed needs library: transformer-engine, not {self.library}")
        if self.fp8.startswith("rowwise") and self.fused:
            raise ValueError(f"fp8: {self.fp8} is torchao's and needs library: torch, not {self.library}")
        if self.library == "megatron-local":
            raise ValueError("fp8 needs library: torch or transformer-engine, not megatron-local")
        for name in ("lora_rank", "mlp_tile"):
            if getattr(self, name, 0):
                raise ValueError(f"fp8 needs layers without adapters and tiles; leave {name} out")
        if getattr(self, "experts", 0) and (self.library != TRANSFORMER_ENGINE or self.fp8 == "delayed"):
            raise ValueError(
                "experts in eight bits need library: transformer-engine, and another recipe than delayed"
            )

    @property
    def gathered_dims(self: Any) -> dict[str, int]:
        """The dims of the site of an eight-bit projection: ``fp8``, and, if the input is gathered in eight
        bits, the elements and the bytes of a scale (``fp8_tile``, ``fp8_scale_bytes``)."""
        if self.fp8 == "none" or self.separate_projections:
            return {} if self.fp8 == "none" else {"fp8": 1}
        recipe = RECIPES[self.fp8]
        scale = (recipe.scales or torch.float32).itemsize
        width = recipe.tile[1] or (self.hidden if recipe.tile[0] else 0)
        if recipe.delayed:  # no magnitude is reduced before the cast
            width = self.hidden
            return {"fp8": 1, "fp8_tile": width, "fp8_scale_bytes": 0}
        return {"fp8": 1, "fp8_tile": width, "fp8_scale_bytes": scale}
