"""What depends on the container of PyTorch that a Megatron-LM job runs in, and on the card."""

from __future__ import annotations

import re

from spbench.bench.errors import UserError
from spbench.bench.measure.clusters.attention_kernels import generation_of
from spbench.bench.measure.clusters.cluster import Device, load_cluster
from spbench.bench.tools.jobs.megatron_translation import Translation

#: the variable that says the release of NVIDIA's container of PyTorch, and which it sets itself: "24.01"
CONTAINER = "NVIDIA_PYTORCH_VERSION"
#: the release with TransformerEngine 1.3: FlashAttention 2 (of 2.4.1 on) also where algorithms must be
#: deterministic (DotProductAttention of its pytorch/attention.py at v1.2 and at v1.3)
DETERMINISTIC_FLASH_ATTENTION = (24, 2)
#: the release with TransformerEngine 1.10, to which a BertModel gives the mask of its keys
#: (bert_model.py of Megatron-Core, _sanity_check_attention_and_get_attn_mask_dimension)
MASK_OF_KEYS = (24, 9)
#: the release with torch 2.12: cuBLAS's workspace on Blackwell is Hopper's
#: (parseChosenWorkspaceSize, changed by pytorch/pytorch#175344)
LARGE_WORKSPACE_ON_BLACKWELL = (26, 4)
#: the releases with torch 2.3, 2.6 and 2.7, as far as they change what torch.compile allocates while it
#: times kernels (:class:`Autotuning`): how many tensors that the last kernel overwrites are copied, where
#: copies are made, and how large the buffer is. The first is known of 24.01 (two) and 24.10 (one) alone
ONE_COPY, COPIES_ON_HOST, FLUSHES_L2 = (24, 3), (24, 11), (25, 3)


def runs_before(t: Translation, release: tuple[int, int]) -> bool:
    """Whether the job's container is said, and older than a release (year, month)."""
    found = _release(t)
    return found is not None and found < release


def runs_since(t: Translation, release: tuple[int, int]) -> bool:
    """Whether the job's container is said, and is a release (year, month) or newer."""
    found = _release(t)
    return found is not None and found >= release


def _release(t: Translation) -> tuple[int, int] | None:
    parts = re.fullmatch(r"(\d\d)\.(\d\d)", t.environment.get(CONTAINER, ""))
    return (int(parts[1]), int(parts[2])) if parts else None


def container_problems(t: Translation) -> list[str]:
    """What is wrong with how the container is said."""
    if CONTAINER not in t.environment or _release(t) is not None:
        return []
    return [f"{t.spelled(CONTAINER)} is no release of NVIDIA's container, such as 25.09"]


def _device(cluster: str | None) -> Device | None:
    try:
        return load_cluster(cluster).device if cluster is not None else None
    except UserError:
        return None  # told with the cell


def card_of(cluster: str | None) -> tuple[str, int]:
    """The name of a cluster's card and its generation; ("", 0) where it is not known."""
    device = _device(cluster)
    return ("", 0) if device is None else (device.name, generation_of(device))


def set_workspace(t: Translation, cluster: str | None) -> None:
    """Set cuBLAS's workspace, where it is not what the cluster has."""
    variable = "CUBLAS_WORKSPACE_CONFIG"
    if variable in t.environment:
        t.set("training.cublas_workspace", t.environment[variable], variable)
    elif t.given.on("--deterministic-mode"):
        t.set("training.cublas_workspace", ":4096:8", "--deterministic-mode")
    elif card_of(cluster)[1] >= 10 and runs_since(t, LARGE_WORKSPACE_ON_BLACKWELL):
        t.set("training.cublas_workspace", ":4096:8", CONTAINER, note="torch's default on Blackwell")


def set_autotuning(t: Translation, cluster: str | None) -> None:
    """Set what torch.compile allocates while it times the kernels of the loss, in the first step."""
    if t.given.on("--deterministic-mode"):
        return  # it times none
    device, flush = _device(cluster), "model_options.autotune_flush_kib"
    cache = device.l2_cache_bytes.value if device is not None else None
    if runs_before(t, FLUSHES_L2):
        t.set(flush, 256_000_000 // 2**10, CONTAINER, note="256 MB, of torch.compile in the first step")
    elif cache is None:
        t.remarks.append(
            "in its first step torch.compile needs as much as the card's L2 cache has: not known"
        )
    else:
        t.set(flush, cache // 2**10, note="the L2 cache, of torch.compile in the first step")
    if runs_before(t, COPIES_ON_HOST):
        copies = 2 if runs_before(t, ONE_COPY) else 1
        t.set("model_options.autotune_copies", copies, CONTAINER, note="of what its kernels overwrite")
