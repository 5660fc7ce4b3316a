"""Shared experts beside the dispatch: which operators their stream has, what waits for what, and that their
time hides behind what is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.simulator.program import COMPUTE_STREAM, KERNEL, RECORD, WAIT, Program
from spbench.impls.kernels.side_stream import SideStream
from spbench.impls.models.model import model_preset

LAYERS = 2
OPTIONS = {
    "layers": LAYERS,
    "hidden": 1024,
    "heads": 8,
    "experts": 16,
    "expert_inner": 1024,
    "shared_inner": 1024,
    "library": "transformer-engine",
    "permutation": "fused",
    "routing": "even",
}


def cell(**options: Any) -> Cell:
    asked = {
        "model": "moe-tiny",
        "model_options": {**OPTIONS, **options},
        "strategy": "single",
        "sizes": {"dp": 4, "ep": 4},
        "batch": 4,
        "seq_len": 8192,
        "precision": "bf16",
        "cluster": "dgx-h100",
        "training": {"backend": "megatron"},
    }
    return Cell.model_validate(asked)


def program(**options: Any) -> Program:
    traced = tracing.trace(cell(**options), events=True).program
    assert traced is not None
    return traced


def kernels(program: Program) -> Counter[tuple[str, tuple[int, ...]]]:
    at = np.flatnonzero(program.kind == KERNEL)
    return Counter((program.names[program.name[i]], tuple(program.shape[i])) for i in at)


def parts(program: Program) -> list[tuple[int, int]]:
    """The first and the last kernel of each part that another stream runs."""
    at = np.flatnonzero((program.kind == KERNEL) & (program.stream != COMPUTE_STREAM))
    begins = [at[0], *(b for a, b in pairwise(at) if (program.stream[a:b] == COMPUTE_STREAM).any())]
    ends = [*(max(at[at < b]) for b in begins[1:]), at[-1]]
    return [*zip(begins, ends, strict=True)]


def waited_for(program: Program) -> list[bool]:
    """Whether the computing stream waits for each part before the next begins."""
    of_parts = parts(program)
    ends = [begin for begin, _ in of_parts[1:]] + [len(program)]
    waits = np.flatnonzero((program.kind == WAIT) & (program.stream == COMPUTE_STREAM))
    partners = program.partner[waits]
    points = (program.kind[partners] == RECORD) & (program.stream[partners] != COMPUTE_STREAM)
    return [
        bool((points & (partners > last) & (waits < end)).any())
        for (_, last), end in zip(of_parts, ends, strict=True)
    ]


def test_the_same_kernels_run_and_the_computing_stream_waits_before_it_needs_them() -> None:
    alone, beside = program(), program(shared_overlap=True)
    assert kernels(beside) == kernels(alone)
    assert not (alone.stream != COMPUTE_STREAM).any()
    # forward and backward of two parts a layer, of which the second is used
    assert waited_for(beside) == [False, True] * 2 * LAYERS
    matmuls = [
        sum("mm" in beside.names[beside.name[i]] for i in range(first, last + 1) if beside.stream[i])
        for first, last in parts(beside)
    ]
    assert matmuls == [1, 1] * LAYERS + [2, 2] * LAYERS


@pytest.mark.parametrize("fault", ["wait", "leave"])
def test_a_stream_that_is_not_waited_for_or_not_left_is_seen(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SideStream, fault, lambda self: None)
    beside = program(shared_overlap=True)
    assert len(parts(beside)) != 4 * LAYERS or waited_for(beside) != [False, True] * 2 * LAYERS


def test_shared_experts_hide_behind_what_is_sent() -> None:
    alone, beside = (run_cell(cell(shared_overlap=each)) for each in (False, True))
    assert alone.step_time_s is not None
    assert beside.step_time_s is not None
    assert beside.step_time_s < 0.99 * alone.step_time_s
    assert beside.communication == alone.communication


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shared_inner": 0}, "set shared_inner"),
        ({"dispatcher": "all_gather"}, "all_to_all, node_deduplicated, hybrid_ep; not all_gather"),
        ({"recompute": "selective", "recompute_modules": ("shared_experts",)}, "out of recompute_modules"),
    ],
)
def test_what_cannot_overlap_is_refused(options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        model_preset("moe-tiny", {**OPTIONS, "shared_overlap": True, **options})
