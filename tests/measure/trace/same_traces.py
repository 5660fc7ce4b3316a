"""Traces compared field by field."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from spbench.bench.measure.engines.traces import Trace


def differing_fields(ours: Any, theirs: Any) -> list[str]:
    """The fields of two dataclasses of one type that have other values; arrays compared element by element,
    and by their types."""
    found = []
    for field in dataclasses.fields(ours):
        a, b = getattr(ours, field.name), getattr(theirs, field.name)
        if isinstance(a, np.ndarray):
            same = a.dtype == b.dtype and np.array_equal(a, b)
        else:
            same = a == b
        found += [field.name] * (not same)
    return found


def differences(ours: Trace, theirs: Trace) -> Sequence[str]:
    """What is not the same in two traces: fields of the memory logs (the host's as "host_NAME"), counts of
    communication, and fields of the program, if there is one."""
    found = differing_fields(ours.memory, theirs.memory)
    found += [f"host_{name}" for name in differing_fields(ours.host_memory, theirs.host_memory)]
    found += ["counts"] * (ours.communication.counts != theirs.communication.counts)
    if ours.program is None or theirs.program is None:
        return found + ["program"] * (ours.program is not theirs.program)
    return found + differing_fields(ours.program, theirs.program)
