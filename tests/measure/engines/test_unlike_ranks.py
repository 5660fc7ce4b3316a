"""Ranks of unlike work, from the step of the one that has most, against every rank traced and simulated as a
program of its own; and the FLOPs of all ranks together against those of the model. Which ranks of packed
sequences are traced: the fullest is among them."""

from typing import Any

import numpy as np
import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.clusters.cluster import load_cluster
from spbench.bench.measure.engines.class_traces import ClassTraces
from spbench.bench.measure.engines.plan import rank_classes
from spbench.bench.measure.engines.step_times import checked_flops, forward_flops
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.engines.unlike_ranks import imbalance, marked_axis, work_error
from spbench.bench.measure.engines.virtual import VirtualEngine, trace_classes
from spbench.bench.measure.simulator.lighter_ranks import UnlikeWork
from spbench.bench.measure.simulator.program import Flops
from spbench.bench.measure.simulator.program_builder import ProgramBuilder
from spbench.bench.measure.simulator.simulate import Simulator
from spbench.bench.measure.simulator.steps import Steps
from spbench.bench.measure.simulator.timeline import Timeline
from spbench.impls.observed_work import ALL_LOWER, EVERYONE
from spbench.impls.registries import all_strategies
from spbench.impls.strategies.nesting import nesting
from spbench.impls.strategies.placements import BALANCED
from tests.cells import make_cell
from tests.grid import data, tabled
from tests.measure.engines.cells import supported
from tests.slow import slow

#: large enough that kernels take longer than the card's floor
LLAMA = {
    "model": "llama3-8b",
    "model_options": {"layers": 1, "vocabulary": 1024},
    "batch": 1,
    "seq_len": 2**16,
    "precision": "bf16",
    "cluster": "dgx-h100",
}
TWO_LAYERS = {"model_options": {"layers": 2}}
HYBRID = {"model": "qwen3-next-dense", "model_options": {"layers": 4}, "seq_len": 2**15}
RING = {"strategy": "ring_attention", "sizes": {"sp": 4}}
GATHER = {"strategy": "all_gather_kv", "sizes": {"sp": 4}}
TRAINING = {"micro_batches": 3}
CONTIGUOUS = [
    pytest.param(RING, 0.005, id="ring"),
    pytest.param(GATHER, 0.005, id="gather"),
    slow({"strategy": "ulysses+ring_attention", "sizes": {"sp": 2, "cp": 3}, "seq_len": 3 * 2**14}, 0.005),
    slow(RING | {"sizes": {"sp": 16}}, 0.02),
    slow(GATHER | {"strategy_options": {"gradients": "ring"}}, 0.005),
    slow(RING | {"sizes": {"sp": 2, "dp": 2}, "batch": 2, "training": {"backend": "zero3"}}, 0.005),
    slow(RING | {"model": "tnl-1b", "model_options": {"layers": 1}, "seq_len": 2**14}, 0.02),
    slow({"strategy": "tensor_parallel+ring_attention", "sizes": {"tp": 2, "sp": 4}}, 0.005),
    slow(RING | {"sizes": {"sp": 2, "pp": 2}, "batch": 3, "training": TRAINING} | TWO_LAYERS, 0.005),
    slow(HYBRID | {"strategy": "lasp2h", "sizes": {"sp": 4}}, 0.005),
]


def each_traced(cell: Cell) -> Timeline:
    """The step with every rank as a program of its own."""
    ranks = range(cell.sizes.world)
    programs = [trace(cell, rank, events=True).program for rank in ranks]
    known = [program for program in programs if program is not None]
    attention = trace_classes(cell, events=True).simulator().attention
    return Simulator(
        known, [[rank] for rank in ranks], load_cluster(cell.cluster), cell.precision, attention=attention
    )()


def kernels(timeline: Timeline, rank: int) -> list[str]:
    return [
        event.name
        for event in timeline.events(rank)
        if event.stream == "compute" and not event.name.startswith("wait")
    ]


