"""Muon of a Megatron-LM job, from the arguments."""

from __future__ import annotations

from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.megatron_hybrid import pattern_of

_STEPS, _PARTS, _LAYOUT = "--muon-num-ns-steps", "--muon-tp-mode", "--no-use-layer-wise-param-layout"
_WHOLE, _NESTEROV, _HALVES = "--muon-no-split-qkv", "--muon-nesterov", "--muon-use-syrk"
_PRECISION, _OTHERS = "--muon-fp32-matmul-prec", "--muon-scalar-optimizer"
_SHARDS = "--use-distributed-optimizer"


def set_muon(a: Account) -> bool:
    """Set the optimizer's update; returns whether it is Muon's."""
    kind = a.value("--optimizer")
    if kind not in ("muon", "dist_muon"):
        if kind != "adam":
            a.refuse_given("another optimizer than Adam and Muon", "--optimizer")
        a.ignore("Adam is what there is by default", "--optimizer")
        names = _STEPS, _PARTS, _LAYOUT, _WHOLE, _NESTEROV, _HALVES, _PRECISION, _OTHERS
        a.ignore("of Muon, which the job has not", *names)
        return False
    if pattern_of(a):
        a.refuse_given("Muon for a hybrid, whose projections of Mamba it leaves out", "--optimizer")
    a.set("training.update", "muon", "--optimizer")
    if a.value(_PARTS) == "distributed":
        a.refuse_given("Newton-Schulz steps whose matmuls are spread over tensor parallel ranks", _PARTS)
    elif a.has(_PARTS):
        a.map(_PARTS)
    a.map_given(_STEPS)
    if kind == "dist_muon" and not a.has(_SHARDS):
        a.set("training.distributed_optimizer", True, "--optimizer")
    if kind == "dist_muon" or a.has(_SHARDS):
        a.map_given(_LAYOUT)
    a.ignore(f"of {_SHARDS}", _LAYOUT)
    if a.value(_OTHERS) != "adam":
        a.refuse_given("another optimizer than Adam beside Muon", _OTHERS)
    a.ignore("Adam is what there is beside Muon", _OTHERS)
    a.took("a weight is orthogonalised whole", _WHOLE)
    if not a.has(_WHOLE):
        a.remarks.append("Muon takes queries', keys' and values' rows of one weight together, not apart")
    a.leave("memory", "one more tensor of a matrix at a time", _NESTEROV)
    a.leave("time", "matmuls of symmetric matrices are halved", _HALVES)
    if a.value(_PRECISION) != "medium":
        a.leave("time", "Newton-Schulz steps are not in bfloat16", _PRECISION)
    a.ignore("Newton-Schulz steps are in bfloat16", _PRECISION)
    return True
