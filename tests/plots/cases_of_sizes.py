"""Figures of the largest sizes that fit, and bars of bytes, times and ablations: rows, and what is drawn."""

from typing import Any

from spbench.plots import expert_skew, lasp, splits
from spbench.plots.communication import draw as draw_communication
from spbench.plots.largest import draw_max_seqlen, draw_max_seqlen_today
from spbench.plots.style import TIMES, strategy_name
from tests.plots.figure_cases import ALONE, GIB, RSA, TNL, TP, Case, Row, skewed, steps
from tests.plots.rows import compared, ran, searched, table

SEARCHES = [
    *(searched("ring_self_attention", n, answer) for n, answer in ((64, 2816), (4, 768))),
    *(searched("tensor_parallel", n, answer) for n, answer in ((4, 652), (12, 1028))),
]
LINFORMER = searched("ring_self_attention", 32, 131072, model="bert-base-linformer", batch=4)
CLAIMS = table(
    compared("rsa-max-seqlen-base", 3.0, 2816 / 1028, SEARCHES[0]["key"], SEARCHES[3]["key"]),
    compared("rsa-linformer-upper-bound", 114000.0, 131072.0, LINFORMER["key"]),
    compared("rsa-max-seqlen-large", 2.0, None, "elsewhere", "nowhere", note="numerator was not run"),
)
STATUSES = (
    ("oom", "tensor_parallel", 2),
    ("unsupported", "tensor_parallel", 16),
    ("failed", "ring_self_attention", 128),
)


def longest(strategy: str, answer: int | None, quantity: str = "seq_len", **sizes: int) -> Row:
    given: Any = {"seq_len": {"batch": 16}, "batch": {"seq_len": 512}}[quantity]
    search = {"quantity": quantity, "step": 4}
    status = "ok" if answer else "oom"
    return ran(
        status, {"answer": answer}, model="bert-large", strategy=strategy, sizes=sizes, search=search, **given
    )


NESTED = "megatron_sp+ring_self_attention"
COMPOSED = f"tp 4 {TIMES} sp 16, Megatron-SP + RSA"
SPLIT = [
    longest("ring_self_attention", 3072, sp=64),
    longest(NESTED, 3328, tp=4, sp=16),
    longest("tensor_parallel+ring_self_attention", None, tp=16, sp=4),
    longest("ring_self_attention", 600, "batch", sp=64),
    longest(NESTED, 864, "batch", tp=4, sp=16),
]
RUNGS = [
    {**searched("ring_self_attention", 8, n, "ok" if n else "oom", model_options=options), "key": str(n)}
    for n, options in (
        (3_800_000, {"loss_tile": "liger", "mlp_tile": 4096, "checkpoints": "host"}),
        (None, {}),
        (1_100_000, {"loss_tile": "liger"}),
    )
]


def timed(row: Row, length: int, batch: int = 1) -> Row:
    """A step with a rung's settings."""
    cell = {**row["cell"], "search": None, "seq_len": length, "batch": batch}
    return {**row, "key": f"{row['key']} {length}", "cell": cell, "measurement": {"step_time_s": 1.0}}


PRICED = [timed(RUNGS[2], 2**17, 8), timed(RUNGS[0], 2**17), timed(RUNGS[0], 2**20)]
PRICES = table(
    *(
        {**compared("", 1.0, ratio, row["key"]), "quantity": "ratio", "published": None}
        for row, ratio in zip(PRICED, (1.0137, 1.37, 1.056), strict=True)
    )
)

