"""Imported by the server that workers are forked from, in place of all that cells need."""

import sys
from contextlib import nullcontext
from types import ModuleType

sys.modules["torch"] = torch = ModuleType("torch")
torch.set_num_threads = lambda number: None  # type: ignore[attr-defined]
sys.modules["spbench.bench.measure.engines.traces"] = cache = ModuleType("trace_cache")
cache.keeping_traces = nullcontext  # type: ignore[attr-defined]
