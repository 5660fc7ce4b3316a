"""The colours, markers, hatches and names of methods in figures and pages; and numbers as text.

This module does not need matplotlib, so that web pages take the same colours from :func:`method_color`.
"""

import hashlib
import re
import textwrap
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

#: (colour, marker, hatch) of each method by name, in the order of legends. Contrasts against white are 3 or
#: more; any two colours differ by 16 in CIELAB, also with a colour-vision deficiency, and in marker and hatch
_METHODS = {
    "tensor_parallel": ("#355ba9", "o", ""),
    "ring_self_attention": ("#cc7f00", "s", "////"),
    "megatron_sp": ("#009265", "D", "\\\\\\\\"),
    "ulysses": ("#b1380a", "^", "...."),
    "ring_attention": ("#e05ca5", "v", "xxxx"),
    "plain_ring_attention": ("#401c28", "H", "||--"),
    "all_gather_kv": ("#90954c", "d", "oo"),
    "group_cast": ("#cb3bd3", r"$\spadesuit$", "oo||"),
    "dynamic_cp": ("#130105", r"$\diamondsuit$", "xx||"),
    "gathered_latents": ("#960fd2", r"$\clubsuit$", "++.."),
    "lasp": ("#73482c", "P", "++"),
    "lasp2": ("#0097f6", "X", "----"),
    "lasp2h": ("#3c0103", ">", "-\\-\\"),
    "upipe": ("#291190", "<", "..//"),
    "fpdt": ("#01061e", "p", "xx--"),
    "dsp": ("#79006b", "*", "||||"),
    "odysseus": ("#8d05fc", "8", "**"),
    "single": ("#535353", "h", "//"),
}
_COLORS, MARKERS, _HATCHES = zip(*_METHODS.values(), strict=True)
#: the colours of backends, mesh axes and other things than methods; the palette Dark2 of ColorBrewer
_CATEGORIES = ("#1b9e77", "#d95f02", "#7570b3", "#e7298a", "#66a61e", "#e6ab02", "#a6761d", "#666666")
#: the least distances of an unknown method's colour from white, from grey and from the table's colours
_CONTRAST, _CHROMA, _DISTANCE = 3.0, 0.3, 0.22
#: the names of strategies, as people write them
_NAMES = {
    "tensor_parallel": "Tensor parallelism",
    "ring_self_attention": "Ring Self-Attention",
    "ring_attention": "Ring Attention",
    "all_gather_kv": "All-gather of K and V",
    "gathered_latents": "All-gather of latents",
    "single": "No sequence parallelism",
    "megatron_sp": "Megatron-SP",
    "ulysses": "Ulysses",
    "ulysses_opensora": "Ulysses of Open-Sora",
    "lasp": "LASP",
    "lasp2": "LASP-2",
    "lasp2h": "LASP-2H",
    "upipe": "UPipe",
    "fpdt": "FPDT",
    "dsp": "DSP",
    "odysseus": "Odysseus",
}
#: short names of strategies, for combinations of strategies and for many names side by side
_SHORT_NAMES = {
    "tensor_parallel": "TP",
    "ring_self_attention": "RSA",
    "ring_attention": "Ring",
    "all_gather_kv": "all-gather KV",
    "single": "no SP",
}
_BACKENDS = {
    "legacy_ddp": "legacy DDP",
    "ddp": "DDP",
    "zero1": "ZeRO-1",
    "zero2": "ZeRO-2",
    "zero3": "ZeRO-3",
    "fsdp_flat": "FSDP",
    "megatron": "Megatron-LM",
}
_ENGINES = {
    "virtual": "virtual ranks",
    "distributed": "real ranks",
    "emulated": "emulated ranks",
    "lockstep": "ranks in turns",
}
#: the spelling of parts of models' names that are no words
_MODEL_PARTS = {
    "bert": "BERT",
    "gpt": "GPT",
    "gpt3": "GPT-3",
    "linformer": "Linformer",
    "minimax-01": "MiniMax-01",
    "nemotron-h": "Nemotron-H",
    "qwen3-next": "Qwen3-Next",
    "llama2": "Llama-2",
    "llama3": "Llama-3",
    "st-dit": "ST-DiT",
    "tnl": "TransNormerLLM",
}
_MODEL_PART = re.compile(rf"{'|'.join(sorted(_MODEL_PARTS, key=len, reverse=True))}|[^-]+")
_SIZE = re.compile(r"a?\d+(\.\d+)?[bmk]|xl")
INK, GREY = "#262626", "#666666"
#: the sign between the names of strategies in a combination, the outermost first
PLUS = "+"
TIMES = "\N{MULTIPLICATION SIGN}"


@dataclass(frozen=True)
class Look:
    """The colour, marker and hatch with which a method is drawn."""

    color: str
    marker: str
    hatch: str = ""


def method_look(name: str) -> Look:
    """The look of a strategy, a peer or a combination of strategies, the same in every figure.

    A name that the table lacks gets a colour computed from the name, unlike all colours of the table. A
    combination, such as "megatron_sp+lasp", has the outermost's marker and the innermost's hatch.
    """
    if name in _METHODS:
        return Look(*_METHODS[name])
    if PLUS in name:
        parts = name.split(PLUS)
        return Look(_color_by_name(name), method_look(parts[0]).marker, method_look(parts[-1]).hatch)
    digest = hashlib.sha256(name.encode()).digest()
    return Look(_color_by_name(name), MARKERS[digest[0] % len(MARKERS)], _HATCHES[digest[1] % len(_HATCHES)])


