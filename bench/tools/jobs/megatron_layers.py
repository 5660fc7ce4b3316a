"""Which layers a Megatron-LM job has: those that a hybrid mixes tokens in by Mamba-2 or by attention, those
with experts, and those whose attention has a window.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.rules import call

_PATTERN, _OLD, _SWITCH = "--hybrid-layer-pattern", "--hybrid-override-pattern", "--is-hybrid-model"
_SIZES = ("--mamba-num-groups", "--mamba-state-dim", "--mamba-head-dim", "--mamba-num-heads")
#: by letter of Megatron-Core: what mixes the tokens, as a pattern here has it
_MIXERS = {"M": "M", "*": "S"}
#: a layer here: one that mixes tokens, and the MLP (-) or the experts (E) behind it
_LAYER = re.compile(r"[M*][-E]?")
_EXPERTS = "--num-experts"
#: sizes of a layer's experts by the ranks of a stage
EXPERT_RANKS, EXPERT_PARTS = "--expert-model-parallel-size", "--expert-tensor-parallel-size"
#: a pattern of layers: digits, lists of them, sums and repetitions
_LISTED = re.compile(r"[\d\s()\[\],+*]+")
_MOST_LAYERS = 10_000
_WINDOW, _EACH = "--window-size", "--window-attn-skip-freq"


def pattern_of(a: Account) -> str:
    """The job's pattern of layers; "" where it is no hybrid."""
    return str(a.value(_PATTERN) or a.value(_OLD) or "")


def layers_of_stages(a: Account) -> list[int]:
    """Layers, as a model here counts them, of each part of the pattern between bars."""
    return [len(_LAYER.findall(part)) for part in pattern_of(a).split("|")]


def set_hybrid(a: Account) -> bool:
    """Set the layers of a hybrid; returns whether the job is one."""
    pattern = pattern_of(a)
    if not pattern:
        if a.has(_SWITCH):
            a.problems.append(f"{_SWITCH} needs {_PATTERN}")
            a.took("see what is wrong", _SWITCH)
        a.ignore("of a hybrid, which the job is not", *_SIZES)
        return False
    name = _PATTERN if a.has(_PATTERN) else _OLD
    a.took("as the pattern says", _SWITCH, "--spec")
    parts = pattern.split("|")
    if a.has(_PATTERN) and a.has(_OLD):
        a.problems.append(f"{_PATTERN} and {_OLD} are both given; leave one")
    if others := set(pattern) - {*"M*-E|"}:
        a.refuse_given(f"layers {' '.join(sorted(others))} of a hybrid: not modelled", name)
    elif not all(re.fullmatch(f"({_LAYER.pattern})*", part) for part in parts):
        a.refuse_given("an MLP (-) or experts (E) behind no layer that mixes tokens: not modelled", name)
    elif not {*"-E"} & {*pattern}:
        a.refuse_given("layers without an MLP alone: not modelled", name)
    letters = len(pattern) - pattern.count("|")
    if a.value("--num-layers") not in (None, letters):
        a.refuse_given(f"not the {letters} layers of {name}", "--num-layers")
    a.ignore(f"as many as {name} has", "--num-layers")
    ours = "".join(_MIXERS.get(letter, letter) for letter in pattern if letter != "|")
    a.set("model_options.pattern", ours, name)
    call(a, "states")
    return True


def stages_of(a: Account, stages: int) -> Sequence[int]:
    """Layers of each run of layers of a hybrid's pipeline; empty, with a problem, where the bars of its
    pattern do not say them."""
    sizes = layers_of_stages(a)
    if len(sizes) % stages:
        a.problems.append(
            f"a hybrid's pattern of {len(sizes)} parts is for no --pipeline-model-parallel-size {stages}; "
            "set | between the stages"
        )
        return []
    return sizes


def has_experts(a: Account) -> bool:
    """Whether the job's model has experts."""
    return bool(a.value(_EXPERTS))


