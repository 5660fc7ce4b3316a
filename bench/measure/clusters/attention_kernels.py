"""Which kernel of softmax attention programs run on a card where nobody says one, and which it cannot run."""

from __future__ import annotations

from spbench.bench.measure.clusters.cluster import Device

#: generations of cards by what is in their names, as NVIDIA numbers what they can do
_CAPABILITY = {"P100": 6, "V100": 7, "A100": 8, "A800": 8, "RTX 4090": 8, "L20": 8, "L40": 8} | {
    "H100": 9,
    "H200": 9,
    "H800": 9,
    "B200": 10,
}
#: the generations that a kernel runs on: from, to. README.md of Dao-AILab/flash-attention says of
#: FlashAttention-2 Ampere, Ada and Hopper (and later), of 3 H100 and H800, of 4 Hopper and Blackwell
_RUNS_ON = {"flash_attention_2": (8, 99), "flash_attention_3": (9, 9), "flash_attention_4": (9, 10)}


def generation_of(device: Device) -> int:
    """The generation of a card; 0 where it is not known."""
    return next((number for part, number in _CAPABILITY.items() if part in device.name), 0)


def engines_choice(generation: int, *, fused: bool = True, flash: bool = True) -> str:
    """The kernel that TransformerEngine takes, which Megatron-LM leaves the choice to (get_attention_backend
    of its pytorch/attention/dot_product_attention/utils.py): "cudnn", "flash" or "unfused".

    Args:
        fused, flash: whether cuDNN's and FlashAttention's may be taken.
    """
    if fused and generation >= 9:
        return "cudnn"
    return "flash" if flash and generation >= 8 else "unfused"


def usual_kernel(device: Device) -> str:
    """The kernel that is taken on a card where nobody says one: TransformerEngine's choice, FlashAttention by
    the version that the card's file has as its default. "flash" where the card is not known, or has neither:
    what stands for it there."""
    choice = engines_choice(generation_of(device))
    known = device.attention
    if choice == "cudnn" and known is not None and "cudnn" in known.kernels:
        return choice
    return "flash" if known is None else known.default


def cannot_run(device: Device, kernel: str) -> tuple[str, str] | None:
    """Why a card cannot run a kernel, and what to use instead; None: it can, or it is not known."""
    generation = generation_of(device)
    first, last = _RUNS_ON.get(kernel, (0, 99))
    if not generation or first <= generation <= last:
        return None
    needs = "Hopper alone" if first == last else "Hopper and Blackwell" if last < 99 else "Ampere and later"
    usual = usual_kernel(device)
    return f"{kernel} runs on {needs}, not on {device.name}", f"use model_options.attention={usual}"
