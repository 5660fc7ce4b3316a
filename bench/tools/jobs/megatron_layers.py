"""The layers of a Megatron-LM job: which layers of a hybrid model are Mamba-2 or attention, which layers have
experts or a window of attention, and how many layers each stage of the pipeline has.
"""

import ast
import re
from collections.abc import Sequence

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.rules import call
from spbench.impls import LARGEST_OF

_PATTERN, _OLD = "--hybrid-layer-pattern", "--hybrid-override-pattern"
#: by Megatron-Core's letter of a Mamba-2 layer or of an attention layer, the letter in our patterns
_MIXERS = {"M": "M", "*": "S"}
#: one layer of our models: a Mamba-2 (M) or attention (*) layer, and the MLP (-) or the experts (E) after it
_LAYER = re.compile(r"[M*][-E]?")
#: a pattern of layers: digits, lists of digits, sums and repetitions
_LISTED = re.compile(r"[\d\s()\[\],+*]+")
_MOST_LAYERS = 10_000
_WINDOW, _EACH = "--window-size", "--window-attn-skip-freq"


def pattern_of(account: Account) -> str:
    """The pattern of a hybrid model's layers, a letter for each; "" if the model is no hybrid."""
    return str(account.value(_PATTERN) or account.value(_OLD) or "")


def layers_of_stages(account: Account) -> list[int]:
    """The number of layers (:data:`_LAYER`) in each part of the hybrid's pattern between bars."""
    return [len(_LAYER.findall(part)) for part in pattern_of(account).split("|")]


def set_hybrid(account: Account) -> bool:
    """Set the layers of a hybrid model; returns whether the job's model is a hybrid."""
    pattern = pattern_of(account)
    account.facts |= {
        "pattern_key": _PATTERN if account.has(_PATTERN) else _OLD,
        "other_layers": " ".join(sorted({*pattern} - {*"M*-E|"})),
        "alone": not all(re.fullmatch(f"({_LAYER.pattern})*", part) for part in pattern.split("|")),
        "letters": len(pattern) - pattern.count("|"),
        "mixers": "".join(_MIXERS.get(letter, letter) for letter in pattern if letter != "|"),
    }
    call(account, "hybrid")
    return bool(pattern)


def set_layers_with_experts(account: Account) -> None:
    """Set which layers have experts: each N-th layer, or the layers with a 1 in a list of 0 and 1."""
    name, layers = "--moe-layer-freq", account.facts["layers"]
    text = str(account.value(name)).strip()
    if text.isdecimal() and int(text) > 0:
        if (each := int(text)) > 1:
            account.set("model_options.expert_pattern", [1, *[0] * (each - 1)], name)
        account.ignore("all layers have experts", name)
        return
    pattern = pattern_in(text)
    if not pattern or not {*pattern} <= {0, 1} or (layers is not None and len(pattern) != layers):
        account.problems.append(
            f"{account.spelled(name)} is neither a number nor a list of 0 and 1 for {layers} layers"
        )
        return
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if all(pattern[dense:]):
        account.set("model_options.dense_layers", dense, name)
    else:
        account.set("model_options.expert_pattern", pattern, name)


def pattern_in(text: str) -> list[int]:
    """The list that an expression such as ([0]*1+[1]*15)*2 evaluates to; empty if the text is no such one."""
    if not _LISTED.fullmatch(text):
        return []
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return value if isinstance(value, list) else []


def _evaluated(node: ast.expr) -> list[int] | int:
    """The value of a list, a number, a sum of lists, or a list times a number; else raises ValueError."""
    if isinstance(node, ast.Constant) and isinstance(node.value, int):
        return node.value
    if isinstance(node, ast.List):
        numbers = [_evaluated(each) for each in node.elts]
        return [number for number in numbers if isinstance(number, int)]
    if not isinstance(node, ast.BinOp):
        raise ValueError("no list")
    left, right = _evaluated(node.left), _evaluated(node.right)
    if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
        return left + right
    if isinstance(node.op, ast.Mult) and isinstance(left, list) != isinstance(right, list):
        listed, times = (left, right) if isinstance(left, list) else (right, left)
        assert isinstance(listed, list)
        assert isinstance(times, int)
        if len(listed) * times <= _MOST_LAYERS:
            return listed * times
    raise ValueError("no list")


