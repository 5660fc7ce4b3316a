"""Imported by the server that workers are forked from, in place of all that cells need."""

import sys
from types import ModuleType

sys.modules["torch"] = torch = ModuleType("torch")
torch.set_num_threads = lambda number: None  # type: ignore[attr-defined]
sys.modules["spbench.bench.measure.engines.traces"] = cache = ModuleType("trace_cache")
cache.use = lambda: None  # type: ignore[attr-defined]
