"""The options of a decoder's layers: the layers' parts, and the kernels that compute them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal

from spbench.impls.kernels.cross_entropy import CROSS_ENTROPIES
from spbench.impls.kernels.fp8_projection import RECIPES
from spbench.impls.kernels.projection import LIBRARIES
from spbench.impls.models.blocks.adapter_options import AdapterOptions
from spbench.impls.models.blocks.fp8_options import Fp8Options
from spbench.impls.models.blocks.packing import Documents, PackedSequences
from spbench.impls.models.blocks.recomputation import MEGATRON_CALLS, TORCH_CALLS
from spbench.impls.models.model import AttentionHeads
from spbench.impls.options import check_choices
from spbench.impls.strategies.attention import LINEAR_ATTENTION_WAYS
from spbench.impls.tiles import Tiling

#: the fused kernels of libraries other than torch: scale, mask and softmax of scores; an MLP's bias and
#: activation; bias, dropout and addition to the hidden states; RoPE
FUSIONS = ("masked_softmax", "bias_gelu", "bias_swiglu", "bias_dropout", "rope")

#: the word of FUSIONS for each word of the option ``fusions``, the kernels that torch.compile can fuse
COMPILED = {"swiglu": "bias_swiglu", "rope": "rope"}

#: the parts of a layer that ``recompute: selective`` can run again
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
    """The options of a decoder's layers: the layers' parts, and the kernels that compute them.

    An option that changes how, not what, a layer computes has its plain value in
    :attr:`DecoderModel.plain_options`, and a value to verify in :meth:`DecoderModel.variants`.

    Attributes:
        kv_heads: heads of keys and values in softmax attention, each for ``heads / kv_heads`` of queries
            (grouped-query attention, arXiv 2305.13245); None: as many as ``heads``.
        head_dim: A, features of a head of attention; None: ``hidden / heads``.
        qk_norm: whether queries and keys of softmax attention are normalised before RoPE, with a weight each
            (Qwen3, arXiv 2505.09388), and with a bias where the model's norms have a bias.
        qk_norm_over: the features over which ``qk_norm`` normalises: of each "head", or of "all" heads
            together (OLMo 2).
        inner: width of the MLP.
        attention_norm: the features over which the output of linear attention is normalised: all ("hidden"),
            or those of each "head", which a strategy that splits heads needs.
        linear_attention: a key of :data:`LINEAR_ATTENTION_WAYS`.
        norm_epsilon: the number that every norm adds to the mean square.
        rms_norm: "fused", "upcast", "plain" or "rounded" (Hugging Face's); see :func:`rms_norm`.
        rope: for library torch: "shared": all layers share one cos and sin; "each_layer": each layer makes
            its own, which backward keeps, as Hugging Face's models did before transformers 4.41.
        cross_entropy: the kernel of the loss. "plain" keeps the log-softmax in full precision and makes a new
            tensor for its gradient; "fused" works in one full-precision copy of the logits, as Megatron-LM's
            own; "native" makes a second copy in backward, as Megatron-LM's --cross-entropy-loss-fusion;
            "in_place" makes no copy, as TransformerEngine's (--cross-entropy-fusion-impl te); "compiled"
            makes no copy, but a new tensor for the gradient, as torch.compile of torch's loss;
            "loss_parallel" holds three copies in forward and four in backward, as torch's loss of that
            name; "as_given" is "plain" in the precision of the logits.
        swiglu: "plain" keeps what torch's SiLU and multiplication keep; "in_place" keeps only the two opening
            projections of a gated MLP and writes their gradients into their memory, as Liger's kernel.
        autotune_flush_kib, autotune_copies: KiB of the buffer, and the number of copies of logits, that
            torch.compile allocates to time the kernels of cross_entropy "native" in their first call; see
            :class:`Autotuning`. 0 KiB: torch.compile timed the kernels earlier.
        separate_projections: queries, keys, values, and the two projections that open the MLP, have a weight
            and a matmul each, as in Hugging Face's models and torchtitan's before version 0.3; "mlp": only
            the two of the MLP, as in torchtitan 0.3.0; else projections of the same input are one matmul.
        attention_views: attention takes views of the matmul that made queries, keys and values, as
            flash-attn's functions for packed tensors do: a part that RoPE does not copy keeps the whole
            tensor for backward. Else the parts are copied.
        library: the library whose layers the model has, one of LIBRARIES; the library decides what is kept
            for backward, and which workspaces exist. Libraries other than torch have all :data:`FUSIONS`.
        fusions: words of :data:`COMPILED`: what torch.compile makes one kernel of, with library torch.
            "swiglu": SiLU and the multiplication by the gate, which keeps its two inputs; "rope": the turning
            of queries or keys, which keeps the angles. (rms_norm: fused makes a norm one kernel, and the
            backend's implementation: fused does so for the update of all weights.)
        unfused: words of :data:`FUSIONS` that torch's operators replace in another library's layers.
        recompute: what backward runs again: "full": runs of layers, whose input is kept; "selective": the
            parts of layers that recompute_modules names (arXiv 2205.05198, section 5); "operators": each
            layer but for softmax attention and every other matmul (torchtitan's "selective" by "op").
        recompute_modules: the parts that "selective" runs again, by the names of Megatron-LM's option:
            "core_attn": softmax attention; "moe_act": the activation of experts; "moe": experts with router
            and dispatch; "shared_experts"; "mlp": MLPs without experts; "layernorm": norms that no projection
            of the library includes; "mla_up_proj": the up-projections of latent attention.
        recompute_keeps: results that recompute "operators" keeps too: "all_to_all": of the exchanges of rows
            with experts (torchtitan since its pull request 1672 of September 2025).
        recompute_method: the layers of full recomputation: "uniform": all, in runs of ``recompute_layers``;
            "block": the first ``recompute_layers`` of each pipeline stage, one by one; "interval": the last
            of each ``recompute_layers`` layers of a stage.
        recompute_layers: a number of layers; see ``recompute_method``.
        recompute_early_stop: recomputation ends at the last tensor that backward needs, so that a run's last
            matmul does not run again, as in torch's checkpoint without use_reentrant.
        recompute_reentrant: in full recomputation a run's input, its recomputed output, and that output's
            gradient live through the run's backward, as in torch's checkpoint with use_reentrant, Hugging
            Face's default; see :class:`BackwardFrame`.
        checkpoints: where full recomputation keeps the inputs of runs of layers: on the "device"; in pinned
            memory of the "host" (:class:`HostCheckpoints`); there by torch's "save_on_cpu"
            (:class:`SavedOnCpu`); or in "pageable" memory (:class:`PageableCheckpoints`).
        checkpointed_angles: with pageable checkpoints: the features of the cos and sin of all positions that
            are copied, in vain, with each input, because Megatron-DeepSpeed's casts remove the mark
            ``no_checkpointing`` (megatron/model/language_model.py).
        checkpointing: another name of ``recompute: full``.
        mlp_tile: the most tokens of a rank in a tile of the MLP; backward computes each tile again. ALST has
            ``hidden`` tokens. 0: no tiles. See :func:`in_tiles`.
        loss_tile: the most tokens of a rank in a tile of head and loss, which makes its gradients at once;
            "liger": the length that Liger's fused linear cross entropy chooses. 0: no tiles. See
            :func:`loss_in_tiles`.
        tiling: "alst", or "fpdt": gradients of weights are summed over tiles in float32, and backward runs
            the tiles of the loss again, as DeepSpeed's FPDT does (sequence/fpdt_layer.py).
        vocabulary_tile: rows of the vocabulary in a tile of head and loss, which backward computes again, as
            prime-rl does; see :func:`token_losses`. 0: no tiles.
        logits_held: whether logits live until the next micro-batch's logits exist, as in a variable of a
            training loop: "none", "float32" (copies of half-precision logits), or "as_made".
        logits_read: how often float32 copies of the logits are read in addition to the loss, as for metrics
            of all tokens; with a split vocabulary each rank reads its part.
        positions_read: the host reads the position of each token, one after another, between forward and
            backward, as a Python loop that looks for the begin of packed samples; see :func:`samples_begun`.
        packing_read: the host reads in each call of attention whether the sequence is packed, as Hugging
            Face's flash attention does where a micro-batch has one sequence; see :func:`read_packing`.
        documents, documents_seed, documents_multiple, packed_multiple: the documents that a sequence is
            packed of; see :class:`PackedSequences`.
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
    separate_projections: bool | Literal["mlp"] = False
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
    documents_multiple: int | str = 1
    packed_multiple: int = 1

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
        """The faults of the options of recomputation, a sentence each."""
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
        """The faults of the options of the library, its kernels, and the loss, a sentence each."""
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
        """The features of all heads of queries together, Z A."""
        return self.heads * self.head_size

    @property
    def recomputes_layers(self) -> bool:
        """Whether backward recomputes layers: whole ones, or all but some of their operators."""
        return self.checkpointing or self.recompute in ("full", "operators")

    def recomputes(self, module: str) -> bool:
        """Whether ``recompute: selective`` runs ``module``, a word of RECOMPUTE_MODULES, again."""
        return self.recompute == "selective" and module in self.recompute_modules

    @property
    def joint_qkv(self) -> bool:
        """Whether queries, keys and values are one matmul, and the projections that open the MLP are not."""
        return self.separate_projections == "mlp"

    @property
    def keeps_operators(self) -> bool:
        """Whether recomputed layers keep the results of some operators (``recompute: operators``)."""
        return self.recompute == "operators"

    def recomputed_runs(self, layers: Sequence[int]) -> list[tuple[Sequence[int], bool]]:
        """The runs of layers of a stage, each with whether backward recomputes the run."""
        if not self.recomputes_layers:
            return [(layers, False)]
        n = self.recompute_layers
        if self.recompute_method == "uniform":
            return [(layers[i : i + n], True) for i in range(0, len(layers), n)]
        if self.recompute_method == "interval":
            return [([layer], place % n == 0) for place, layer in enumerate(layers, 1)]
        return [*(([layer], True) for layer in layers[:n]), (layers[n:], False)]

    @property
    def recomputation(self) -> dict[str, Any]:
        """The keyword arguments with which :func:`recomputed` runs layers."""
        return {
            "early_stop": self.recompute_early_stop,
            "keep": self.keeps_operators,
            "keep_exchanges": "all_to_all" in self.recompute_keeps,
            "reentrant": self.recompute_reentrant,
            "calls": TORCH_CALLS if self.recompute_early_stop else MEGATRON_CALLS if self.fused else (0, 0),
        }

    @property
    def kept_collectives(self) -> tuple[str, ...]:
        """The names of the collectives whose results recomputed layers keep."""
        return ("reduce_scatter", *self.recompute_keeps) if self.keeps_operators else ()

    @property
    def mlp_tiling(self) -> Tiling:
        """The tiles of tokens in which the MLP is computed."""
        return Tiling(self.mlp_tile, precise=self.tiling == "fpdt")

    @property
    def fused(self) -> bool:
        """Whether the layers are of a library other than torch, which fuses the operators between matmuls."""
        return self.library != "torch"

    def fuses(self, name: str) -> bool:
        """Whether the library or torch.compile has one kernel for ``name``, a word of :data:`FUSIONS`."""
        if not self.fused:
            return name in {COMPILED[each] for each in self.fusions}
        return name not in self.unfused

    @property
    def grouped(self) -> bool:
        """Whether several heads of queries share a head of keys and values."""
        return self.kv_heads not in (None, self.heads)
