"""Data-parallel backends: where gradients and optimizer state are held, and how ranks sum and share them."""

from __future__ import annotations

from spbench.impls.backends.backend import Backend
from spbench.impls.backends.ddp import DistributedDataParallel
from spbench.impls.backends.fsdp_flat import FlatFullySharded
from spbench.impls.backends.fully_shard import FullySharded, KeptAfterForward
from spbench.impls.backends.legacy_ddp import LegacyDistributedDataParallel
from spbench.impls.backends.zero1 import ShardedOptimizer

__all__ = ["BACKENDS", "Backend"]

BACKENDS: dict[str, type[Backend]] = {
    cls.name: cls
    for cls in (
        LegacyDistributedDataParallel,
        DistributedDataParallel,
        ShardedOptimizer,
        KeptAfterForward,
        FullySharded,
        FlatFullySharded,
    )
}
