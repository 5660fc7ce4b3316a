"""Figures over lengths and GPUs: rows, and what is drawn of them.
Figures of the largest sizes that fit, and bars of bytes, times and ablations: rows, and what is drawn."""

from typing import Any

from spbench.plots import dsp, expert_skew, lasp, rsa, splits
from spbench.plots.communication import draw as draw_communication
from spbench.plots.largest import draw_max_seqlen, draw_max_seqlen_today
from spbench.plots.methods import draw as draw_methods
from spbench.plots.style import TIMES, strategy_name
from tests.plots.figure_cases import (
    ALONE,
    GIB,
    LOST,
    RSA,
    TNL,
    TOKENS,
    TP,
    Case,
    Row,
    formula,
    sized,
    skewed,
    steps,
)
from tests.plots.rows import compared, published, ran, searched, table

LENGTHS = (2048, 4096, 8192)
SCALED = [
    steps("lasp", "sp", count, n, training={"backend": backend})
    for backend in ("ddp", "fsdp_flat")
    for count in (8, 16)
    for n in LENGTHS
]
UNSCALED = [
    *(steps("lasp", "sp", 8, n, "oom", training={"backend": "ddp"}) for n in (65536, 16384)),
    steps("lasp", "sp", 16, 16384, "unsupported", training={"backend": "ddp"}),
]
PUBLISHED = table(
    *(published(row, "memory_gb", 22.5) for row in SCALED[:3]),
    *(published(row, "memory_gb", None, "unstated") for row in SCALED[3:5]),
    *(published(UNSCALED[1], quantity, None, "oom") for quantity in ("memory_gb", TOKENS)),
)
READINGS = [
    steps("ulysses", "sp", 64, n, model_options={"linear_attention": way})
    for way in ("left_product", "chunked")
    for n in LENGTHS
]
LINEAR = {"model": "linear-transformer-0.4b", "model_options": {"layers": 2}}
LASP = [steps("lasp", "sp", 8, n, **LINEAR) for n in (2048, 65536)]
RING = [steps("ring_attention", "sp", 8, n, **LINEAR) for n in (2048, 65536)]
SENT = table(
    *(formula(row, "lasp-table1", 100.0, 100.0) for row in LASP),
    *(formula(row, "ring-attention-table1", 7.0, 14.0) for row in RING),
    formula(RING[0], "ring-attention-wire", 14.0, 14.0),
    formula(RING[1], "ring-attention-wire", 14.0, 15.0),
)
ROUND = [*(steps("ulysses", "sp", 4, n) for n in (1024, 2048)), steps("ulysses", "sp", 4, 4096, "oom")]
BANDED = {"tokens_per_s": 1000.0, "step_time_s": 2.0, "step_time_low_s": 1.0, "step_time_high_s": 4.0}
MESHES = [
    steps("ulysses", "sp", count, n, measured={}) | {"key": f"{count} {n}"}
    for count in (4, 8)
    for n in (1024, 2048)
]

