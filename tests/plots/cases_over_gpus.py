"""Rows of figures: over lengths and GPUs, of the largest sizes that fit, and bars of bytes, times and
ablations. What is drawn of them stands in figures.yaml."""

from typing import Any

from spbench.plots import dsp, expert_skew, lasp, rsa, splits
from spbench.plots.communication import draw as draw_communication
from spbench.plots.largest import draw_max_seqlen, draw_max_seqlen_today
from spbench.plots.methods import draw as draw_methods
from spbench.plots.style import TIMES
from tests.plots.figure_cases import GIB, TOKENS, Row, formula, sized, skewed, steps
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
    "a column for each backend, a row for each quantity": (lasp.draw_lasp_scalability, SCALED),
    "published numbers are markers, the shortest lost length is a mark below, unstated is nothing": (
        lasp.draw_lasp_scalability,
        [*SCALED, *UNSCALED],
        PUBLISHED,
    ),
    "two readings of one method are two lines beside one published marker": (
        lasp.draw_lasp_speed,
        [*READINGS, *(steps("lasp", "sp", 64, n) for n in LENGTHS)],
        table(*(published(row, TOKENS, 300.0) for row in READINGS if row["cell"]["seq_len"] == 4096)),
    ),
    "metered elements beside the exact formulas, not the paper's": (
        lasp.draw_lasp_communication,
        [*LASP, *RING],
        SENT,
    ),
    "rows that did not run have no metered elements": (
        lasp.draw_lasp_communication,
        LASP,
        table(*(formula(row, "lasp-table1", 100.0, None) for row in LASP)),
    ),
    "a line for each strategy; searches are left out": (
        draw_methods,
        [*ROUND, searched("tensor_parallel", 8, 512)],
    ),
    "batches of one length are columns; strategies without a number are one note; bars": (
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
    ),
    "layouts of one strategy are lines of their own": (
        draw_methods,
        [
            ran("ok", row["measurement"], **{**row["cell"], "sizes": sizes})
            for row in ROUND[:2]
            for sizes in ({"dp": 2, "sp": 4}, {"sp": 8})
        ],
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
    "a panel for each video, a line for each cut": (
        dsp.draw_dsp_throughput,
        TRAINED,
        table(*(published(row, SAMPLES, 0.7) for row in CUTS[:2])),
    ),
    "cuts that lie one over the other are named": (
        dsp.draw_dsp_throughput,
        [{**row, "measurement": {"samples_per_s": 1.0}} for row in CUTS],
    ),
    "one device is a marker": (dsp.draw_dsp_inference, FORWARD),
    "strong and weak scaling": (
        dsp.draw_dsp_scaling,
        [*LONG, sized("dsp", 16, 512), sized("dsp", 64, 2048), sized("megatron_sp", 32, 1024, "unsupported")],
    ),
    "bars of memory; a lost one is a mark": (dsp.draw_dsp_memory, MEMORY),
    "published stands around ours": (
        rsa.draw_rsa_table4,
        GROWN,
        table(
            *(published(row, "memory_mb", 8000.0) for row in GROWN[:2]),
            published(GROWN[2], "memory_mb", None, "oom"),
        ),
    ),
    "pipeline stages": (
        rsa.draw_rsa_pipeline,
        [*(staged("tensor_parallel", pp) for pp in (4, 1, 2)), staged("tensor_parallel", 8, "unsupported")],
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
    "lines are the rows, and a ratio stands where our denominator puts it": (
        draw_max_seqlen,
        [*SEARCHES, LINFORMER],
        CLAIMS,
    ),
    "cells without an answer are marked below": (
        draw_max_seqlen,
        [*SEARCHES, *(searched(strategy, n, None, status) for status, strategy, n in STATUSES)],
    ),
    "a bound without an answer": (
        draw_max_seqlen,
        [{**LINFORMER, "status": "failed", "measurement": {"answer": None}}],
        CLAIMS[1:2].assign(reproduced=None, relative_error=None),
    ),
    "variants are lines of their own": (
        draw_max_seqlen,
        [*SEARCHES, searched("tensor_parallel", 4, 500, variant="all-steps")],
    ),
    "the longest split stands first, with its ratio": (
        splits.draw_max_seqlen_4d,
        SPLIT,
        table({**compared("longest", 1.0, 3328 / 3072, SPLIT[1]["key"], SPLIT[0]["key"]), "published": None}),
    ),
    "a bar for each rung, in the order of switches": (draw_max_seqlen_today, [*RUNGS, *PRICED], PRICES),
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
    "engines that agree share a bar up to the closed form": (
        draw_communication,
        [sender("distributed", 4, 8), sender("virtual", 4, 8)],
    ),
    "other bytes have a bar and a note, also where the sum is the same": (
        draw_communication,
        [sender("distributed", 6, 8), sender("virtual", 5, 7)],
    ),
    "a closed form that is not known is no deviation": (
        draw_communication,
        [sender("virtual", 4, 8, formula=[])],
    ),
    "claims that are exactly met are counted, others are drawn": (
        draw_communication,
        [sender("virtual", 4, 8), sender("distributed", 4, 8, "failed")],
        table(
            *(compared(f"formula {n}", 1e9 + n, 1e9 + n, "a row") for n in range(40)),
            compared("formula that is off", 1e9, 1e9 + 8, "a row"),
            compared("formula not run", 5.0, None, "nowhere"),
        ),
    ),
    "memory, step and the fullest rank by skew, dashed by variant; ep does not multiply GPUs": (
        expert_skew.draw,
        [
            skewed(routing, variant)
            for routing in ("zipf:0", "zipf:1.5")
            for variant in ("dropless", "capacity")
        ]
        + [skewed("even", "dropless")],
    ),
    "splits by time, bytes stacked by axis, memory against the card": (
        splits.draw_four_d,
        [*SPLITS, split("tensor_parallel+ring_self_attention", None, 20.0, tp=16, sp=4)],
    ),
    "ablations": (lasp.draw_lasp_ablation, [*ABLATED, *SAVED]),
}