LARGEST = {
    "lines are the rows, and a ratio stands where our denominator puts it": Case(
        draw_max_seqlen,
        [*SEARCHES, LINFORMER],
        CLAIMS,
        titles=["BERT base, batch 64", "BERT base Linformer, batch 4"],
        axes=["Sequence length (tokens)"],
        data={
            f"ours largest {RSA}": [[(4, 768), (64, 2816)], 131072],
            f"ours largest {TP}": [[(4, 652), (12, 1028)]],
            f"published largest {RSA}": [[(64, 3.0 * 1028)]],
            "published": [114000],
            "claim rsa-max-seqlen-base first-steps": [[(2816 / 1028 / 3 - 1, 0)]],
        },
        legend=[TP, RSA, f"published ratio {TIMES} our denominator"],
    ),
    "cells without an answer are marked below": Case(
        draw_max_seqlen,
        [*SEARCHES, *(searched(strategy, n, None, status) for status, strategy, n in STATUSES)],
        marks={f"ours {status} {strategy_name(strategy)}": n for status, strategy, n in STATUSES},
        legend=[TP, RSA, "out of memory", "unsupported", "failed"],
        notes=[f"{TP}: unsupported at 16 GPUs (reason of unsupported)"],
    ),
    "a bound without an answer": Case(
        draw_max_seqlen,
        [{**LINFORMER, "status": "failed", "measurement": {"answer": None}}],
        CLAIMS[1:2].assign(reproduced=None, relative_error=None),
        data={"published": [114000]},
        marks={f"ours failed {RSA}": 1},
    ),
    "variants are lines of their own": Case(
        draw_max_seqlen,
        [*SEARCHES, searched("tensor_parallel", 4, 500, variant="all-steps")],
        data={f"ours largest {TP}, all-steps": [[(4, 500)]]},
    ),
    "the longest split stands first, with its ratio": Case(
        splits.draw_max_seqlen_4d,
        SPLIT,
        table({**compared("longest", 1.0, 3328 / 3072, SPLIT[1]["key"], SPLIT[0]["key"]), "published": None}),
        titles=["BERT large, batch 16", "BERT large, sequence length 512"],
        data={f"seq_len {COMPOSED}": [3328], "seq_len sp 64, RSA": [3072], "batch sp 64, RSA": [600]},
    ),
    "a bar for each rung, in the order of switches": Case(
        draw_max_seqlen_today,
        [*RUNGS, *PRICED],
        PRICES,
        data={
            "ours longest tiled loss + Ring Self-Attention": [1.1],
            f"ours longest tiled loss + {RSA} + tiled MLP + checkpoints on host": [3.8],
            f"ours oom {RSA}": [[(0, 0)]],
        },
        notes=["how much longer it takes"],
    ),
}

# -- bars of bytes, times and ablations ------------------------------------------------------------------


def sender(engine: str, forward: float, backward: float, status: str = "ok", **measured_: Any) -> Row:
    entries = [
        [{"phase": "forward", "sent_bytes": 1024 * a}, {"phase": "backward", "sent_bytes": 1024 * b}]
        for a, b in ((forward, backward), (4, 8))
    ]
    measured_ = {"communication": entries[0], "formula": entries[1], **measured_}
    about = {"model": "bert-tiny", "batch": 2, "seq_len": 48, "engine": engine}
    return ran(status, measured_, strategy="tensor_parallel", sizes={"tp": 2}, **about)


def split(strategy: str, seconds: float | None, peak: float, **sizes: int) -> Row:
    sent = {"tp": 2.5, "sp": 10.0, "tp_sp": 0.5}
    numbers = {
        "peak_memory_bytes": peak * GIB,
        "usable_memory_bytes": 15 * GIB,
        "step_time_s": seconds,
        "communication": [{"axis": axis, "sent_bytes": gib * GIB} for axis, gib in sent.items()],
    }
    cell = {"model": "bert-large", "batch": 64, "seq_len": 2048, "cluster": "piz-daint-p100"}
    row = ran("ok", numbers, strategy=strategy, sizes=sizes, **cell)
    return row if seconds else row | {"status": "oom", "reason": "no room"}


SPLITS = [split("ring_self_attention", 17.5, 13.5, sp=64), split(NESTED, 5.9, 10.9, tp=4, sp=16)]
ABLATED = [
    steps(
        *("lasp", "sp", 8, 65536, "failed" if (fusion, caching) == (False, True) else "ok"),
        strategy_options={"kernel_fusion": fusion, "state_caching": caching},
        measured={
            "peak_memory_bytes": (30 + 10 * (not fusion)) * GIB,
            "tokens_per_s": 4000.0 * (1 + caching),
        },
    )
    for fusion in (True, False)
    for caching in (True, False)
]
SAVED = [
    ran(
        *("ok" if answer else "oom", {"answer": answer}),
        model="tnl-1b",
        strategy=strategy,
        sizes={axis: 8},
        batch=8,
        training={"backend": "ddp"},
        search={"quantity": "seq_len", "step": 1024},
    )
    for strategy, axis, answer in (("single", "dp", None), ("lasp", "sp", 96 * 1024))
]

