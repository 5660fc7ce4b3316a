"""Models that are one call on input tensors, as benchmarks of kernels make the call: of attention, or of a
gated recurrence (fla's benchmarks/cp). They have no projections, no norms, no convolutions and no weights.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), Z heads, G heads of
keys and values, A head size; in a recurrence D features of queries and keys, A of values, n numbers that gate
a head at a position.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from spbench.impls.attended import Attended
from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.kernels.decay import DecayMask, state_dtype
from spbench.impls.kernels.gated_delta import GatedDelta, KimiDelta
from spbench.impls.kernels.gated_norm import l2_norm
from spbench.impls.kernels.recurrence import Rule
from spbench.impls.layout import MeetingKind
from spbench.impls.models.blocks.packing import Documents, PackedSequences, check_window
from spbench.impls.models.blocks.softmax_options import FUSED_KERNELS
from spbench.impls.models.model import Model, ModelPart
from spbench.impls.options import check_choices
from spbench.impls.strategies.base import Site, Strategy, Unsupported
from spbench.impls.strategies.recurrence import RecurrenceHooks

#: the kinds of attention by the values of the option ``kind``
_KINDS: Mapping[str, MeetingKind] = {
    "causal_attention": "causal_attention",
    "attention": "attention",
    "linear_attention": "linear_attention",
}


@dataclass(frozen=True)
class AttentionCallModel(PackedSequences, Model):
    """The options of an attention call.

    Attributes:
        heads: Z, the heads of queries.
        kv_heads: G, the heads of keys and values, a divisor of ``heads``; None: as many as ``heads``.
        head_size: A, the features of a head.
        attention: the name of the kernel, whose measured rates on a card time the call.
        kind: "causal_attention"; "attention", softmax attention without a mask that makes all scores; or
            "linear_attention", causal, without decay, with queries and keys times 1 / sqrt(A).
        window: the most positions that a position attends to in causal attention, itself included: query i
            sees keys j with i - window < j <= i; None: all earlier positions.
        documents, documents_seed, documents_multiple, packed_multiple: the documents that a sequence is
            packed of; see :class:`PackedSequences`.
    """

    heads: int = 32
    kv_heads: int | None = None
    head_size: int = 128
    attention: str = "flash"
    kind: str = "causal_attention"
    window: int | None = None
    documents: Documents = ()
    documents_seed: int = 0
    documents_multiple: int | str = 1
    packed_multiple: int = 1

    sequence_dims: ClassVar[Mapping[str, int]] = {"q": 1, "k": 1, "v": 1}
    has_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choices(self, {"attention": FUSED_KERNELS, "kind": tuple(_KINDS)})
        if self.kind != "causal_attention" and self.groups != self.heads:
            raise ValueError(f"{self.kind} has as many kv_heads as heads {self.heads}; leave them out")
        if self.kind != "causal_attention" and self.window is not None:
            raise ValueError(f"{self.kind} has no window; leave it out")
        check_window(self.window)
        self.check_documents()
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} are not divisible by kv_heads {self.kv_heads}")

    @property
    def groups(self) -> int:
        """The number of heads of keys and values, G."""
        return self.kv_heads or self.heads

    @property
    def attention_kernel(self) -> str:
        return self.attention

    def attended(self, seq_len: int) -> Attended:
        return super().attended(seq_len).in_layer(self.window, seq_len)

    def variants(self) -> list[Mapping[str, Any]]:
        # a rank of four has 6 positions: the windows reach 1 of another rank's, most of these, or all ranks'
        return [{"window": 2}, {"window": 5}, {"window": 20}, {"window": 9, "documents": (7, 1, 11, 5)}]

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        one_stage_only(stage)
        return AttentionCall(strategy, self.kind, self.attended(seq_len))

    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        return {
            name: torch.randn(batch, seq_len, heads, self.head_size, generator=generator)
            for name, heads in (("q", self.heads), ("k", self.groups), ("v", self.groups))
        }

    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        one_stage_only(stage)
        dims = {"B": batch, "L": seq_len, "Z": self.heads, "A": self.head_size}
        attended = self.attended(seq_len)
        further = {"causal_attention": {"G": self.groups}, "linear_attention": {"D": self.head_size}}
        return [
            Site("given_heads", 1, {"Z": self.heads}),
            Site(
                *(_KINDS[self.kind], 1, dims | further.get(self.kind, {}) | attended.dims),
                attended=attended,
                packed=attended,
            ),
            Site("parameters", 1, {"elements": 0}),
        ]

    def parts(self) -> Mapping[str, ModelPart]:
        return {"model": ModelPart(self.build, self.inputs, self.sequence_dims, {"o": 1})}


def one_stage_only(stage: Stage) -> None:
    """Raise :class:`Unsupported` if a model of one call is to be split over stages."""
    if stage.count > 1:
        raise Unsupported("one call cannot be split over pipeline stages", "use pp 1")


class AttentionCall(nn.Module):
    """The attention ``o`` [B, L, Z, A] of queries q [B, L, Z, A] to keys k and values v [B, L, G, A]."""

    unbatched: frozenset[str] = frozenset()

    def __init__(self, strategy: Strategy, kind: str, attended: Attended):
        super().__init__()
        self.strategy, self.kind = strategy, kind
        self.heeded: Any = {} if attended.plain else {"attended": attended}
        strategy.pack(attended)

    def forward(self, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
        q, k, v = (inputs[name].transpose(1, 2) for name in "qkv")
        if self.kind == "attention":
            o = self.strategy.attention(q, k, v, None, dropout=0.0, softmax="fused")
        elif self.kind == "linear_attention":
            scale = q.shape[-1] ** -0.5
            o = self.strategy.linear_attention(q * scale, k * scale, v, DecayMask(**self.heeded))
        else:
            o = self.strategy.causal_attention(q, k, v, **self.heeded)
        return {"o": o.transpose(1, 2)}


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
    # the heads of Llama 3 8B (arXiv 2407.21783, table 3)
    "attention-call": AttentionCallModel(kv_heads=8),
    # for verification: 1 to 4 ranks divide 12 heads; of 12 ranks several hold each of 4 heads of keys, values
    "attention-call-tiny": AttentionCallModel(heads=12, kv_heads=4, head_size=4),
    # the sizes of fla's benchmarks/cp/test_gdn_with_cp.py
    "recurrence-call": RecurrenceCallModel(),
    "recurrence-call-tiny": RecurrenceCallModel(heads=12, key_size=4, value_size=6),
}