def windows_of(account: Account, layers: int | None) -> str:
    """A letter for each layer: W for attention in a window, S without one; "" if all layers are alike."""
    if not account.has(_WINDOW) or not account.has(_EACH):
        return ""
    text = str(account.value(_EACH)).strip()
    if text.isdecimal() and 0 < int(text) <= (layers or 1):
        return "W" * (int(text) - 1) + "S"
    listed = pattern_in(text)
    if not listed or len(listed) != layers:
        account.problems.append(
            f"{account.spelled(_EACH)} is neither a number of layers nor a list for {layers} layers"
        )
    return "".join("W" if each else "S" for each in listed)


def set_windows(account: Account, pattern: str) -> None:
    """Set the window of attention, and the layers with a W in ``pattern``, which have this window."""
    sides = re.fullmatch(r"(\d{1,9})[, ]+0", str(account.value(_WINDOW) or "").strip("() "))
    account.facts |= {"window": int(sides[1]) + 1 if sides else None, "windows": pattern}
    call(account, "windows")


def layers_of(account: Account) -> int | None:
    """The number of layers (of a hybrid's pattern: of :data:`_LAYER`); None if the job does not say it."""
    if pattern_of(account):
        return sum(layers_of_stages(account))
    return _first(account, "--num-layers", "--encoder-num-layers")


def length_of(account: Account) -> int | None:
    """The number of tokens of a sequence; None if the job does not say it."""
    return _first(account, "--seq-length", "--encoder-seq-length")


def _first(account: Account, *names: str) -> int | None:
    return next((value for name in names if (value := account.value(name)) is not None), None)


_PIPELINE_SPLITS = (
    "--decoder-first-pipeline-num-layers",
    "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split",
    "--account-for-loss-in-pipeline-split",
)
_CHUNKS = ("--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank")
_LAYOUT = "--pipeline-model-parallel-layout"
#: the characters of a layout, and the patterns of its repetitions (...)*n and x*n, n below 1000
_LAYOUT_TEXT, _REPEATED = re.compile(r"[EtmL|()*\d]+"), (r"\(([^()]+)\)\*(\d{1,3})", r"([EtmL|])\*(\d{1,3})")