@pytest.mark.parametrize(("changes", "tolerance"), CONTIGUOUS)
def test_one_trace_says_what_each_rank_does(changes: dict[str, Any], tolerance: float) -> None:
    """The step takes as long, each rank runs the same kernels, and has the same parts of the step but for
    what messages between lighter ranks gain by going sooner."""
    cell = Cell.model_validate(LLAMA | changes)
    traces = trace_classes(cell, events=True)
    assert marked_axis(cell) in ("sp", "cp")
    assert len(traces.classes) == cell.sizes.pp
    ours, theirs = traces.simulator()(), each_traced(cell)
    assert ours.step_time_s == pytest.approx(theirs.step_time_s, rel=1e-9)
    assert ours.flops == pytest.approx(theirs.flops, rel=1e-12)
    assert max(theirs.by_rank["compute"]) > 1.1 * theirs.by_rank["compute"].mean()
    for name, seconds in theirs.by_rank.items():
        if name != "hidden_communication":
            away = np.abs(ours.by_rank[name] - seconds).mean() / theirs.step_time_s
            assert away < tolerance, name
    whole = sum(seconds for name, seconds in ours.by_rank.items() if name != "hidden_communication")
    assert whole == pytest.approx(ours.step_time_s)
    if "all_gather_kv" not in cell.strategy and cell.strategy != "lasp2h":
        for rank in {0, cell.sizes.world // 2, cell.sizes.world - 1}:
            assert kernels(ours, rank) == kernels(theirs, rank)


def test_a_staircase_and_level_bars() -> None:
    """Contiguous, rank r computes with r + 1 blocks and waits for the last; zigzag, all compute alike."""
    contiguous = trace_classes(Cell.model_validate(LLAMA | RING), events=True).simulator()()
    stairs = np.diff(contiguous.by_rank["compute"])
    assert stairs == pytest.approx([stairs[0]] * 3)
    assert stairs[0] > 0.1 * contiguous.step_time_s
    assert (np.diff(contiguous.by_rank["bubble"]) < 0).all()
    zigzag = Cell.model_validate(LLAMA | RING | {"strategy_options": {"placement": "zigzag"}})
    level = trace_classes(zigzag, events=True).simulator()().by_rank["compute"]
    assert (level == level[0]).all()
    assert (imbalance(zigzag), work_error(zigzag)) == (None, None)


def test_where_a_program_is_long_some_ranks_stand_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """What grows evenly with the rank has the same mean."""
    traces = trace_classes(Cell.model_validate(LLAMA | RING | {"sizes": {"sp": 16}}), events=True)
    exact = traces.simulator()()
    assert len(set(exact.by_rank["compute"].tolist())) == 16
    monkeypatch.setattr("spbench.bench.measure.simulator.lighter_ranks._MOST_TIMES", 0)
    some = traces.simulator()()
    assert len(set(some.by_rank["compute"].tolist())) == 2
    assert some.flops == exact.flops
    assert some.breakdown["compute_s"] == pytest.approx(exact.breakdown["compute_s"])
    assert some.breakdown["bubble_s"] == pytest.approx(exact.breakdown["bubble_s"], rel=0.05)


def test_a_class_that_does_not_mark_its_work_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a strategy of a plug-in: more classes, the same FLOPs."""
    cell = Cell.model_validate(LLAMA | RING)
    one = VirtualEngine().measure(cell)
    monkeypatch.setattr(nesting("ring_attention").classes[0], "marks_work", False)
    assert [each.ranks for each in rank_classes(cell)] == [(3,), (2,), (1,), (0,)]
    four = VirtualEngine().measure(cell)
    assert four.flops == pytest.approx(one.flops)
    assert four.step_time_s == pytest.approx(one.step_time_s)
    assert four.breakdown["compute_s"] == pytest.approx(one.breakdown["compute_s"])


MODELS = data(__file__)["MODELS"]
#: of ranks together over the model, the most that undivided and padded layers of such small models add
MOST_REPEATED = 1.08
NESTED = ("ulysses+ring_attention", "tensor_parallel+all_gather_kv", "megatron_sp+ring_attention")


def cells_of(strategy: str, model: str) -> list[Cell]:
    """Those of a model, under each placement that the strategy has, that can be run."""
    placements = getattr(nesting(strategy).options_type, "placements", ())
    axes = nesting(strategy).axes
    settings = {
        "model": model,
        "seq_len": MODELS[model],
        "batch": 2,
        "precision": "bf16",
        "cluster": "dgx-h100",
        "strategy": strategy,
        "sizes": dict.fromkeys(axes, 3 if len(axes) == 1 else 2),
    }
    options = [{"placement": p} for p in placements if p not in BALANCED] or [{}]
    cells = [Cell.model_validate({**settings, "strategy_options": each}) for each in options]
    return [cell for cell in cells if supported(cell)]


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", [*all_strategies(), *NESTED])
def test_ranks_together_have_the_work_of_the_model(strategy: str, model: str) -> None:
    """MFU x peak x ranks x step time is the model's FLOPs; ranks repeat little of each other's work, nothing
    of causal attention, and leave nothing out."""
    for cell in cells_of(strategy, model):
        found, flops = VirtualEngine().measure(cell), forward_flops(cell)
        assert (found.status, found.reason) == ("ok", "")
        peak = load_cluster("dgx-h100").device.peak_flops_per_s["bf16"].value
        utilized = found.mfu * peak * cell.sizes.world * found.step_time_s
        assert utilized == pytest.approx(found.flops["model"]) == 3 * flops.forward
        assert 1 - 1e-9 < found.flops["forward"] / flops.forward < MOST_REPEATED


def test_the_flops_of_a_model_are_those_of_its_closed_form() -> None:
    """Two for each weight of a product and token; and four, for scores and values, for each pair that a
    causal mask leaves and feature."""
    cell = Cell(model="llama3-8b", strategy="single", batch=3, seq_len=512, precision="bf16")
    hidden, inner, layers, vocabulary, key_value = 4096, 14336, 32, 128256, 1024
    weights = layers * hidden * (2 * hidden + 2 * key_value + 3 * inner) + hidden * vocabulary
    attention = layers * 4 * hidden * 3 * 512 * 513 // 2
    found = forward_flops(cell)
    assert found.attention == attention
    assert found.forward == 2 * weights * 3 * 512 + attention


@tabled(__file__, "other_work_is_a_mismatch")
def test_other_work_is_a_mismatch(changed: dict[str, float], reason: str) -> None:
    """The first is what one class of ranks for all of a contiguous ring had."""
    cell = Cell.model_validate(LLAMA | RING)
    model = forward_flops(cell)
    metered = Flops(model.forward, model.attention, 4 * model.forward)
    assert checked_flops(cell, metered)[1] == ""
    wrong = metered._replace(**{name: share * getattr(model, name) for name, share in changed.items()})
    assert reason in checked_flops(cell, wrong)[1]


@pytest.mark.parametrize(("capacity", "reason"), [(None, "of forward"), (1.0, "")])
def test_ranks_with_capacity_may_do_less_than_one_device(capacity: float | None, reason: str) -> None:
    """Each drops the tokens that exceed its own share, where one device drops by the shares of all."""
    experts = {"model": "moe-tiny", "model_options": {"routing": "zipf:0", "capacity": capacity}}
    mesh = {"strategy": "ulysses", "sizes": {"sp": 2, "ep": 2}, "cluster": "dgx-h100", "precision": "bf16"}
    cell = Cell.model_validate(experts | mesh | {"batch": 1, "seq_len": 64})
    model = forward_flops(cell)
    less = Flops(0.99 * model.forward, model.attention, 4 * model.forward)
    problem = checked_flops(cell, less)[1]
    assert reason in problem
    assert bool(problem) == bool(reason)


def test_a_rank_that_stands_for_unlike_ones_is_a_mismatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spbench.bench.measure.engines.class_traces.marked_axis", lambda cell: None)
    traces: ClassTraces = trace_classes(Cell.model_validate(LLAMA | RING), events=True)
    found = traces.measurement()
    assert found.status == "mismatch"
    assert "a rank stands for others that have other work" in found.reason


def test_blocks_of_lower_ranks_between_what_everyone_does() -> None:
    """The last of three ranks works on the nearest rank's block, then on the first's; the middle one has the
    first of these kernels alone, and half of what is done at once for all lower ranks."""
    b = ProgramBuilder((1, 1, 1, 3))
    for whose in (EVERYONE, 2, EVERYONE, 2, EVERYONE, ALL_LOWER):
        b.work_of(whose)
        b.kernel("mm", flops=1)
    work = UnlikeWork(Steps(b.program(), np.arange(3), np.arange(3)), 3, 2)
    shares = [work.weights(coordinate).tolist() for coordinate in range(3)]
    assert shares == [[1, 0, 1, 0, 1, 0], [1, 1, 1, 0, 1, 0.5], [1] * 6]


@pytest.mark.parametrize("strategy", ["lasp", "lasp2"])
def test_the_peak_is_that_of_the_rank_with_most_parts_of_documents(strategy: str) -> None:
    """A state begins anew in each, and is kept; the third of four ranks has most, the others few."""
    options = {"layers": 1, "documents": [33, 1, 1, 1, 1, 27]}
    cell = make_cell("tnl-tiny", strategy, {"sp": 4}, 1, 64, "fp32", model_options=options)
    peaks = [trace(cell, rank).memory.peak().nbytes for rank in range(4)]
    assert peaks.index(max(peaks)) == 2
    assert trace_classes(cell).measurement().peak_memory_bytes == peaks[2] > max(peaks[:2] + peaks[3:])
