"""Causal language models, as single-device code.

A layer is x + mixer(norm(x)), then x + mlp(norm(x)), or has its norms behind mixer and MLP, or on both sides;
after the last layer come a norm and the head. A subclass chooses each layer's mixer (the module that mixes
tokens, from :mod:`spbench.impls.models.blocks.linear_mixer` or
:mod:`spbench.impls.models.blocks.softmax_mixer`), its feed-forward block (from
:mod:`spbench.impls.models.blocks.feed_forward`), norms, biases, dropout and learned positions.

Shape letters: B batch, L sequence (this rank's part of it, where a strategy chunks it), H hidden,
V vocabulary.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor, nn

from spbench.impls.composition import ONE_STAGE, Stage
from spbench.impls.models.blocks.architecture import Architecture, FeedForward
from spbench.impls.models.blocks.decoder_layer import DecoderBlock, LoneDecoderLayer
from spbench.impls.models.blocks.decoder_module import Decoder, shifted_inputs
from spbench.impls.models.blocks.decoder_sites import stage_parameters, stage_sites
from spbench.impls.models.blocks.experts import MixtureOfExperts
from spbench.impls.models.blocks.feed_forward import Mlp
from spbench.impls.models.blocks.softmax_mixer import SoftmaxAttention
from spbench.impls.models.blocks.text import causal_language_batches
from spbench.impls.models.model import ModelPart, check_positions
from spbench.impls.options import Saving, with_options
from spbench.impls.strategies.base import Site, Strategy, Unsupported

#: sizes for verification: 1 to 4 ranks divide the number of heads and the sizes. The epsilon of norms is
#: large, because a norm scales up numbers that are almost zero by chance (as the inner product of a query and
#: a key of 4 features can be), so that half precisions would compare noise
TINY_SIZES: Mapping[str, Any] = {
    "layers": 2,
    "hidden": 48,
    "heads": 12,
    "inner": 96,
    "vocabulary": 96,
    "norm_epsilon": 0.1,
}


@dataclass(frozen=True)
class DecoderModel(Architecture):
    """A causal language model of the layers that its options describe; a derived class chooses each layer's
    mixer."""

    sequence_dims: ClassVar[Mapping[str, int | None]] = {
        "tokens": 1,
        "labels": 1,
        "loss_weights": 1,
        "mtp_tokens": 1,
        "mtp_labels": 1,
        "mtp_weights": 1,
    }
    plain_options: ClassVar[Mapping[str, Any]] = {
        "linear_attention": "quadratic",
        "rms_norm": "plain",
        "rope": "shared",
        "cross_entropy": "plain",
        "swiglu": "plain",
        "checkpointing": False,
        "library": "torch",
        "unfused": (),
        "fusions": (),
        "fp8": "none",
        "fp8_transposes": True,
        "attention_views": False,
        "recompute": "none",
        "recompute_keeps": (),
        "recompute_early_stop": False,
        "recompute_reentrant": False,
        "checkpoints": "device",
        "mlp_tile": 0,
        "loss_tile": 0,
        "tiling": "alst",
        "vocabulary_tile": 0,
        "dispatcher": "all_gather",
        "expert_weighting_at": "experts",
        "shared_overlap": False,
        "experts_matmul": "sequential",
        "permutation": "plain",
    }

    rounding_options: ClassVar[frozenset[str]] = frozenset({"fp8"})

    def feeding(self, layer: int) -> FeedForward | None:
        return MixtureOfExperts() if self.has_experts(layer) else Mlp()

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check_experts()
        asked = [name for name in ("kv_heads", "qk_norm", "sinks") if getattr(self, name, None)]
        if self.swiglu == "in_place" and not (self.gated_mlp and self.activation == "silu"):
            raise ValueError("swiglu: in_place needs an MLP with a gate and SiLU, which this model lacks")
        softmax = [isinstance(self.mixing(i), SoftmaxAttention) for i in range(self.layers)]
        self.check_adapters()
        if asked and not any(softmax):
            raise ValueError(f"{asked[0]} needs softmax attention, which no layer of this model has")

    @property
    def losses(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("language", "mtp") if self.mtp_layers else ("language",)

    def variants(self) -> list[Mapping[str, Any]]:
        return [*self._dense_variants(), *self.expert_variants()]

    def _dense_variants(self) -> list[Mapping[str, Any]]:
        recompute = {
            "recompute",
            "recompute_keeps",
            "recompute_early_stop",
            "recompute_reentrant",
            "checkpoints",
        }
        others = {"checkpointing", "unfused", "mlp_tile", "loss_tile", "tiling"} | recompute
        plain = {k: v for k, v in self.plain_options.items() if k not in others}
        # strategies that split heads refuse 3 heads over 2 or 4 ranks; all ranks hold a single key-value head
        one = {"kv_heads": 1} if self.grouped else {}
        as_hugging_face = {"rms_norm": "rounded", "attention_views": True, "rope": "each_layer"}
        in_place = {"swiglu": "in_place"} if self.gated_mlp and self.activation == "silu" else {}
        return [
            {"checkpointing": True, "rms_norm": "upcast", "logits_read": 1} | one | in_place,
            # 7 divides none of the 72 tokens that 1 to 4 ranks share
            {"recompute": "full", "recompute_reentrant": True, "checkpoints": "host"}
            | {"mlp_tile": 7, "loss_tile": 7}
            | one,
            plain | {"heads": 3, "vocabulary_tile": 40} | one,
            {"tiling": "fpdt", "mlp_tile": 7, "loss_tile": 7} | one,
            {"tied": True, "cross_entropy": "fused", "mlp_tile": 10, "loss_tile": "liger"} | as_hugging_face,
            # documents that the ranks' boundaries cut, of lengths that twice the ranks do not divide
            {"documents": (7, 1, 11, 5), "fusions": ("swiglu", "rope"), "cross_entropy": "compiled"} | one,
        ]

    def savings(self, stages: int = 1) -> Iterator[Saving]:
        if self.cross_entropy != "in_place":
            yield Saving({"cross_entropy": "in_place"}, "no float32 copy of the logits (TransformerEngine's)")
        if not self.loss_tile:
            yield Saving(_loss_in_tiles(self), "head and loss in tiles, no whole logits")
        in_tiles = {} if self.keeps_operators else _in_tiles(self)
        if in_tiles and not self.mlp_tile:
            yield Saving(in_tiles, "backward runs each tile of an MLP again; the loss is in tiles too")
        here = self.layers // stages
        if not self.recomputes_layers:
            if self.recompute == "none":
                yield Saving({"recompute": "selective"}, "backward runs the inside of attention again")
            for layers in dict.fromkeys((here // 4, here // 2, here * 3 // 4)):
                if layers:
                    block = {"recompute": "full", "recompute_method": "block", "recompute_layers": layers}
                    yield Saving(block, f"backward runs {layers} of a stage's {here} layers again")
            yield Saving({"recompute": "full"}, "backward runs all layers again")
            on_host = {"recompute": "full", "checkpoints": "host"}
            yield Saving(on_host, "backward runs all layers again, and their inputs wait on the host")
            if not self.mlp_tile:
                yield Saving({**on_host, **in_tiles}, "so, and MLP and loss are in tiles")
            return
        if self.checkpoints == "device" and not self.keeps_operators:
            yield Saving({"checkpoints": "host"}, "the inputs of layers wait on the host")
            if not self.mlp_tile:
                yield Saving({"checkpoints": "host", **in_tiles}, "so, and MLP and loss are in tiles")
        if self.recompute_method == "uniform":
            for layers in (2 * self.recompute_layers, 4 * self.recompute_layers):
                if layers < here:
                    yield Saving({"recompute_layers": layers}, f"one input is kept for {layers} layers")
        else:
            uniform = {"recompute_method": "uniform", "recompute_layers": 1}
            yield Saving(uniform, f"backward runs all layers again, not {self.recompute_layers} of a stage")

    def shrunk(self) -> Self:
        sizes = {**TINY_SIZES, "vocabulary_multiple": 1}
        if self.grouped:
            sizes["kv_heads"] = 1 if self.kv_heads == 1 else 4
        elif self.kv_heads is not None:
            sizes["kv_heads"] = None
        if self.head_dim is not None:
            sizes["head_dim"] = 8  # 12 heads have 96 features, other than the 48 of the hidden state
        # all in one change, because the old rotary_share may not fit the smaller heads
        others = {"dropout": 0.0, "attention_dropout": 0.0, "lora_dropout": 0.0, "rotary_share": 1.0}
        return with_options(self, {**sizes, **others, **self.shrunk_experts()})

    def build(self, strategy: Strategy, seq_len: int, stage: Stage = ONE_STAGE) -> nn.Module:
        return Decoder(self, strategy, seq_len, stage)

    def inputs(self, batch: int, seq_len: int, generator: torch.Generator | None) -> dict[str, Tensor]:
        shape = (batch, seq_len)
        inputs = {
            "tokens": torch.randint(self.vocabulary, shape, generator=generator),
            "labels": torch.randint(self.vocabulary, shape, generator=generator),
            "loss_weights": torch.full(shape, 1 / (batch * seq_len)),
        }
        return self._with_further_tokens(inputs)

    def _with_further_tokens(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """A whole batch of inputs, with the shifted tokens, labels and weights of multi-token prediction."""
        if not self.mtp_layers:
            return inputs
        attended = self.attended(inputs["tokens"].shape[1])
        tokens, labels, weights = (inputs[name] for name in ("tokens", "labels", "loss_weights"))
        return inputs | shifted_inputs(tokens, labels, weights, attended, self.mtp_layers)

    def batches(self, batch: int, seq_len: int, seed: int) -> Iterator[dict[str, Tensor]]:
        return map(self._with_further_tokens, causal_language_batches(self.vocabulary, batch, seq_len, seed))

    def sites(
        self, batch: int, seq_len: int, vocabulary_parts: int = 1, stage: Stage = ONE_STAGE
    ) -> list[Site]:
        if self.vocabulary_tile and vocabulary_parts > 1:
            raise Unsupported("vocabulary_tile needs a head that no ranks split", "use loss_tile")
        check_positions(self.learned_positions, max(self.attended(seq_len).documents, default=seq_len))
        if self.mtp_layers >= seq_len:
            predicted = f"{self.mtp_layers} modules predict tokens of a sequence of {seq_len}"
            raise Unsupported(predicted, "set mtp_layers lower")
        return stage_sites(self, batch, seq_len, self.padded_vocabulary(vocabulary_parts), stage)

    def parameters(self, rows: int, stage: Stage = ONE_STAGE) -> dict[str, int]:
        """The counts of :func:`stage_parameters` for a word embedding of ``rows`` rows."""
        return stage_parameters(self, rows, stage)

    @property
    def period(self) -> int:
        return len(self.expert_pattern) if self.experts else 1

    @property
    def unlike_layers(self) -> int:
        return self.dense_layers if self.experts else 0

    @property
    def problems_of_sizes(self) -> Iterator[str]:
        """The faults of the sizes that a cell sets, a sentence each. Smaller sizes, for verification or for
        traces of few layers, may have these faults."""
        if self.experts and not any(map(self.has_experts, range(self.layers))):
            yield f"dense_layers {self.dense_layers} leaves no experts in {self.layers} layers; set it lower"
        if self.lora_rank > self.hidden:
            yield f"lora_rank {self.lora_rank} exceeds the {self.hidden} features of hidden; set it lower"

    def parts(self) -> Mapping[str, ModelPart]:
        def hidden_inputs(batch: int, seq_len: int, generator: torch.Generator) -> dict[str, Tensor]:
            return {"x": torch.randn(batch, seq_len, self.hidden, generator=generator, dtype=torch.float64)}

        losses = {"loss": None} | {f"{name}_loss": None for name in self.losses}
        outputs = losses | {"hidden": 1, "token_loss": 1}
        # the attention is the first layer's and the block is the last layer's, because layers may differ
        return {
            "attention": ModelPart(
                lambda s, n: LoneDecoderLayer(self.mixing(0).build(self, s), self, s, n),
                hidden_inputs,
                {"x": 1},
                {"y": 1},
            ),
            "block": ModelPart(
                lambda s, n: LoneDecoderLayer(DecoderBlock(self, s, self.layers - 1), self, s, n),
                hidden_inputs,
                {"x": 1},
                {"y": 1},
            ),
            "model": ModelPart(self.build, self.inputs, self.sequence_dims, outputs),
        }


def _loss_in_tiles(model: DecoderModel) -> dict[str, Any]:
    """The options of a loss in tiles of so many tokens that float32 logits take at most 1 GiB (ALST)."""
    tokens = 2**28 // model.vocabulary
    tile = 1 << max(0, tokens.bit_length() - 1)
    return {"loss_tile": tile, "cross_entropy": "in_place"}


def _in_tiles(model: DecoderModel) -> dict[str, Any]:
    """The options of a loss in tiles, and of MLPs in ALST's tiles of ``hidden`` tokens."""
    return {"mlp_tile": model.hidden, **({} if model.loss_tile else _loss_in_tiles(model))}
