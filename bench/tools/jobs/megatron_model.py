"""The model of a Megatron-LM job: its GPTModel or BertModel, from the arguments."""

from __future__ import annotations

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.megatron_experts import (
    set_experts,
    set_gate,
    set_latent_attention,
    set_predicted_tokens,
    set_sink,
    set_windows,
    windows_of,
)
from spbench.bench.tools.jobs.megatron_hybrid import SPECIFICATION, layers_of_stages, pattern_of, set_hybrid
from spbench.bench.tools.jobs.megatron_kernels import (
    CONTAINER,
    MASK_OF_KEYS,
    ignore_absent_fusions,
    rotary,
    runs_before,
    set_attention,
    set_autotuning,
    set_state_processors,
)
from spbench.impls import published_model

#: words of tokenizers that need no file to be known: GPT-2's, and BERT's two
_WORDS = {"GPT2BPETokenizer": 50257, "BertWordPieceLowerCase": 30522, "BertWordPieceCase": 28996}
#: of TikTokenizer, unless --vocab-size says otherwise
_TIKTOKEN_WORDS = 2**17
#: presets by the weights of their layers; a job has the name of the one that it is closest to
_HYBRID = "nemotron-h-8b"
_PRESETS = {"gpt3-345m": 3e8, "gpt3-7b": 6.4e9, "gpt3-175b": 1.7e11}


def set_model(a: Account, *, bert: bool, cluster: str | None) -> None:
    """Set the model and its options."""
    hybrid = not bert and set_hybrid(a)
    windows = "" if hybrid or bert else windows_of(a, layers_of(a))
    preset = "bert-large" if bert else _HYBRID if hybrid or windows else _preset(a)
    name = "HybridModel" if hybrid else model_name(bert)
    a.set("model", preset, note=f"{name}, all of whose sizes are below")
    needed = ("--hidden-size", "--num-attention-heads", "--max-position-embeddings", "--micro-batch-size")
    a.problems += [f"{name} is missing" for name in needed if not a.has(name)]
    if not bert:
        set_experts(a, layers_of(a))
        set_predicted_tokens(a)
    _set_sizes(a, bert)
    _set_vocabulary(a, bert)
    local = _set_library(a)
    if bert:
        _set_bert(a, local)
        return
    a.ignore("of a BertModel", "--bert-no-binary-head")
    _set_layers(a)
    _set_positions(a)
    set_windows(a, windows)
    set_sink(a)
    set_attention(a, local, cluster)
    set_state_processors(a, cluster)
    _set_loss(a, cluster)
    _set_recomputation(a)


def model_name(bert: bool) -> str:
    """Megatron-Core's name of the model."""
    return "BertModel" if bert else "GPTModel"


def _preset(a: Account) -> str:
    weights = 12 * (layers_of(a) or 1) * (a.value("--hidden-size") or 1) ** 2
    return min(_PRESETS, key=lambda name: max(weights / _PRESETS[name], _PRESETS[name] / max(1, weights)))


def layers_of(a: Account) -> int | None:
    """How many layers there are, as a model here counts them."""
    if pattern_of(a):
        return sum(layers_of_stages(a))
    return _first(a, "--num-layers", "--encoder-num-layers")


def length_of(a: Account) -> int | None:
    """Tokens of a sequence."""
    return _first(a, "--seq-length", "--encoder-seq-length")


def _first(a: Account, *names: str) -> int | None:
    return next((value for name in names if (value := a.value(name)) is not None), None)


def _set_sizes(a: Account, bert: bool) -> None:
    layers, hidden = layers_of(a), a.value("--hidden-size")
    heads, inner = a.value("--num-attention-heads"), a.value("--ffn-hidden-size")
    if layers is None:
        a.problems.append("--num-layers is missing")
    patterns = "--hybrid-layer-pattern", "--hybrid-override-pattern"
    names = patterns if pattern_of(a) else ("--num-layers", "--encoder-num-layers")
    a.set("model_options.layers", layers, *names)
    a.map("--hidden-size", "--num-attention-heads")
    if hidden is None or heads is None:
        return
    note = ""
    if inner is None:
        swiglu = a.has("--swiglu")
        inner = int(4 * hidden * 2 / 3) // 64 * 64 if swiglu else 4 * hidden
        note = "8/3 of --hidden-size, in 64s" if swiglu else "4 x --hidden-size"
    if not bert:
        a.set("model_options.inner", inner, "--ffn-hidden-size", note=note)
    elif inner == 4 * hidden:
        a.ignore("is so by default", "--ffn-hidden-size")
    if set_latent_attention(a):
        return
    size = a.value("--kv-channels")
    if heads < 1 or (size is None and hidden % heads):
        a.problems.append(f"--num-attention-heads {heads} does not divide --hidden-size {hidden}")
    elif size is not None and size * heads != hidden:
        a.map("--kv-channels")
    else:
        a.ignore("is so by default", "--kv-channels")