OVER_LENGTHS = {
    "a column for each backend, a row for each quantity": Case(
        lasp.draw_lasp_scalability,
        SCALED,
        titles=["TransNormerLLM 1B, DDP", "TransNormerLLM 1B, FSDP", "", ""],
        axes=["Peak memory (GiB)", "", "Tokens per second", ""],
        data={
            "ours memory_gb 8 GPUs": [[(2048, 0.25), (4096, 0.5), (8192, 1)]] * 2,
            f"ours {TOKENS} 16 GPUs": [[(n, 16000) for n in LENGTHS]] * 2,
        },
        legend=["8 GPUs", "16 GPUs"],
        notes=[],
    ),
    "published numbers are markers, the shortest lost length is a mark below, unstated is nothing": Case(
        lasp.draw_lasp_scalability,
        [*SCALED, *UNSCALED],
        PUBLISHED,
        data={"published memory_gb 8 GPUs": [[(n, 22.5) for n in LENGTHS]]},
        marks={"ours oom 8 GPUs": 16384, "published oom 8 GPUs": 16384, "ours unsupported 16 GPUs": 16384},
        absent=["published memory_gb 16 GPUs"],
        legend=["8 GPUs", "16 GPUs", "published", LOST, f"{LOST}, published", "unsupported"],
        notes=["TransNormerLLM 1B, DDP, 16 GPUs: unsupported at 16K (reason of unsupported)"],
    ),
    "two readings of one method are two lines beside one published marker": Case(
        lasp.draw_lasp_speed,
        [*READINGS, *(steps("lasp", "sp", 64, n) for n in LENGTHS)],
        table(*(published(row, TOKENS, 300.0) for row in READINGS if row["cell"]["seq_len"] == 4096)),
        data={
            **{
                f"ours {TOKENS} Ulysses, {matmul} first": [[(n, 64000) for n in LENGTHS]]
                for matmul in ("QKᵀ", "KᵀV")
            },
            f"published {TOKENS} Ulysses, QKᵀ first": [[(4096, 300)]],
        },
        absent=[f"published {TOKENS} Ulysses, KᵀV first"],
        legend=["Ulysses, QKᵀ first", "Ulysses, KᵀV first", "LASP", "published"],
    ),
    "metered elements beside the exact formulas, not the paper's": Case(
        lasp.draw_lasp_communication,
        [*LASP, *RING],
        SENT,
        titles=["Linear transformer 0.4B, 8 GPUs"],
        data={
            "ours sent_elements LASP": [[(2048, 100), (65536, 100)]],
            "ours sent_elements Ring Attention": [[(2048, 14), (65536, 15)]],
            "published sent_elements Ring Attention": [[(2048, 14), (65536, 14)]],
        },
        legend=["Ring Attention", "LASP", "formula"],
        notes=["3 of 4 cells on virtual ranks"],
    ),
    "rows that did not run have no metered elements": Case(
        lasp.draw_lasp_communication,
        LASP,
        table(*(formula(row, "lasp-table1", 100.0, None) for row in LASP)),
        data={"published sent_elements LASP": [[(2048, 100), (65536, 100)]], "ours sent_elements LASP": [[]]},
    ),
    "a line for each strategy; searches are left out": Case(
        draw_methods,
        [*ROUND, searched("tensor_parallel", 8, 512)],
        titles=["TransNormerLLM 1B, 4 GPUs (local)"],
        data={
            f"ours {TOKENS} Ulysses": [[(1024, 4000), (2048, 4000)]],
            "ours peak_memory_gib Ulysses": [[(1024, 0.25), (2048, 0.5)]],
        },
        marks={"ours oom Ulysses": 4096},
    ),
    "batches of one length are columns; strategies without a number are one note; bars": Case(
        draw_methods,
        [
            *(
                steps("ulysses", "sp", ranks, n, batch=batch)
                for ranks in (16, 8)
                for batch in (2, 1)
                for n in (2048, 4096)
            ),
            steps("ring_attention", "sp", 8, 2048, batch=1) | {"measurement": BANDED},
            *(steps("lasp", "sp", ranks, 2048, "unsupported") for ranks in (8, 16)),
        ],
        titles=[
            *(f"TransNormerLLM 1B, 8 GPUs (local), batch {batch}" for batch in (1, 2)),
            *("", "", "TransNormerLLM 1B, 16 GPUs (local), batch 1"),
        ],
        data={
            f"interval {TOKENS} Ring Attention": [[[[2048, 500], [2048, 2000]]]],
            f"ours {TOKENS} Ulysses": [[(2048, 1000 * n), (4096, 1000 * n)] for n in (8, 8, 16, 16)],
        },
        absent=["ours unsupported LASP"],
        legend=["Ulysses", "Ring Attention"],
        notes=["Not drawn: LASP: unsupported (reason of unsupported)", "Bars: what such predictions"],
    ),
    "layouts of one strategy are lines of their own": Case(
        draw_methods,
        [
            ran("ok", row["measurement"], **{**row["cell"], "sizes": sizes})
            for row in ROUND[:2]
            for sizes in ({"dp": 2, "sp": 4}, {"sp": 8})
        ],
        data={
            f"ours peak_memory_gib Ulysses, {sizes}": [[(1024, 0.25), (2048, 0.5)]]
            for sizes in ("dp2xsp4", "sp8")
        },
    ),
}

CUTS = [
    sized("ulysses", n, 64, cut=cut, measured={"samples_per_s": n / (1 + cut)})
    for cut in (0, 1)
    for n in (4, 2)
]
TRAINED = [*CUTS, *(sized("dsp", n, frames) for frames in (128, 64) for n in (4, 2))]
SAMPLES = "throughput_samples_per_s"
FORWARD = [sized("single", 1, 64), *(sized(name, n, 64) for name in ("dsp", "ulysses") for n in (2, 4))]
LONG = [sized(name, n, 1024) for name in ("dsp", "ring_attention") for n in (8, 16, 32)]
HELD = {"dsp": (32, 16), "megatron_sp": (8, 4), "ulysses": (None, 17)}
MEMORY = [
    sized(
        *(name, 8, 128, "oom" if gib is None else "ok"),
        checkpointing=bool(at),
        measured={"peak_memory_bytes": (gib or 0) * GIB},
    )
    for name, both in HELD.items()
    for at, gib in enumerate(both)
]
KEPT, RECOMPUTED = "activations kept", "activations recomputed"


def staged(strategy: str, pp: int, status: str = "ok") -> Row:
    """A timed search on 4 ranks a stage."""
    row = searched(strategy, 4, 40 * pp, status, quantity="batch")
    row["cell"]["sizes"]["pp"] = pp
    row["measurement"] = {} if status != "ok" else row["measurement"] | {"tokens_per_s": 4000.0 * pp}
    return row


