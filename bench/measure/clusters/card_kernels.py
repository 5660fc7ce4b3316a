"""Kernels of softmax attention on a card: the kernel that programs run by default, and the rate of a kernel.

Kernels keep their ratio from card to card better than their share of the peak. So where two kernels were
measured on another card and only one of them on this card, the other's rate here is the measured rate times
the ratio on the other card, or if that is above the peak, by the share of the peak there. Such a rate is
marked as a substitute. Without other rates there is no time (:func:`check_rates`).
"""

from functools import cache

from spbench.bench.measure.clusters.cluster import Cluster, Device, cluster_names, load_cluster
from spbench.bench.measure.clusters.figures import Sourced, named, peak_in_half
from spbench.bench.measure.clusters.rates import NO_TABLE, AttentionRate, Direction, Mask

#: parts of cards' names by generation (the major number of NVIDIA's compute capability)
_CARDS = {6: "P100", 7: "V100 T4", 8: "A100 A800 A6000 3090 4090 L20 L4", 9: "H100 H20 H800", 10: "B200 B300"}
_CAPABILITY = {part: number for number, parts in _CARDS.items() for part in parts.split()} | {"RTX PRO": 12}
#: the first and the last generation that a kernel runs on. README.md of Dao-AILab/flash-attention says of
#: FlashAttention-2 Ampere, Ada and Hopper (and later), of 3 H100 and H800, of 4 Hopper and Blackwell
_RUNS_ON = {"flash_attention_2": (8, 99), "flash_attention_3": (9, 9), "flash_attention_4": (9, 12)}


def generation_of(device: Device) -> int:
    """The major number of a card's compute capability, 9 for an H100; 0 for an unknown card."""
    return next((number for part, number in _CAPABILITY.items() if part in device.name), 0)


def engines_choice(generation: int, *, fused: bool = True, flash: bool = True) -> str:
    """The kernel that TransformerEngine chooses, on which Megatron-LM relies (get_attention_backend of
    TransformerEngine's pytorch/attention/dot_product_attention/utils.py): "cudnn", "flash" or "unfused".

    Args:
        fused, flash: whether cuDNN's kernel, and FlashAttention's, may be chosen.
    """
    if fused and generation >= 9:
        return "cudnn"
    return "flash" if flash and generation >= 8 else "unfused"


def usual_kernel(device: Device) -> str:
    """The kernel that programs run on a card where nobody names one: "cudnn" if TransformerEngine chooses it
    and the card has its rate, else the default of the card's file; "flash" for a card without rates."""
    choice, attention = engines_choice(generation_of(device)), device.attention
    if choice == "cudnn" and attention is not None and "cudnn" in attention.kernels:
        return choice
    return "flash" if attention is None else attention.default


def played_kernel(device: Device, said: str) -> str:
    """The kernel of attention that is timed for a step on a card: the kernel of the model's option, or for
    "flash" the default of the card's file; "flash" where the file has none."""
    return said if said != "flash" or device.attention is None else device.attention.default


def cannot_run(device: Device, kernel: str) -> tuple[str, str] | None:
    """Why a card cannot run a kernel, and what to use instead; None if the card can, or if nobody knows."""
    generation = generation_of(device)
    first, last = _RUNS_ON.get(kernel, (0, 99))
    if not generation or first <= generation <= last:
        return None
    needs = "Hopper alone" if first == last else "Hopper and Blackwell" if last < 99 else "Ampere and later"
    usual = usual_kernel(device)
    return f"{kernel} runs on {needs}, not on {device.name}", f"use model_options.attention={usual}"


def rate_of_call(
    device: Device, kernel: str, head_size: int, direction: Direction, mask: Mask
) -> AttentionRate | None:
    """The rate of an attention kernel's calls on a card: its own, or one carried over from another card; None
    where there is neither. The default kernel's rate is never carried over, because the card has a share of
    the peak for it. The arguments are those of :meth:`AttentionRates.rate_of`."""
    if device.attention is None:
        return None
    own = device.attention.rate_of(kernel, head_size, direction, mask)
    if own is not None or kernel in ("flash", device.attention.default):
        return own
    for card in _cards_with(kernel, generation_of(device)):
        for other in dict.fromkeys([device.attention.default, *device.attention.kernels]):
            if rate := _carried(device, card, kernel, other, (head_size, direction, mask)):
                return rate
    return None


def _carried(
    device: Device, card: Cluster, kernel: str, other: str, call: tuple[int, Direction, Mask]
) -> AttentionRate | None:
    """This card's rate of the kernel ``other``, times the ratio of ``kernel`` to ``other`` on ``card``, or if
    this card cannot be so fast, the share of the peak on ``card``; None where a rate is missing."""
    ours, theirs = device.attention, card.device.attention
    assert ours is not None
    assert theirs is not None
    here, there = ours.rate_of(other, *call), theirs.rate_of(kernel, *call)
    if there is None or here is None:
        return None
    # both rates of the ratio are of the head size, direction and mask that the kernel was measured with
    beside = theirs.rate_of(other, there.counts_as(call[1]), there.direction or call[1], there.mask)
    if beside is None or not beside.limit_flops_per_s.value:
        return None
    of_other, limit = (each.limit_flops_per_s.value or 0.0 for each in (here, there))
    rate, text = of_other * limit / beside.limit_flops_per_s.value, f"{other}'s, by the ratio of both on"
    if rate > (peak := peak_in_half(device)):  # because the other kernel does not use what the card has
        rate, text = limit * peak / peak_in_half(card.device), "its share of the peak of"
    halves = [each.half_length.value for each in (here, there, beside)]
    half = halves[0] * halves[1] / halves[2] if all(halves) else halves[0]  # type: ignore[operator]
    source, substitute = here.limit_flops_per_s.source, f"{text} {card.device.name}"
    return here.model_copy(
        update={
            "limit_flops_per_s": Sourced(value=rate, source=source, substitute=substitute),
            "half_length": Sourced(value=half, source=here.half_length.source),
            "measured": {},
            "table": NO_TABLE,
        }
    )


@cache
def _cards_with(kernel: str, generation: int) -> list[Cluster]:
    """A cluster of each card that the kernel was measured on, the nearest generation first."""
    by_card = {}
    for cluster in reversed([*map(load_cluster, cluster_names())]):
        attention = cluster.device.attention
        rates = None if attention is None else named(attention.kernels, kernel)
        if any(not rate.limit_flops_per_s.substitute for rate in rates or ()):
            by_card[cluster.device.name] = cluster
    return sorted(by_card.values(), key=lambda cluster: abs(generation_of(cluster.device) - generation))


class RatesUnknown(ValueError):
    """A cluster's file lacks a figure without which a step cannot be timed."""


def check_rates(cluster: Cluster, precision: str, world: int) -> None:
    """Raise :class:`RatesUnknown` unless the cluster has all figures to time ``world`` ranks."""
    device = cluster.device
    rate = named(device.peak_flops_per_s, precision)
    if rate is None or rate.value is None:
        raise RatesUnknown(f"{cluster.name}: device.peak_flops_per_s has no {precision}")
    if device.memory_bandwidth_bytes_per_s.value is None:
        raise RatesUnknown(f"{cluster.name}: device.memory_bandwidth_bytes_per_s is unknown")
    links = [cluster.node_link] if cluster.node_link and cluster.devices_per_node > 1 and world > 1 else []
    if world > (cluster.devices_per_node if links else 1):
        links.append(cluster.network)
    for link in links:
        if not link.known:
            raise RatesUnknown(f"{cluster.name}: a link's latency or bandwidth is unknown")
