"""The model of a Megatron-LM job: its GPTModel or BertModel, from the arguments."""

from __future__ import annotations

from spbench.bench.tools.jobs.megatron_attention import ignore_absent_fusions, rotary, set_attention
from spbench.bench.tools.jobs.megatron_container import CONTAINER, MASK_OF_KEYS, runs_before, set_autotuning
from spbench.bench.tools.jobs.megatron_translation import Translation

#: words of tokenizers that need no file to be known: GPT-2's, and BERT's two
_WORDS = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
#: of TikTokenizer, unless --vocab-size says otherwise
_TIKTOKEN_WORDS = 2**17


#: presets by the weights of their layers; a job has the name of the one that it is closest to
_PRESETS = {"gpt3-345m": 3e8, "gpt3-7b": 6.4e9, "gpt3-175b": 1.7e11}


def set_model(t: Translation, *, bert: bool, cluster: str | None) -> None:
    """Set the model and its options."""
    t.set(
        "model",
        "bert-large" if bert else _preset(t),
        note=f"{model_name(bert)}, all of whose sizes are below",
    )
    for name in ("--hidden-size", "--num-attention-heads", "--max-position-embeddings", "--micro-batch-size"):
        if not t.given.on(name):
            t.problems.append(f"{name} is missing")
    _set_sizes(t, bert)
    _set_vocabulary(t, bert)
    local = _set_library(t)
    if bert:
        _set_bert(t, local)
        return
    t.ignore("of a BertModel", "--bert-no-binary-head")
    _set_layers(t)
    _set_positions(t)
    set_attention(t, local, cluster)
    _set_loss(t, cluster)
    _set_recomputation(t)


def model_name(bert: bool) -> str:
    """Megatron-Core's name of the model."""
    return "BertModel" if bert else "GPTModel"


def _preset(t: Translation) -> str:
    weights = 12 * (layers_of(t) or 1) * (t.given.number("--hidden-size") or 1) ** 2
    return min(_PRESETS, key=lambda name: max(weights / _PRESETS[name], _PRESETS[name] / max(1, weights)))


def layers_of(t: Translation) -> int | None:
    """How many layers there are."""
    for name in ("--num-layers", "--encoder-num-layers"):
        if (layers := t.given.number(name)) is not None:
            return layers
    return None


def length_of(t: Translation) -> int | None:
    """Tokens of a sequence."""
    for name in ("--seq-length", "--encoder-seq-length"):
        if (length := t.given.number(name)) is not None:
            return length
    return None


def _set_sizes(t: Translation, bert: bool) -> None:
    layers, hidden = layers_of(t), t.given.number("--hidden-size")
    heads, inner = t.given.number("--num-attention-heads"), t.given.number("--ffn-hidden-size")
    if layers is None:
        t.problems.append("--num-layers is missing")
    t.set("model_options.layers", layers, "--num-layers", "--encoder-num-layers")
    t.set("model_options.hidden", hidden, "--hidden-size")
    t.set("model_options.heads", heads, "--num-attention-heads")
    if hidden is None or heads is None:
        return
    if inner is None:
        swiglu = t.given.on("--swiglu")
        inner = int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden
        note = "8/3 of --hidden-size, in 64s" if swiglu else "4 x --hidden-size"
    else:
        note = ""
    if not bert:
        t.set("model_options.inner", inner, "--ffn-hidden-size", note=note)
    elif inner == 4 * hidden:
        t.ignore("is so by default", "--ffn-hidden-size")
    size = t.given.number("--kv-channels")
    if heads < 1 or (size is None and hidden % heads):
        t.problems.append(f"--num-attention-heads {heads} does not divide --hidden-size {hidden}")
    elif size is not None and size * heads != hidden:
        t.set("model_options.head_dim", size, "--kv-channels")
    else:
        t.ignore("is so by default", "--kv-channels")