def method_color(name: str) -> str:
    """The colour of a method as "#rrggbb"; see :func:`method_look`."""
    return method_look(name).color


def looks(strategies: Iterable[str]) -> dict[str, Look]:
    """The look of each strategy, in the order of legends: the table's order, then alphabetical."""
    names = set(strategies)
    ordered = [name for name in _METHODS if name in names] + sorted(names - set(_METHODS))
    return {name: method_look(name) for name in ordered}


def category_colors(names: Iterable[str]) -> dict[str, str]:
    """A colour for each name of things that are no methods; colours repeat after eight names."""
    return {name: _CATEGORIES[at % len(_CATEGORIES)] for at, name in enumerate(dict.fromkeys(names))}


def _color_by_name(name: str) -> str:
    """The first colour that meets the least distances, in a pseudo-random sequence seeded by the name."""
    taken = [_rgb(color) for color in _COLORS]
    for attempt in range(10_000):
        color = "#" + hashlib.sha256(f"{name} {attempt}".encode()).hexdigest()[:6]
        rgb = _rgb(color)
        apart = min(sum((a - b) ** 2 for a, b in zip(rgb, other, strict=True)) ** 0.5 for other in taken)
        if contrast(color) >= _CONTRAST and max(rgb) - min(rgb) >= _CHROMA and apart >= _DISTANCE:
            return color
    raise AssertionError(f"no colour for {name}")  # a third of all colours would do


def contrast(color: str) -> float:
    """The contrast of a colour against white, from 1 to 21, as WCAG 2 defines it."""
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in _rgb(color)]
    luminance = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return 1.05 / (luminance + 0.05)


def tint(color: str, strength: float) -> str:
    """The colour "#rrggbb" mixed with white; strength 1 is the colour itself."""
    return "#" + "".join(f"{round(255 * (1 - strength * (1 - part))):02x}" for part in _rgb(color))


def shade(color: str, strength: float) -> str:
    """The colour "#rrggbb" mixed with black; strength 1 is the colour itself."""
    return "#" + "".join(f"{round(255 * strength * part):02x}" for part in _rgb(color))


def _rgb(color: str) -> tuple[float, float, float]:
    red, green, blue = (int(color[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return red, green, blue


def strategy_name(strategy: str) -> str:
    """A strategy's name as figures show it; for a combination of strategies, its :func:`short_name`."""
    return short_name(strategy) if PLUS in strategy else _NAMES.get(strategy, strategy.replace("_", " "))


def short_name(strategy: str) -> str:
    """The short name of a strategy; for a combination, the short names with plus signs between."""
    parts = strategy.split(PLUS)
    return f" {PLUS} ".join(_SHORT_NAMES.get(part) or strategy_name(part) for part in parts)


def backend_name(backend: str) -> str:
    """A data-parallel backend's name as figures show it."""
    return _BACKENDS.get(backend, backend)


def model_name(preset: str) -> str:
    """A model's name as figures show it: "Llama-3 8B" for "llama3-8b"."""
    parts = [
        part.upper() if _SIZE.fullmatch(part) else _MODEL_PARTS.get(part, part)
        for part in _MODEL_PART.findall(preset)
    ]
    text = " ".join(parts)
    return text[:1].upper() + text[1:]


def engine_name(engine: str) -> str:
    """An engine's name as figures show it: "virtual ranks"."""
    return _ENGINES.get(engine, f"engine {engine}")


def number(value: float) -> str:
    """A number as text with three significant digits, or from 1,000 on without digits after the point."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def length_text(tokens: int) -> str:
    """A sequence length as papers write it: "2K" for 2048 tokens."""
    return str(tokens) if tokens % 1024 else f"{tokens // 1024}K"


def binary_length(tokens: int) -> str:
    """A sequence length in the largest binary unit that divides it: "128K", "1M", "1000"."""
    for suffix, unit in (("M", 2**20), ("K", 2**10)):
        if tokens % unit == 0:
            return f"{tokens // unit}{suffix}"
    return str(tokens)


def tick_texts(values: Sequence[float]) -> list[str]:
    """The texts of an axis's values: small values as 1e-7, large ones with the prefixes k (1000), M, G, T."""
    highest, lowest = max(values, default=0), min((v for v in values if v > 0), default=1)
    if highest >= 1e5:
        prefixes = ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1, ""))
        units = [next(((u, p) for u, p in prefixes if abs(v) >= u), (1, "")) for v in values]
        return [f"{v / unit:.4g}{prefix}" for v, (unit, prefix) in zip(values, units, strict=True)]
    if lowest < 1e-3:
        return [f"{v:.0e}".replace("e-0", "e-") if v else "0" for v in values]
    return [number(v) for v in values]


def shortened(text: str, width: int, lines: int = 1) -> str:
    """The text wrapped to ``width`` characters and cut after ``lines`` lines; its line breaks are kept."""
    wrapped: list[str] = []
    for line in text.splitlines():
        room = max(1, lines - len(wrapped))
        wrapped += textwrap.wrap(
            " ".join(line.split()),
            width,
            max_lines=room,
            placeholder=" …",
            break_on_hyphens=False,
            break_long_words=False,
        )
    return "\n".join(wrapped[:lines])
