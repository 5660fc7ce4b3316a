"""What of a Megatron-LM job depends on the card and on the container of PyTorch, and which kernel of
attention TransformerEngine takes there.
"""

from __future__ import annotations

import re
from typing import Any

from spbench.bench.errors import UserError
from spbench.bench.measure import Device, engines_choice, generation_of, load_cluster
from spbench.bench.tools.jobs.account import Account
from spbench.bench.tools.jobs.rules import call

#: the variable that says the release of NVIDIA's container of PyTorch, and which it sets itself: "24.01"
CONTAINER = "NVIDIA_PYTORCH_VERSION"
#: the release with TransformerEngine 1.3: FlashAttention 2 (of 2.4.1 on) also where algorithms must be
#: deterministic (DotProductAttention of its pytorch/attention.py at v1.2 and at v1.3)
_DETERMINISTIC_FLASH_ATTENTION = 2402
#: switches that leave out a fusion
_FUSIONS = (
    *("--no-masked-softmax-fusion", "--no-bias-gelu-fusion", "--no-bias-swiglu-fusion"),
    *("--no-bias-dropout-fusion", "--no-rope-fusion"),
)
#: variables of TransformerEngine that allow a kernel, and its --attention-backend
_ALLOWING = {"NVTE_FLASH_ATTN": "flash", "NVTE_FUSED_ATTN": "fused", "NVTE_UNFUSED_ATTN": "unfused"}


def _release_of(account: Account) -> int | None:
    """The release of the job's container, as year and month: 2401; None where it is not said."""
    parts = re.fullmatch(r"(\d\d)\.(\d\d)", account.environment.get(CONTAINER, ""))
    return int(parts[1] + parts[2]) if parts else None


def container_problems(account: Account) -> list[str]:
    """What is wrong with the name that the job gives for its container, one a line."""
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
    """Account for TransformerEngine's variables that allow kernels."""
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
    """Ignore switches of fusions that the job has no use for. Sets the facts ``left_out``, switches that
    leave out other fusions, and ``unfused``, the names of those fusions."""
    call(account, "absence_of_fusions")
    left_out = [name for name in _FUSIONS if account.has(name) and name not in account.idle]
    stems = [name.removeprefix("--no-").removesuffix("-fusion").replace("-", "_") for name in left_out]
    account.facts |= {"left_out": left_out, "unfused": stems}
