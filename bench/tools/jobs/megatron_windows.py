"""What gpt-oss's layers have in a Megatron-LM job: windows of attention, a sink in its softmax, and a clamped
gate."""

from __future__ import annotations

import re

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.megatron_experts import pattern_in

_WINDOW, _EACH = "--window-size", "--window-attn-skip-freq"
_SINK, _GATE = "--softmax-type", "--quick-geglu"
#: what gpt-oss adds to the second factor of its gate, and where it clamps both
_OFFSET, _CLAMP = ("--glu-linear-offset", 1.0), ("--activation-func-clamp-value", 7.0)


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


def set_sink(a: Account) -> None:
    """Set whether the softmax of attention has a learned sink."""
    kind = a.value(_SINK)
    if kind == "learnable":
        a.set("model_options.sinks", True, _SINK)
    elif kind != "vanilla":
        a.refuse_given("a softmax with a sink that is not learned: not modelled", _SINK)


def set_gate(a: Account) -> None:
    """Set gpt-oss's gate as the activation of the MLP."""
    values = {name: a.value(name) for name, _ in (_OFFSET, _CLAMP)}
    if values == dict((_OFFSET, _CLAMP)):
        a.set("model_options.mlp", "clamped_swiglu", _GATE, *values)
        a.leave("time and memory", "the gate is counted operator by operator, in one kernel there", _GATE)
        return
    a.refuse_given(
        f"a quick GELU that is not gpt-oss's ({_OFFSET[0]} 1.0, {_CLAMP[0]} 7.0): not modelled", _GATE
    )
    a.took("see the gate", *values)
