"""The peers' rings with their faults in float32 mended.

In float32 the packages ring-flash-attn and yunchang, as published, give wrong gradients:
``buffer.to(torch.float32)`` is then the buffer itself, which the next block overwrites while the sum that it
has become travels on; and the contiguous ring returns its gradient of q in bfloat16. A mended copy of such a
module differs from the published text in these two expressions only (:data:`MENDS`).
"""

import importlib.util
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any

from spbench.impls.peers.ring_flash_attn import RingFlashAttention
from spbench.impls.peers.yunchang import YunchangRing, YunchangUSP

#: what is replaced in the text of a peer's module, and by what
MENDS = ((".to(torch.float32)", ".to(torch.float32, copy=True)"), ("dq.to(torch.bfloat16)", "dq.to(q.dtype)"))


@cache
def _module(name: str) -> ModuleType:
    """The module ``name`` made again from its text after MENDS."""
    spec = importlib.util.find_spec(name)
    assert spec.origin is not None
    module = importlib.util.module_from_spec(spec)
    with open(spec.origin) as file:
        source = file.read()
    for published, replacement in MENDS:
        source = source.replace(published, replacement)
    exec(compile(source, f"{spec.origin} (mended)", "exec"), module.__dict__)
    return module


def _function(path: str) -> Callable[..., Any]:
    """The function at "module:name" of the mended copy."""
    module, _, name = path.partition(":")
    return getattr(_module(module), name)


class MendedRingFlashAttention(RingFlashAttention):
    def load(self) -> None:
        self._functions = {placement: _function(path) for placement, path in self.functions.items()}


class MendedYunchangRing(YunchangRing):
    def load(self) -> None:
        self._functions = {placement: _function(path) for placement, path in self.functions.items()}


class MendedYunchangUSP(YunchangUSP):
    def load(self) -> None:
        super().load()
        for placement, layer in self._layers.items():
            layer.ring_attn_fn = _function(YunchangRing.functions[placement])