def _set_vocabulary(a: Account, bert: bool) -> None:
    multiple = "--make-vocab-size-divisible-by"
    a.ignore("the number of its words comes from elsewhere", "--tokenizer-model")
    padded, words = a.value("--padded-vocab-size"), a.value("--vocab-size")
    kind = a.value("--tokenizer-type") or ("BertWordPieceLowerCase" if bert else "GPT2BPETokenizer")
    if padded is not None:
        a.set("model_options.vocabulary", padded, "--padded-vocab-size")
        a.set("model_options.vocabulary_multiple", 1, "--padded-vocab-size", note="padded already")
        a.ignore("--padded-vocab-size says all", "--vocab-size", "--tokenizer-type", multiple)
        return
    if words is not None:
        a.set("model_options.vocabulary", words, "--vocab-size", "--tokenizer-type")
        if kind == "NullTokenizer":
            a.remarks.append("older versions add a word to the --vocab-size of a NullTokenizer")
    elif kind in _WORDS:
        a.set("model_options.vocabulary", _WORDS[kind], "--tokenizer-type", note=f"words of {kind}")
        if bert:
            a.remarks.append(
                f"the words of --vocab-file are taken for {kind}'s {_WORDS[kind]}; --vocab-size says others"
            )
    elif published := published_model(str(a.value("--tokenizer-model") or "")):
        names = "--tokenizer-type", "--tokenizer-model"
        a.set("model_options.vocabulary", published.config["vocab_size"], *names, note="of its config.json")
    elif kind == "TikTokenizer":
        a.set("model_options.vocabulary", _TIKTOKEN_WORDS, "--tokenizer-type")
    else:
        a.ignore("the number of its words is missing", "--tokenizer-type")
        a.problems.append(f"how many words the {kind} has is not said; --given vocab-size=N")
    a.map(multiple)


def _set_library(a: Account) -> bool:
    """Set whose layers there are; returns whether they are Megatron-Core's own."""
    spec, library = a.value("--spec"), a.value("--transformer-impl")
    local = library == "local" or spec == "local"
    if spec is not None and spec not in ("local", SPECIFICATION if pattern_of(a) else ""):
        a.refuse_given("layers of another specification than `local`", "--spec")
    if library == "inference_optimized":
        a.refuse_given("layers for inference", "--transformer-impl")
    names = ("--spec",) if spec == "local" else ("--transformer-impl",)
    a.set("model_options.library", "megatron-local" if local else "transformer-engine", *names)
    if spec == "local":
        a.ignore("--spec says the layers", "--transformer-impl")
    return local


def _set_bert(a: Account, local: bool) -> None:
    dropout, positions = a.value("--hidden-dropout"), "--max-position-embeddings"
    a.set("model_options.dropout", dropout, "--hidden-dropout", "--attention-dropout")
    if a.value("--attention-dropout") != dropout:
        a.refuse_given(
            "a BertModel with another dropout of attention than of hidden states", "--attention-dropout"
        )
    if a.value(positions) != length_of(a):
        a.set("model_options.max_positions", a.value(positions), positions)
    else:
        a.ignore("as many as --seq-length", positions)
    kernel = a.value("--attention-backend")
    if kernel in ("unfused", "local") or local:
        a.ignore("the only attention that a BertModel has here", "--attention-backend")
    else:
        a.refuse_given(
            "a BertModel whose attention is fused; --attention-backend unfused", "--attention-backend"
        )
        if not a.has("--attention-backend"):
            a.problems.append("a BertModel's attention is unfused alone here; --attention-backend unfused")
    a.ignore("BertModel makes its own masks", "--no-create-attention-mask-in-dataloader")
    for name in ignore_absent_fusions(a, local):
        a.refuse_given("a BertModel without a single fusion", name)
    if a.has("--bert-no-binary-head"):
        a.set("model_options.binary_head", False, "--bert-no-binary-head")
    core = "of Megatron-Core's BertModel"
    a.set("model_options.pre_norm", True, note=f"norms before each half of a layer, {core}")
    a.set("model_options.embedding_norm", False, note=f"none after the embedding, {core}")
    shape, note = "square", f"queries and keys, {core}"
    if not local and not runs_before(a, MASK_OF_KEYS):
        shape, note = "by_layer", "TransformerEngine's, of the keys' mask"
    names = [CONTAINER] if not local and shape == "square" else []
    a.set("model_options.mask_shape", shape, *names, note=note)