def set_layers_with_experts(a: Account) -> None:
    """Set which layers have experts: each N-th, or as a list of 0 and 1 says."""
    name, layers = "--moe-layer-freq", a.facts["layers"]
    text = str(a.value(name)).strip()
    if text.isdecimal() and int(text) > 0:
        if (each := int(text)) > 1:
            a.set("model_options.expert_pattern", [1, *[0] * (each - 1)], name)
        a.ignore("all layers have experts", name)
        return
    pattern = pattern_in(text)
    if not pattern or not {*pattern} <= {0, 1} or (layers is not None and len(pattern) != layers):
        a.problems.append(f"{a.spelled(name)} is neither a number nor a list of 0 and 1 for {layers} layers")
        return
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if all(pattern[dense:]):
        a.set("model_options.dense_layers", dense, name)
    else:
        a.set("model_options.expert_pattern", pattern, name)


def pattern_in(text: str) -> list[int]:
    """The list that an expression such as ([0]*1+[1]*15)*2 is; empty where it is none."""
    if not _LISTED.fullmatch(text):
        return []
    try:
        value = _evaluated(ast.parse(text, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return value if isinstance(value, list) else []


def _evaluated(node: ast.expr) -> list[int] | int:
    """The value of a list, a number, a sum of lists, or a list times a number; ValueError for another."""
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


def expert_sizes(a: Account, tensor: int, gpus: int | None, stages: int) -> None:
    """Set over how many ranks of a stage experts are spread, and each of them split."""
    if not has_experts(a):
        return
    ranks, parts = a.value(EXPERT_RANKS) or 1, a.value(EXPERT_PARTS) or tensor
    if gpus is not None and gpus % (ranks * parts * stages):
        a.problems.append(
            f"{gpus} GPUs are no multiple of expert x expert tensor x pipeline parallel sizes, which are "
            f"{ranks * parts * stages}"
        )
        return
    if ranks > 1:
        a.set("sizes.ep", ranks, EXPERT_RANKS)
    if parts > 1:
        note = "" if a.has(EXPERT_PARTS) else "as the tensor parallel size"
        a.set("sizes.etp", parts, EXPERT_PARTS, note=note)
    a.ignore("one part: not split", EXPERT_RANKS, EXPERT_PARTS)


def windows_of(a: Account, layers: int | None) -> str:
    """The pattern of layers in a window (W) and without one (S); "" where all layers are alike."""
    if not a.has(_WINDOW) or not a.has(_EACH):
        return ""
    text = str(a.value(_EACH)).strip()
    if text.isdecimal() and 0 < int(text) <= (layers or 1):
        return "W" * (int(text) - 1) + "S"
    listed = pattern_in(text)
    if not listed or len(listed) != layers:
        a.problems.append(f"{a.spelled(_EACH)} is neither a number of layers nor a list for {layers} layers")
    return "".join("W" if each else "S" for each in listed)


def set_windows(a: Account, pattern: str) -> None:
    """Set the window of attention, and which layers have it."""
    text = str(a.value(_WINDOW) or "").strip("() ")
    sides = re.fullmatch(r"(\d{1,9})[, ]+0", text)
    a.ignore(f"there is no {_WINDOW}", _EACH)
    if not a.has(_WINDOW):
        return
    if sides is None:
        a.refuse_given("a window that is not N,0 (N positions before each): not modelled", _WINDOW)
        return
    if pattern and "W" not in pattern:
        a.ignore("no layer has a window", _WINDOW, _EACH)
        return
    a.set("model_options.window", int(sides[1]) + 1, _WINDOW, note="with the position itself")
    if pattern:
        a.set("model_options.pattern", pattern, _EACH, note="W: a layer in the window")
        if not a.has("--group-query-attention"):
            a.set("model_options.kv_heads", a.value("--num-attention-heads"), "--num-attention-heads")
