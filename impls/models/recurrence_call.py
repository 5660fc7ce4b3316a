"""A model that is one call of a gated recurrence on input queries, keys, values and gates, as benchmarks of
its kernels make the call (fla's benchmarks/cp). The model has no projections, no convolutions and no weights.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), Z heads, D features
of queries and keys, A of values, n numbers that gate a head at a position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.decay import state_dtype
from spbench.impls.kernels.gated_delta import GatedDelta, KimiDelta
from spbench.impls.kernels.gated_norm import l2_norm
from spbench.impls.kernels.recurrence import Rule
from spbench.impls.models.attention_call import one_stage_only
from spbench.impls.models.model import Model, ModelPart
from spbench.impls.options import check_choices
from spbench.impls.strategies.base import Site, Strategy
from spbench.impls.strategies.recurrence import RecurrenceHooks

_RULES: Mapping[str, type[Rule]] = {"gated_delta": GatedDelta, "kimi_delta": KimiDelta}


@dataclass(frozen=True)
class RecurrenceCallModel(Model):
    """The options of a call of a recurrence.

    Attributes:
        heads: Z, the heads.
        key_size, value_size: D and A, the features of a key and of a value.
        rule: "gated_delta" (one gate a head) or "kimi_delta" (one gate for each feature of a key).
    """

    heads: int = 64
    key_size: int = 128
    value_size: int = 128
    rule: str = "gated_delta"

    sequence_dims: ClassVar[Mapping[str, int]] = {"q": 1, "k": 1, "v": 1, "gates": 1}
    has_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choices(self, {"rule": tuple(_RULES)})

    @property
    def gates(self) -> int:
        """n, the numbers of the decay and the strength of writing."""
        return 1 + (self.key_size if self.rule == "kimi_delta" else 1)

    def variants(self) -> list[Mapping[str, Any]]:
        return [{"rule": "kimi_delta"}]

    def shrunk(self) -> Self:
        return replace(self, heads=12, key_size=4, value_size=6)

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        one_stage_only(stage)
        return RecurrenceCall(strategy, _RULES[self.rule])

    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        sizes = {"q": self.key_size, "k": self.key_size, "v": self.value_size, "gates": self.gates}
        return {
            name: torch.randn(batch, seq_len, self.heads, size, generator=generator)
            for name, size in sizes.items()
        }

    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        one_stage_only(stage)
        d, a = self.key_size, self.value_size
        dims = {"B": batch, "L": seq_len, "Z": self.heads, "A": a, "G": self.heads, "D": d}
        dims |= {"M": _RULES[self.rule].carry_elements(d, a) - d * a, "W": 1, "gates": self.gates}
        return [
            Site("given_heads", 1, {"Z": self.heads}),
            Site("gated_recurrence", 1, dims),
            Site("parameters", 1, {"elements": 0}),
        ]

    def parts(self) -> Mapping[str, ModelPart]:
        return {"model": ModelPart(self.build, self.inputs, self.sequence_dims, {"o": 1})}


class RecurrenceCall(nn.Module):
    """The output ``o`` [B, L, Z, A] of queries and keys [B, L, Z, D], which get length one, values
    [B, L, Z, A] and gates [B, L, Z, n] before their sigmoid."""

    unbatched: frozenset[str] = frozenset()

    def __init__(self, strategy: Strategy, rule: type[Rule]):
        super().__init__()
        self.strategy, self.rule = strategy, rule

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {"o": self.strategy.mix_by_heads(self._mixed, [*inputs.values()], ())}

    def _mixed(self, hooks: RecurrenceHooks, by_heads: list[Tensor], weights: Sequence[Tensor]) -> Tensor:
        q, k, v, gates = by_heads
        by_heads.clear()
        decay, strength = gates.to(state_dtype(gates.dtype)).split([gates.shape[-1] - 1, 1], -1)
        g = F.logsigmoid(decay if self.rule is KimiDelta else decay.squeeze(-1))
        return hooks.gated_recurrence(self.rule, l2_norm(q), l2_norm(k), v, g, strength.squeeze(-1).sigmoid())


PRESETS = {
    # the sizes of fla's benchmarks/cp/test_gdn_with_cp.py
    "recurrence-call": RecurrenceCallModel(),
    "recurrence-call-tiny": RecurrenceCallModel(heads=12, key_size=4, value_size=6),
}
