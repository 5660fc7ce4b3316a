"""The settings of a Megatron-LM job that depend on the card and on the release of NVIDIA's container: above
all, the kernel that TransformerEngine takes for attention.
"""

from __future__ import annotations

import re
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.measure import Device, engines_choice, generation_of, load_cluster
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.rules import call

#: the variable that NVIDIA's container of PyTorch sets to its own release, such as "24.01"
CONTAINER = "NVIDIA_PYTORCH_VERSION"
#: the first release with TransformerEngine 1.3, which takes FlashAttention 2 (2.4.1 or newer) also if
#: algorithms must be deterministic (DotProductAttention in pytorch/attention.py at v1.2 and at v1.3)
_DETERMINISTIC_FLASH_ATTENTION = 2402
#: switches of Megatron-LM that turn off a fusion
_FUSIONS = (
    *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    *("--no-bias-dropout-fusion", "--no-rope-fusion"),
)
#: by variable of TransformerEngine that allows a kernel, the --attention-backend of that kernel
_ALLOWING = {"NVTE_FLASH_ATTN": "flash", "NVTE_FUSED_ATTN": "fused", "NVTE_UNFUSED_ATTN": "unfused"}


def _release_of(account: Account) -> int | None:
    """The release of the job's container, as year and month: 2401; None if the job does not say it."""
    parts = re.fullmatch(r"(\d\d)\.(\d\d)", account.environment.get(CONTAINER, ""))
    return int(parts[1] + parts[2]) if parts else None


def container_problems(account: Account) -> list[str]:
    """The problem with the release that the job gives for its container; empty if the release is right."""
    if CONTAINER not in account.environment or _release_of(account) is not None:
        return []
    return [f"{account.spelled(CONTAINER)} is no release of NVIDIA's container, such as 25.09"]


def facts_of_card(account: Account, cluster: str | None) -> dict[str, Any]:
    """The facts about card and container for rules: the ``release``, the card's name, its ``generation`` (0:
    not known), its ``processors``, and its L2 cache in KiB."""
    device = _device(cluster)
    facts: dict[str, Any] = {"release": _release_of(account), "cluster": cluster, "card": "", "generation": 0}
    if device is not None:
        cache = device.l2_cache_bytes.value
        facts |= {"card": device.name, "generation": generation_of(device)}
        facts |= {"cache_kib": cache and cache // 2**10, "processors": device.multiprocessors.value}
    return facts


def _device(cluster: str | None) -> Device | None:
    try:
        return load_cluster(cluster).device if cluster is not None else None
    except UserError:
        return None  # raised again with the cell


def choose_attention(account: Account) -> None:
    """Set the attention kernel that TransformerEngine chooses if the job allows several
    (:func:`engines_choice`, and nvte_get_fused_attn_backend)."""
    generation, release = account.facts["generation"], account.facts["release"]
    fixed = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
    off = {name for name in ("NVTE_FLASH_ATTN", "NVTE_FUSED_ATTN") if account.environment.get(name) == "0"}
    deterministic = account.has("--deterministic-mode") or account.environment.get(fixed) == "0"
    dropout = account.value("--attention-dropout") > 0
    fused = "NVTE_FUSED_ATTN" not in off and not (generation >= 10 and deterministic and dropout)
    undetermined = deterministic and release is not None and release < _DETERMINISTIC_FLASH_ATTENTION
    flash = "NVTE_FLASH_ATTN" not in off and not undetermined
    kernel = engines_choice(generation, fused=fused, flash=flash)
    names = ["--attention-backend", *sorted(off)]
    names += [fixed] if deterministic and (generation >= 10 or undetermined) else []
    names += [CONTAINER] if undetermined else []
    note = f"TransformerEngine's choice on {account.facts['card'] or 'this card'}"
    account.set("model_options.attention", kernel, *names, note=note)


def check_switches(account: Account) -> None:
    """Compare each of TransformerEngine's variables that allow a kernel with --attention-backend, and give
    the variable its outcome by the rules ``switch_of_attention``."""
    asked = account.value("--attention-backend") or "auto"
    for name, kernel in _ALLOWING.items():
        if (value := account.environment.get(name)) is not None:
            as_asked = value == str(int(asked in (kernel, "auto")))
            account.facts |= {
                "variable": name,
                "asked": asked,
                "as_asked": as_asked,
                "setting": f"{name}={value}",
            }
            call(account, "switch_of_attention")


def ignore_absent_fusions(account: Account) -> None:
    """Ignore switches that turn off a fusion which the model has not. Sets the facts ``left_out``, the other
    switches that turn off a fusion, and ``unfused``, the names of those fusions."""
    call(account, "absence_of_fusions")
    left_out = [name for name in _FUSIONS if account.has(name) and name not in account.idle]
    stems = [name.removeprefix("--no-").removesuffix("-fusion").replace("-", "_") for name in left_out]
    account.facts |= {"left_out": left_out, "unfused": stems}