def _set_vocabulary(t: Translation, bert: bool) -> None:
    padded, words = t.given.number("--padded-vocab-size"), t.given.number("--vocab-size")
    kind = t.given.text("--tokenizer-type") or ("BertWordPieceLowerCase" if bert else "GPT2BPETokenizer")
    if padded is not None:
        t.set("model_options.vocabulary", padded, "--padded-vocab-size")
        t.set("model_options.vocabulary_multiple", 1, "--padded-vocab-size", note="padded already")
        t.ignore(
            "--padded-vocab-size says all",
            "--vocab-size",
            "--tokenizer-type",
            "--make-vocab-size-divisible-by",
        )
        return
    if words is not None:
        t.set("model_options.vocabulary", words, "--vocab-size", "--tokenizer-type")
        if kind == "NullTokenizer":
            t.remarks.append("older versions add a word to the --vocab-size of a NullTokenizer")
    elif kind in _WORDS:
        t.set("model_options.vocabulary", _WORDS[kind], "--tokenizer-type", note=f"words of {kind}")
        if bert:
            t.remarks.append(
                f"the words of --vocab-file are taken for {kind}'s {_WORDS[kind]}; --vocab-size says others"
            )
    elif kind == "TikTokenizer":
        t.set("model_options.vocabulary", _TIKTOKEN_WORDS, "--tokenizer-type")
    else:
        t.ignore("the number of its words is missing", "--tokenizer-type")
        t.problems.append(f"how many words the {kind} has is not said; add --vocab-size N")
    multiple = "--make-vocab-size-divisible-by"
    t.set("model_options.vocabulary_multiple", t.given.number(multiple), multiple)


def _set_library(t: Translation) -> bool:
    """Set whose layers there are; returns whether they are Megatron-Core's own."""
    spec, library = t.given.text("--spec"), t.given.text("--transformer-impl")
    local = library == "local" or spec == "local"
    if spec is not None and spec != "local":
        t.refuse("layers of another specification than `local`", "--spec")
    if library == "inference_optimized":
        t.refuse("layers for inference", "--transformer-impl")
    names = ("--spec",) if spec == "local" else ("--transformer-impl",)
    t.set("model_options.library", "megatron-local" if local else "transformer-engine", *names)
    if spec == "local":
        t.ignore("--spec says the layers", "--transformer-impl")
    return local


def _set_bert(t: Translation, local: bool) -> None:
    dropout = t.given.share("--hidden-dropout")
    t.set("model_options.dropout", dropout, "--hidden-dropout", "--attention-dropout")
    if t.given.share("--attention-dropout") != dropout:
        t.refuse("a BertModel with another dropout of attention than of hidden states", "--attention-dropout")
    if t.given.number("--max-position-embeddings") != length_of(t):
        t.set(
            "model_options.max_positions",
            t.given.number("--max-position-embeddings"),
            "--max-position-embeddings",
        )
    else:
        t.ignore("as many as --seq-length", "--max-position-embeddings")
    kernel = t.given.text("--attention-backend")
    if kernel in ("unfused", "local") or local:
        t.ignore("the only attention that a BertModel has here", "--attention-backend")
    else:
        t.refuse("a BertModel whose attention is fused; --attention-backend unfused", "--attention-backend")
        if not t.given.on("--attention-backend"):
            t.problems.append("a BertModel's attention is unfused alone here; --attention-backend unfused")
    t.ignore("BertModel makes its own masks", "--no-create-attention-mask-in-dataloader")
    for name in ignore_absent_fusions(t, local):
        t.refuse("a BertModel without a single fusion", name)
    if t.given.on("--bert-no-binary-head"):
        t.set("model_options.binary_head", False, "--bert-no-binary-head")
    core = "of Megatron-Core's BertModel"
    t.set("model_options.pre_norm", True, note=f"norms before each half of a layer, {core}")
    t.set("model_options.embedding_norm", False, note=f"none after the embedding, {core}")
    if local:
        t.set("model_options.mask_shape", "square", note=f"queries and keys, {core}")
    elif runs_before(t, MASK_OF_KEYS):
        t.set("model_options.mask_shape", "square", CONTAINER, note=f"queries and keys, {core}")
    else:
        t.set("model_options.mask_shape", "by_layer", note="TransformerEngine's, of the keys' mask")