BARS = {
    "engines that agree share a bar up to the closed form": Case(
        draw_communication,
        [sender("distributed", 4, 8), sender("virtual", 4, 8)],
        titles=["BERT tiny, batch 2, length 48"],
        axes=["Sent per GPU and step (KiB)"],
        data={
            f"forward {TP} 2 virtual": [4],
            f"backward {TP} 2 virtual": [8],
            f"formula {TP} 2 virtual": [...],
        },
        absent=[f"forward {TP} 2 distributed"],
        legend=[TP, "forward", "backward", "closed form"],
        notes=[f"1 of 1 cells on {e} ranks send exactly the bytes" for e in ("real", "virtual")],
    ),
    "other bytes have a bar and a note, also where the sum is the same": Case(
        draw_communication,
        [sender("distributed", 6, 8), sender("virtual", 5, 7)],
        data={f"forward {TP} 2 virtual": [5], f"forward {TP} 2 distributed": [6]},
        notes=[
            "0 of 1 cells on real ranks",
            "0 of 1 cells on virtual ranks",
            f"BERT tiny, {TP} at 2 GPUs, distributed: +16.67%, +50.00% forward",
            f"BERT tiny, {TP} at 2 GPUs, virtual: +25.00% forward, -12.50% backward",
        ],
    ),
    "a closed form that is not known is no deviation": Case(
        draw_communication,
        [sender("virtual", 4, 8, formula=[])],
        absent=[f"formula {TP} 2 virtual"],
        legend=[TP, "forward", "backward"],
        notes=["0 of 0 cells on virtual ranks send exactly the bytes of their closed form"],
    ),
    "claims that are exactly met are counted, others are drawn": Case(
        draw_communication,
        [sender("virtual", 4, 8), sender("distributed", 4, 8, "failed")],
        table(
            *(compared(f"formula {n}", 1e9 + n, 1e9 + n, "a row") for n in range(40)),
            compared("formula that is off", 1e9, 1e9 + 8, "a row"),
            compared("formula not run", 5.0, None, "nowhere"),
        ),
        data={"claim formula that is off first-steps": [[(8e-9, 0)]]},
        marks={f"failed {TP} 2 distributed": None},
        notes=[
            "40 of 42 published formulas exactly met",
            "1 of 42 published formulas not measured",
            f"BERT tiny, {TP} at 2 GPUs, distributed: failed (reason of failed)",
        ],
    ),
    "memory, step and the fullest rank by skew, dashed by variant; ep does not multiply GPUs": Case(
        expert_skew.draw,
        [
            skewed(routing, variant)
            for routing in ("zipf:0", "zipf:1.5")
            for variant in ("dropless", "capacity")
        ]
        + [skewed("even", "dropless")],
        titles=[f"Qwen3 30B A3B, 8 {TIMES} dgx-h100"] * 3,
        axes=["Peak memory (GiB)", "Step (ms)", "Tokens of the fullest\nrank, over mean"],
        data={
            "ours peak_memory_gib Ulysses, dropless": [[(0, 20), (150, 23)]],
            "ours step_ms Ulysses, capacity": [[(0, 100), (150, 160)]],
            "ours expert_imbalance Ulysses, dropless": [[(0, 1), (150, 2.5)]],
        },
    ),
    "splits by time, bytes stacked by axis, memory against the card": Case(
        splits.draw_four_d,
        [*SPLITS, split("tensor_parallel+ring_self_attention", None, 20.0, tp=16, sp=4)],
        data={
            f"time {COMPOSED}": [5.9],
            f"sent tp {COMPOSED}": [2.5],
            f"sent sp {COMPOSED}": [10.0],
            f"sent {splits.SEVERAL} {COMPOSED}": [0.5],
            f"memory tp 16 {TIMES} sp 4, TP + RSA": [20],
            "limit": [[(15, 0), (15, 1)]],
            f"time tp 16 {TIMES} sp 4, TP + RSA": [...],
        },
        legend=["tp", "sp", splits.SEVERAL, "usable memory of the card", "out of memory"],
    ),
    "ablations": Case(
        lasp.draw_lasp_ablation,
        [*ABLATED, *SAVED],
        titles=[*[f"{TNL}, 64K tokens"] * 2, f"{TNL}: longest sequence that fits"],
        axes=["Peak memory (GiB)", "Tokens per second"],
        data={
            "memory fused, cached LASP": [30],
            "throughput fused LASP": [4000],
            "memory neither LASP": [40],
            "length DDP LASP": [96],
        },
        marks={"throughput cached LASP": None, f"length DDP {ALONE}": None},
        legend=["data parallel only", "LASP", "failed", "out of memory"],
        notes=["cached: failed (reason of failed)"],
    ),
}