def set_schedule(account: Account) -> None:
    """Set the layers of the pipeline's stages and the schedule by which the stages run micro-batches."""
    stages, layers = account.value("--pipeline-model-parallel-size") or 1, layers_of(account) or 0
    each, virtual = _CHUNKS
    counted = layers + account.has(_PIPELINE_SPLITS[2]) + account.has(_PIPELINE_SPLITS[3])
    chunks, name = account.value(virtual) or 1, virtual
    if (layout := account.value(_LAYOUT)) is not None:
        sizes = _layers_by_layout(account, layout, stages, layers)
        if sizes is None:
            return
        _set_sizes(account, sizes, _LAYOUT)
        _set_interleaving(account, stages, len(sizes) // stages, _LAYOUT)
        return
    if pattern_of(account):
        _set_hybrid_stages(account, stages)
        return
    if (of_each := account.value(each)) is not None:
        name = each
        if account.has(virtual):
            account.problems.append(f"{each} and {virtual} are both given; leave one")
        if of_each < 1 or counted % (stages * of_each):
            account.problems.append(
                f"--num-layers {layers} is no multiple of {stages} stages x {account.spelled(each)}"
            )
            return
        chunks = counted // (stages * of_each)
    if chunks > 1 and stages == 1:
        account.problems.append(f"{account.spelled(name)} needs --pipeline-model-parallel-size of 2 or more")
    parts = stages * max(1, chunks)
    if parts > 1 and parts > min(counted, LARGEST_OF["layers"]):
        account.problems.append(f"{counted} layers are fewer than {parts} stages or parts of these")
        return
    _set_stages(account, layers, stages, max(1, chunks))
    _set_interleaving(account, stages, max(1, chunks), name)


def _set_hybrid_stages(account: Account, stages: int) -> None:
    """Set the layers of a hybrid's stages, between which the hybrid's pattern has bars; a problem if the
    number of its parts is no multiple of ``stages``."""
    for name in (*_CHUNKS, *_PIPELINE_SPLITS):
        account.refuse_given("stages of a hybrid that its pattern does not say: not modelled", name)
    sizes = layers_of_stages(account)
    if len(sizes) % stages:
        parts = f"a hybrid's pattern of {len(sizes)} parts is for no --pipeline-model-parallel-size {stages}"
        account.problems.append(f"{parts}; set | between the stages")
        return
    _set_sizes(account, sizes, _PATTERN, _OLD)
    _set_interleaving(account, stages, len(sizes) // stages, _PATTERN)


def _set_sizes(account: Account, sizes: Sequence[int], *names: str) -> None:
    """Set the number of layers of each stage, which the arguments ``names`` say, unless all have as many."""
    if len({*sizes}) > 1:
        account.set("training.stage_layers", sizes, *names)
    account.ignore("the stages have as many layers anyway", *names)


def _set_interleaving(account: Account, stages: int, chunks: int, name: str) -> None:
    """Set the interleaved schedule, if the argument ``name`` gives each rank several chunks of layers."""
    account.facts |= {"stages": stages, "chunks": chunks, "chunked_by": name}
    call(account, "interleaving")


def _set_stages(account: Account, layers: int, stages: int, chunks: int) -> None:
    """Set the number of layers of each stage by the rules of Megatron-Core's get_num_layers_to_build."""
    first, last = (account.value(name) for name in _PIPELINE_SPLITS[:2])
    embedding, loss = (account.has(name) for name in _PIPELINE_SPLITS[2:])
    if stages == 1:
        account.ignore("there is one stage", *_PIPELINE_SPLITS)
        return
    if (embedding or loss) and (first is not None or last is not None):
        account.problems.append(
            f"{_PIPELINE_SPLITS[2 if embedding else 3]} and a number of layers are both given"
        )
        return
    between = [*range(first is not None, stages - (last is not None))]
    left = layers + embedding + loss - (first or 0) - (last or 0)
    if left < 0 or (left % len(between) if between else left):
        account.problems.append(f"{left} layers cannot be split evenly over {len(between)} stages")
        return
    of_rank = [left // len(between) if between else 0] * stages
    for rank, given in ((0, first), (stages - 1, last)):
        of_rank[rank] = of_rank[rank] if given is None else given
    if any(n % chunks for n in of_rank):
        account.problems.append(f"stages of {of_rank} layers cannot be split into {chunks} parts each")
        return
    sizes = [n // chunks for n in of_rank] * chunks
    sizes[0] -= embedding
    sizes[-1] -= loss
    _set_sizes(account, sizes, *_PIPELINE_SPLITS)


def _layers_by_layout(account: Account, layout: str, stages: int, layers: int) -> list[int] | None:
    """The number of layers of each stage in a layout, by the rules of PipelineParallelLayerLayout of
    Megatron-Core; None, and a problem, if the text is no layout of these stages and layers."""
    others = [name for name in (*_CHUNKS, *_PIPELINE_SPLITS) if account.has(name)]
    if others:
        account.problems.append(f"{_LAYOUT} and {others[0]} are both given; leave one")
        return None
    text = layout.replace(",", "")
    for pattern in _REPEATED if _LAYOUT_TEXT.fullmatch(text) else ():
        text = re.sub(pattern, lambda match: match[1] * int(match[2]), text)
    parts = text.split("|")
    if not re.fullmatch(r"E[t|]*L", text.replace("m", "")):
        account.problems.append(f"{_LAYOUT} {layout!r} is no E, then t and | for layers and stages, then L")
    elif "m" in text and not re.fullmatch(r"[^m]*m+L", parts[-1]):
        account.refuse_given(
            "layers that predict further tokens (m) before the end of the last stage", _LAYOUT
        )
    elif text.count("m") != (account.value("--mtp-num-layers") or 0):
        account.problems.append(f"{_LAYOUT} has {text.count('m')} m, not as many as --mtp-num-layers")
    elif len(parts) % stages or (stages == 1 and len(parts) > 1) or len(parts) > LARGEST_OF["layers"]:
        account.problems.append(
            f"{_LAYOUT} has {len(parts)} stages, which --pipeline-model-parallel-size {stages} cannot have"
        )
    elif text.count("t") != layers:
        account.problems.append(f"{_LAYOUT} has {text.count('t')} layers, not --num-layers {layers}")
    else:
        return [part.count("t") for part in parts]
    account.ignore("it is not right", _LAYOUT)
    return None