def _set_layers(t: Translation) -> None:
    g = t.given
    norm = g.text("--normalization")
    t.set("model_options.norm", "rms" if norm == "RMSNorm" else "layer", "--normalization")
    t.set("model_options.norm_epsilon", g.share("--norm-epsilon"), "--norm-epsilon")
    activations = [name for name in ("--swiglu", "--squared-relu") if g.on(name)]
    if len(activations) > 1:
        t.problems.append(f"{' and '.join(activations)} are both given; leave one")
    mlp = activations[0].removeprefix("--").replace("-", "_") if activations else "gelu"
    t.set("model_options.mlp", mlp, *activations)
    biases = not g.on("--disable-bias-linear")
    t.set("model_options.biases", biases, "--disable-bias-linear")
    if biases:
        t.ignore("all linear layers have one", "--add-qkv-bias")
    elif g.on("--add-qkv-bias"):
        t.set("model_options.qkv_bias", True, "--add-qkv-bias")
    untied = "--untie-embeddings-and-output-weights"
    t.set("model_options.tied", not g.on(untied), untied)
    t.set("model_options.dropout", g.share("--hidden-dropout"), "--hidden-dropout")


def _set_positions(t: Translation) -> None:
    g, kind = t.given, t.given.text("--position-embedding-type")
    names = "--position-embedding-type", "--use-rotary-position-embeddings"
    if rotary(t):
        t.set("model_options.position", "rotary", *names)
        t.set("model_options.rotary_base", g.share("--rotary-base"), "--rotary-base")
        t.set("model_options.rotary_share", g.share("--rotary-percent"), "--rotary-percent")
        t.ignore("the table is as long as the sequence", "--max-position-embeddings")
        return
    t.ignore("there is no RoPE", "--rotary-base", "--rotary-percent")
    if kind == "learned_absolute":
        t.set("model_options.position", "learned", *names)
        positions = "--max-position-embeddings"
        t.set("model_options.max_positions", g.number(positions), positions)
    elif kind == "none":
        t.set("model_options.position", "none", *names)
        t.ignore("there are no positions", "--max-position-embeddings")
    else:
        t.refuse(f"positions of the kind {kind}", *names)
        t.ignore(f"positions are of the kind {kind}", "--max-position-embeddings")


def _set_loss(t: Translation, cluster: str | None) -> None:
    fused, how = "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"
    if not t.given.on(fused):
        t.ignore(f"without {fused} there is none", how)
        t.set("model_options.cross_entropy", "fused", fused, note="one float32 copy of the logits")
    elif t.given.text(how) == "te":
        t.set("model_options.cross_entropy", "in_place", fused, how)
        t.remarks.append(
            f"{how} te with {fused} runs in older versions alone; this one refuses both together"
        )
    else:
        t.set("model_options.cross_entropy", "native", fused, how)
        set_autotuning(t, cluster)


def _set_recomputation(t: Translation) -> None:
    g = t.given
    how, method, number = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
    granularity = "selective" if g.on("--recompute-activations") else g.text(how)
    modules = (g.text("--recompute-modules") or "core_attn").split()
    if granularity is None:
        t.ignore("nothing is recomputed", method, number, "--recompute-modules")
        return
    t.set("model_options.recompute", granularity, how, "--recompute-activations")
    if granularity == "selective":
        t.ignore("selective recomputation is of modules", method, number)
        t.ignore("is so by default", "--recompute-modules")
        if modules != ["core_attn"]:
            t.refuse("recomputation of other modules than core_attn", "--recompute-modules")
        return
    t.ignore("full recomputation is of layers", "--recompute-modules")
    if (kind := g.text(method)) is None or g.number(number) is None:
        t.problems.append(f"{how} full needs {method} and {number}")
        return
    t.set("model_options.recompute_method", kind, method)
    t.set("model_options.recompute_layers", g.number(number), number)
