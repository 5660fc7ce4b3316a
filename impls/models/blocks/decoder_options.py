"""The options of a decoder's layers: what they are made of, and which kernels they use."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import ClassVar, Literal

from spbench.impls.kernels.cross_entropy import CROSS_ENTROPIES
from spbench.impls.kernels.fp8_projection import RECIPES
from spbench.impls.kernels.projection import LIBRARIES
from spbench.impls.models.blocks.adapter_options import AdapterOptions
from spbench.impls.models.blocks.fp8_options import Fp8Options
from spbench.impls.models.blocks.packing import Documents, PackedSequences
from spbench.impls.models.model import AttentionHeads
from spbench.impls.options import check_choices
from spbench.impls.strategies.attention import LINEAR_ATTENTION_WAYS
from spbench.impls.tiles import Tiling

#: what libraries other than torch fuse: the scale, mask and softmax of scores, an MLP's bias and activation,
#: bias, dropout and addition to the hidden states, and RoPE
FUSIONS = ("masked_softmax", "bias_gelu", "bias_swiglu", "bias_dropout", "rope")

#: what torch.compile fuses in a layer of torch's operators, by the names of FUSIONS
COMPILED = {"swiglu": "bias_swiglu", "rope": "rope"}

#: what of a layer ``recompute: selective`` can run again
RECOMPUTE_MODULES = "core_attn", "moe_act", "moe", "mlp", "layernorm", "mla_up_proj", "shared_experts"

_WAYS = {
    "attention_norm": ("hidden", "head"),
    "qk_norm_over": ("head", "all"),
    "linear_attention": tuple(LINEAR_ATTENTION_WAYS),
    "rms_norm": ("fused", "upcast", "plain", "rounded"),
    "rope": ("shared", "each_layer"),
    "cross_entropy": ("plain", *CROSS_ENTROPIES),
    "logits_held": ("none", "as_made", "float32"),
    "library": LIBRARIES,
    "swiglu": ("plain", "in_place"),
    "fp8": ("none", *RECIPES),
    "recompute": ("none", "selective", "operators", "full"),
    "recompute_method": ("uniform", "block", "interval"),
    "tiling": ("alst", "fpdt"),
    "checkpoints": ("device", "host", "save_on_cpu", "pageable"),
}
_WORDS = {
    "recompute_modules": RECOMPUTE_MODULES,
    "recompute_keeps": ("all_to_all",),
    "fusions": tuple(COMPILED),
    "unfused": FUSIONS,
}


@dataclass(frozen=True)
class DecoderOptions(AttentionHeads, PackedSequences, AdapterOptions, Fp8Options):
    """What the layers of a decoder are made of, and which kernels they use.

    An option that changes how, not what, a layer computes has its plain value in
    :attr:`DecoderModel.plain_options`, and a value to verify in :meth:`DecoderModel.variants`.

    Attributes:
        kv_heads: heads of keys and values in softmax attention, each for ``heads / kv_heads`` of queries
            (grouped-query attention, arXiv 2305.13245); None: as many as ``heads``.
        head_dim: features of a head of attention, A, where they are not ``hidden / heads`` (Qwen3).
        qk_norm: queries and keys of softmax attention are normalised head by head, with a weight of one
            head's size each, before RoPE (Qwen3, arXiv 2505.09388); with a bias where the model's norms have
            one.
        qk_norm_over: the features of each "head", or of all heads together ("all", OLMo 2).
        inner: width of the MLP.
        attention_norm: the output of linear attention is normalised over all features ("hidden"), or over
            those of each head ("head"), which a strategy that splits heads needs.
        linear_attention: a key of :data:`LINEAR_ATTENTION_WAYS`.
        norm_epsilon: added to the mean square in every norm.
        rms_norm: "fused", "upcast", "plain" or "rounded" (Hugging Face's); see :func:`rms_norm`.
        rope: of library torch: "shared": all layers have one cos and sin; "each_layer": each makes its own,
            which backward keeps, as Hugging Face's models did before transformers 4.41.
        cross_entropy: "plain" keeps the log-softmax in full precision and makes its gradient anew; "fused"
            makes one full-precision copy of the logits and works in it, as Megatron-LM's own; "native" makes
            a second one in backward, as Megatron-LM compiles it (--cross-entropy-loss-fusion); "in_place"
            makes none, as TransformerEngine's (--cross-entropy-fusion-impl te); "compiled" makes none
            either, and a gradient beside the logits, as torch.compile of torch's; "loss_parallel" makes three
            at once in forward and four in backward, as torch's loss of that name; "as_given" is "plain" in
            the precision of the logits.
        swiglu: "plain" keeps what torch's SiLU and product keep; "in_place" keeps the two projections that
            open a gated MLP alone, and makes their gradients in their memory, as Liger's kernel.
        autotune_flush_kib, autotune_copies: of cross_entropy "native" where the compiler times its kernels
            in the first call; see :class:`Autotuning`. 0 KiB: it did so before.
        separate_projections: queries, keys, values, and the two projections that open the MLP, have a weight
            and a matmul each, as Hugging Face's and torchtitan's models have; else those of the same
            input are one product.
        attention_views: attention takes queries, keys and values as their projection has made them, as where
            flash-attn's functions are called with parts of one product: the part that RoPE does not copy
            keeps the whole for backward. Else they are copied out of it.
        library: whose layers the model is made of, one of LIBRARIES; it decides what is kept for backward,
            and which workspaces exist. Other than torch's, they have all :data:`FUSIONS`.
        fusions: words of :data:`COMPILED`: what torch.compile makes one kernel of, with library torch.
            "swiglu": SiLU and the product with the gate, which keeps its two inputs; "rope": the turning of
            queries or keys, which keeps the angles. (A norm is one kernel by rms_norm: fused, the update of
            all weights by the backend's implementation: fused.)
        unfused: those of :data:`FUSIONS` that are left out of a library's, to be made of torch's operators.
        recompute: what backward runs again: "full": runs of layers, of which the input is kept; "selective":
            parts of layers, if nothing else is said softmax attention between its projections (arXiv
            2205.05198, section 5); "operators": each layer
            but for softmax attention and every other matmul (torchtitan's "selective" by "op").
        recompute_modules: of selective recomputation, by Megatron-LM's names (--recompute-modules):
            "core_attn": softmax attention; "moe_act": the activation of experts; "moe": experts with router
            and dispatch; "shared_experts"; "mlp": MLPs without experts; "layernorm": norms that no projection
            of the library includes; "mla_up_proj": the up-projections of latent attention.
        recompute_keeps: of "operators", what is kept too: "all_to_all": what brings rows to their experts and
            back (torchtitan since its pull request 1672 of September 2025).
        recompute_method: of full recomputation: "uniform": all layers, in runs of ``recompute_layers``;
            "block": the first ``recompute_layers`` of each pipeline stage, one by one; "interval": one of
            each ``recompute_layers`` layers of a stage, the last of them.
        recompute_layers: see ``recompute_method``.
        recompute_early_stop: of full recomputation: it ends at the last tensor that backward needs, so that a
            run's last product does not run again, as where programs use torch's checkpoint without
            use_reentrant.
        recompute_reentrant: of full recomputation: a run's input, its output, made again, and the gradient of
            that live through the run's backward, as where programs use torch's checkpoint with use_reentrant,
            Hugging Face's default; see :class:`BackwardFrame`.
        checkpoints: of full recomputation: where the inputs of runs of layers wait for backward: on the
            "device"; in pinned memory of the "host", see :class:`HostCheckpoints`; there by torch's
            "save_on_cpu", see :class:`SavedOnCpu`; or in "pageable" memory, see :class:`PageableCheckpoints`.
        checkpointed_angles: with checkpoints in pageable memory: features of the cos and sin of all positions
            of a sequence that are copied there with each input, in vain: where Megatron-DeepSpeed casts them,
            they lose their mark ``no_checkpointing`` (megatron/model/language_model.py).
        checkpointing: as ``recompute: full``.
        mlp_tile: the MLP is computed in tiles of at most that many tokens of a rank, each made again in
            backward; ALST has as many as ``hidden``. 0: at once. See :func:`in_tiles`.
        loss_tile: head and loss are computed in tiles of at most that many tokens of a rank, gradients with
            them; "liger": of the length that Liger's fused linear cross entropy chooses. 0: at once. See
            :func:`loss_in_tiles`.
        tiling: "alst", or "fpdt": gradients of weights are summed over tiles in float32, and the tiles of the
            loss run again in backward, as DeepSpeed's FPDT has it (sequence/fpdt_layer.py).
        vocabulary_tile: head and loss are computed in tiles of that many rows of the vocabulary, each made
            again in backward, as prime-rl's; see :func:`token_losses`. 0: at once.
        logits_held: logits live until the next micro-batch's are there, as where a training loop's variable
            has them: "float32", made from those of half precision, or "as_made".
        logits_read: times that logits in float32, made from those of half precision, are read beside the
            loss, as for metrics of all tokens; of a split vocabulary each rank reads its part.
        positions_read: the host reads the position of each token, one after another, between forward and
            backward, as a training loop in Python that looks for where packed samples begin; see
            :func:`samples_begun`.
        packing_read: the host reads in each call of attention whether the sequence is packed, as Hugging
            Face's flash attention does where a micro-batch has one sequence; see :func:`read_packing`.
        documents, documents_seed: what a sequence is packed of; see :class:`PackedSequences`.
    """

    layers: int = 16
    hidden: int = 2048
    heads: int = 16
    kv_heads: int | None = None
    head_dim: int | None = None
    qk_norm: bool = False
    qk_norm_over: str = "head"
    inner: int = 5632
    attention_norm: str = "head"
    norm_epsilon: float = 1e-6
    linear_attention: str = "chunked"
    rms_norm: str = "fused"
    rope: str = "shared"
    cross_entropy: str = "plain"
    swiglu: str = "plain"
    autotune_flush_kib: int = 0
    autotune_copies: int = 0
    separate_projections: bool = False
    attention_views: bool = False
    library: str = "torch"
    fusions: Sequence[str] = ()
    unfused: Sequence[str] = ()
    recompute: str = "none"
    recompute_method: str = "uniform"
    recompute_modules: Sequence[str] = ("core_attn",)
    recompute_keeps: Sequence[str] = ()
    recompute_layers: int = 1
    recompute_early_stop: bool = False
    recompute_reentrant: bool = False
    checkpoints: str = "device"
    checkpointed_angles: int = 0
    checkpointing: bool = False
    mlp_tile: int = 0
    loss_tile: int | Literal["liger"] = 0
    tiling: str = "alst"
    vocabulary_tile: int = 0
    logits_held: str = "none"
    logits_read: int = 0
    positions_read: bool = False
    packing_read: bool = False
    documents: Documents = ()
    documents_seed: int = 0

    #: "rms" or "layer", which has a bias too
    norm: ClassVar[str] = "rms"

    def __post_init__(self) -> None:
        if getattr(self, "kv_lora_rank", 0):
            pass  # heads of latent attention have sizes of their own
        elif self.head_dim is None:
            super().__post_init__()
        elif self.head_dim < 1:
            raise ValueError(f"head_dim is at least 1, not {self.head_dim}")
        check_choices(self, _WAYS)
        self.check_documents()
        for name, known in _WORDS.items():
            words = tuple(getattr(self, name))
            object.__setattr__(self, name, words)  # a list has no hash
            for word in words:
                if word not in known:
                    raise ValueError(f"{name} has words of {', '.join(known)}, not {word!r}")
        self.check_fp8()
        if problem := next(chain(self._problems_of_layers(), self._problems_of_recomputation()), ""):
            raise ValueError(problem)
        if self.recompute_layers < 1:
            raise ValueError(f"recompute_layers is at least 1, not {self.recompute_layers}")
        if self.kv_heads is not None and (self.kv_heads < 1 or self.heads % self.kv_heads):
            raise ValueError(f"kv_heads {self.kv_heads} does not divide heads {self.heads}")

    def _problems_of_recomputation(self) -> Iterator[str]:
        """What is wrong with options of what runs again, and of where it waits."""
        whole = self.recomputes_layers and not self.keeps_operators
        for option, missing in (
            ("recompute_early_stop", self.recompute_early_stop and not self.recomputes_layers),
            ("recompute_reentrant", self.recompute_reentrant and not whole),
            (f"checkpoints: {self.checkpoints}", self.checkpoints != "device" and not whole),
        ):
            if missing:
                yield f"{option} needs recompute: full; set that, or leave it out"
        if self.checkpointing and self.recompute != "none":
            yield f"checkpointing is recompute: full; with recompute {self.recompute} leave it out"
        if self.recompute_reentrant and self.recompute_early_stop:
            yield "a reentrant checkpoint runs whole; leave recompute_early_stop out"
        if self.checkpointed_angles < 0 or (self.checkpointed_angles and self.checkpoints != "pageable"):
            yield "checkpointed_angles is at least 0, and needs checkpoints: pageable"
        if self.recompute_keeps and not self.keeps_operators:
            yield "recompute_keeps needs recompute: operators; set that, or leave it out"
        if self.mlp_tile and self.keeps_operators:
            yield "recompute: operators keeps matmuls, and mlp_tile keeps none; leave one out"

    def _problems_of_layers(self) -> Iterator[str]:
        """What is wrong with options of the library, its kernels, and the loss."""
        for option, own in (
            ("separate_projections", self.separate_projections),
            ("rope: each_layer", self.rope == "each_layer"),
        ):
            if own and self.fused:
                yield f"{option} needs library: torch, not {self.library}"
        if self.fusions and self.fused:
            yield f"fusions need library: torch; {self.library} has its own, see unfused"
        if "swiglu" in self.fusions and self.swiglu == "in_place":
            yield "swiglu: in_place is a kernel of its own; leave swiglu out of fusions"
        if self.unfused and not self.fused:
            yield "unfused needs a library that fuses; library torch does not, so leave it out"
        if self.swiglu == "in_place" and (self.fused or self.keeps_operators):
            yield "swiglu: in_place needs library: torch, and not recompute: operators"
        if min(self.autotune_flush_kib, self.autotune_copies) < 0:
            yield "autotune_flush_kib and autotune_copies are at least 0"
        if self.cross_entropy != "native" and self.autotune_flush_kib:
            yield "autotune_flush_kib needs cross_entropy: native; set that, or leave it out"
        if self.autotune_copies and not self.autotune_flush_kib:
            yield "autotune_copies stand beside autotune_flush_kib; set that too"
        held = self.logits_held != "none"
        if self.vocabulary_tile < 0 or (self.vocabulary_tile and (self.loss_tile or held)):
            yield "vocabulary_tile is at least 0, and with it loss_tile and logits_held are left out"
        if held and (self.loss_tile or self.cross_entropy not in ("plain", "as_given", "compiled")):
            yield "logits_held needs cross_entropy: plain, as_given or compiled, and no loss_tile"
        if self.logits_held == "float32" and self.cross_entropy != "plain":
            yield "logits_held: float32 needs cross_entropy: plain; as_made does not"
        if self.logits_read < 0 or (self.logits_read and (self.loss_tile or self.vocabulary_tile)):
            yield "logits_read is at least 0, and goes with neither loss_tile nor vocabulary_tile"
        if self.tiling == "fpdt" and (self.loss_tile == "liger" or not (self.mlp_tile or self.loss_tile)):
            yield "tiling: fpdt needs mlp_tile or loss_tile, and not loss_tile: liger"

    @property
    def head_size(self) -> int:
        return super().head_size if self.head_dim is None else self.head_dim

    @property
    def attention_width(self) -> int:
        """Features of all heads of queries."""
        return self.heads * self.head_size

    @property
    def recomputes_layers(self) -> bool:
        """Whether layers are recomputed, whole or but for some operators."""
        return self.checkpointing or self.recompute in ("full", "operators")

    def recomputes(self, module: str) -> bool:
        """Whether ``recompute: selective`` runs a module of a layer again, one of RECOMPUTE_MODULES."""
        return self.recompute == "selective" and module in self.recompute_modules

    @property
    def keeps_operators(self) -> bool:
        """Whether layers that are recomputed keep the results of some operators."""
        return self.recompute == "operators"

    def recomputed_runs(self, layers: Sequence[int]) -> list[tuple[Sequence[int], bool]]:
        """The layers of a stage in the runs in which they are recomputed or not."""
        if not self.recomputes_layers:
            return [(layers, False)]
        n = self.recompute_layers
        if self.recompute_method == "uniform":
            return [(layers[i : i + n], True) for i in range(0, len(layers), n)]
        if self.recompute_method == "interval":
            return [([layer], place % n == 0) for place, layer in enumerate(layers, 1)]
        return [*(([layer], True) for layer in layers[:n]), (layers[n:], False)]

    @property
    def recomputation(self) -> dict[str, bool]:
        """How layers are recomputed, as :func:`recomputed` is told."""
        return {
            "early_stop": self.recompute_early_stop,
            "keep": self.keeps_operators,
            "keep_exchanges": "all_to_all" in self.recompute_keeps,
            "reentrant": self.recompute_reentrant,
        }

    @property
    def kept_collectives(self) -> tuple[str, ...]:
        """The collectives whose results layers have when they run again."""
        return ("reduce_scatter", *self.recompute_keeps) if self.keeps_operators else ()

    @property
    def mlp_tiling(self) -> Tiling:
        """How the MLP is computed."""
        return Tiling(self.mlp_tile, precise=self.tiling == "fpdt")

    @property
    def fused(self) -> bool:
        """Whether the library fuses what stands between products."""
        return self.library != "torch"

    def fuses(self, name: str) -> bool:
        """Whether the library's kernel for one of :data:`FUSIONS` is used, or the compiler's."""
        if not self.fused:
            return name in {COMPILED[each] for each in self.fusions}
        return name not in self.unfused

    @property
    def grouped(self) -> bool:
        """Whether heads of queries share those of keys and values."""
        return self.kv_heads not in (None, self.heads)