GROWN = [
    ran(
        *(
            "oom" if (batch, count) == (512, 64) else "ok",
            {"peak_memory_bytes": 7000 * 2**20, "tokens_per_s": 9000.0},
        ),
        model="bert-large",
        strategy="tensor_parallel",
        sizes={"tp": count},
        batch=batch,
        seq_len=512,
    )
    for count, batch in ((8, 64), (16, 128), (64, 512))
]

OVER_GPUS = {
    "a panel for each video, a line for each cut": Case(
        dsp.draw_dsp_throughput,
        TRAINED,
        table(*(published(row, SAMPLES, 0.7) for row in CUTS[:2])),
        titles=["64 frames of 4096 places", "128 frames of 4096 places"],
        axes=["Samples per second", ""],
        data={
            f"ours {SAMPLES} Ulysses, by frames": [[(2, 2), (4, 4)]],
            f"ours {SAMPLES} Ulysses, by places": [[(2, 1), (4, 2)]],
            f"ours {SAMPLES} DSP": [[(2, 2), (4, 4)]] * 2,
            f"published {SAMPLES} Ulysses, by frames": [[(2, 0.7), (4, 0.7)]],
        },
        legend=["Ulysses, by frames", "Ulysses, by places", "DSP", "published"],
        notes=[],
    ),
    "cuts that lie one over the other are named": Case(
        dsp.draw_dsp_throughput,
        [{**row, "measurement": {"samples_per_s": 1.0}} for row in CUTS],
        notes=["by less than 0.1% and are drawn over each other: 64 frames of 4096 places"],
    ),
    "one device is a marker": Case(
        dsp.draw_dsp_inference,
        FORWARD,
        axes=["Latency of 100 forwards (s)"],
        data={f"ours latency_s {ALONE}": [[(1, 400)]], "ours latency_s DSP": [[(2, 200), (4, 100)]]},
    ),
    "strong and weak scaling": Case(
        dsp.draw_dsp_scaling,
        [*LONG, sized("dsp", 16, 512), sized("dsp", 64, 2048), sized("megatron_sp", 32, 1024, "unsupported")],
        titles=["ST-DiT XL, strong:\n4096K positions", "ST-DiT XL, weak:\n128K positions a GPU"],
        axes=["Tokens per second"],
        data={
            f"ours {TOKENS} DSP": [[(n, 1000 * n) for n in some] for some in ((8, 16, 32), (16, 32, 64))],
            # the length of others did not grow
            f"ours {TOKENS} Ring Attention": [[(n, 1000 * n) for n in (8, 16, 32)]],
        },
        marks={"ours unsupported Megatron-SP": 32},
        notes=["Megatron-SP: unsupported at 32 GPUs (reason of unsupported)"],
    ),
    "bars of memory; a lost one is a mark": Case(
        dsp.draw_dsp_memory,
        MEMORY,
        titles=["ST-DiT XL, 128 frames of 4096 places, 8 GPUs"],
        axes=["Peak memory (GiB)"],
        data={
            f"memory {KEPT} DSP": [32],
            f"memory {KEPT} Megatron-SP": [8],
            f"memory {RECOMPUTED} DSP": [16],
            f"memory {RECOMPUTED} Ulysses": [17],
        },
        marks={f"memory {KEPT} Ulysses": None},
        legend=["Megatron-SP", "Ulysses", "DSP", "out of memory"],
    ),
    "published stands around ours": Case(
        rsa.draw_rsa_table4,
        GROWN,
        table(
            *(published(row, "memory_mb", 8000.0) for row in GROWN[:2]),
            published(GROWN[2], "memory_mb", None, "oom"),
        ),
        titles=["batch 64 to 512, sequence length 512"],
        data={
            f"published memory_mb {TP}": [[(8, 8000), (16, 8000)]],
            f"ours memory_mb {TP}": [[(8, 7000), (16, 7000)]],
        },
        marks={f"ours oom {TP}": 64, f"published oom {TP}": 64},
        legend=[TP, "published", "out of memory", "out of memory, published"],
        notes=[],
    ),
    "pipeline stages": Case(
        rsa.draw_rsa_pipeline,
        [*(staged("tensor_parallel", pp) for pp in (4, 1, 2)), staged("tensor_parallel", 8, "unsupported")],
        titles=["BERT base, sequence length 64"],
        axes=["Largest batch (sequences)"],
        data={
            f"ours batch {TP}": [[(4, 40), (8, 80), (16, 160)]],
            f"ours throughput {TP}": [[(4, 4000), (8, 8000), (16, 16000)]],
        },
        marks={f"ours unsupported {TP}": 32},
        notes=[f"BERT base, sequence length 64, {TP}: unsupported at 32 GPUs (reason of unsupported)"],
    ),
}


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