def _set_layers(a: Account) -> None:
    a.map("--normalization", "--norm-epsilon")
    activations = [name for name in ("--swiglu", "--squared-relu", "--quick-geglu") if a.has(name)]
    if len(activations) > 1:
        a.problems.append(f"{' and '.join(activations)} are both given; leave one")
        a.took("see what is wrong", *activations)
    if "--quick-geglu" in activations:
        set_gate(a)
    else:
        mlp = activations[0].removeprefix("--").replace("-", "_") if activations else "gelu"
        a.set("model_options.mlp", mlp, *activations)
    a.map("--disable-bias-linear")
    if a.has("--disable-bias-linear"):
        a.map_given("--add-qkv-bias")
    a.ignore("all linear layers have one", "--add-qkv-bias")
    a.map("--untie-embeddings-and-output-weights", "--hidden-dropout")


def _set_positions(a: Account) -> None:
    option, kind = "model_options.position", a.value("--position-embedding-type")
    names = "--position-embedding-type", "--use-rotary-position-embeddings"
    rows, base = "--max-position-embeddings", "--rotary-base"
    if rotary(a):
        a.set(option, "rotary", *names)
        a.set("model_options.rotary_base", float(a.value(base)), base)
        a.map("--rotary-percent")
        a.ignore("the table is as long as the sequence", rows)
        return
    a.ignore("there is no RoPE", base, "--rotary-percent")
    if kind == "learned_absolute":
        a.set(option, "learned", *names)
        a.set("model_options.max_positions", a.value(rows), rows)
    elif kind == "none":
        a.set(option, "none", *names)
        a.ignore("there are no positions", rows)
    else:
        a.refuse_given(f"positions of the kind {kind}", *names)
        a.ignore(f"the kind of positions is {kind}", rows)


def _set_loss(a: Account, cluster: str | None) -> None:
    fused, how = "--cross-entropy-loss-fusion", "--cross-entropy-fusion-impl"
    if not a.has(fused):
        a.ignore(f"without {fused} there is none", how)
        a.set("model_options.cross_entropy", "fused", fused, note="one float32 copy of the logits")
    elif a.value(how) == "te":
        a.set("model_options.cross_entropy", "in_place", fused, how)
        a.remarks.append(
            f"{how} te with {fused} runs in older versions alone; this one refuses both together"
        )
    else:
        a.set("model_options.cross_entropy", "native", fused, how)
        set_autotuning(a, cluster)


def _set_recomputation(a: Account) -> None:
    how, method, number = "--recompute-granularity", "--recompute-method", "--recompute-num-layers"
    names = "--recompute-modules", "--moe-layer-recompute"
    granularity = "selective" if a.has("--recompute-activations") else a.value(how)
    modules = (a.value(names[0]) or "core_attn").split()
    if granularity is None and a.has(names[1]):
        granularity, modules = "selective", ["moe"]
    if granularity is None or (granularity == "full" and a.value(number) == 0):
        a.ignore("nothing is recomputed", how, method, number, *names)
        return
    a.set("model_options.recompute", granularity, how, "--recompute-activations")
    if granularity == "selective":
        a.ignore("selective recomputation names modules", method, number)
        if modules != ["core_attn"]:
            a.set("model_options.recompute_modules", modules, *names)
        a.ignore("is so by default", *names)
        return
    a.ignore("full recomputation keeps no parts of layers", *names)
    if a.value(method) is None or a.value(number) is None:
        a.problems.append(f"{how} full needs {method} and {number}")
        return
    a.map(method, number)
