"""Attention in rounds of heads (UPipe) and by chunks of the sequence with keys on the host (FPDT): sizes,
what is sent, what is held, and copies that come too early or too late.
The loss of split logits and of gathered ones: what loss parallelism saves. Odysseus: MLPs on each rank's
own positions, with weights that are whole or gathered for each product.
DSP: its plans, its primitives on real ranks, and steps on grids that ranks do not divide.
docs/add_strategy.md lists hooks, kinds of sites and collectives as the code has them."""

import math
import re
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

import spbench
from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.collectives import gather_from_group
from spbench.impls.kernels.copy_stream import CopyStream
from spbench.impls.kernels.projection import project
from spbench.impls.layout import MEETINGS, SITE_KINDS
from spbench.impls.place import ALONE, Place
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.dsp import DynamicSequenceParallel, plan_switches, switched_elements
from spbench.impls.strategies.fpdt import FPDT, FPDTOptions
from spbench.impls.strategies.grid import Grid, part_of
from spbench.impls.strategies.nesting import nesting
from spbench.impls.strategies.odysseus import Odysseus
from spbench.impls.strategies.upipe import rounds_of
from spbench.impls.training.step import default_dtype, initialize
from tests.cells import make_cell
from tests.impls.models.deferred_streams import Device
from tests.measure.verify.assertions import assert_red

GROUPED = "causal-transformer-tiny-gqa"  # 12 heads in 4 groups


def test_rounds_send_a_group_once() -> None:
    eight = rounds_of(32, 8, 8, 1)  # Llama 3 8B: four queries a group, each a round
    assert (eight.sets, eight.each, eight.keys, eight.queries, eight.runs) == (1, 4, 1, 1, 1)
    replicated = rounds_of(32, 8, 16, 1)  # two ranks have the same keys, and half of their queries each
    assert (replicated.sets, replicated.each, replicated.runs) == (1, 2, 2)
    assert rounds_of(32, 8, 8, 3) is None
    wide = rounds_of(32, 8, 2, 8)
    assert (wide.sets, wide.each, wide.keys, wide.queries) == (2, 1, 2, 4)


def cell(strategy: str, **changes: Any) -> Cell:
    fields = {"model_options": {"layers": 1, "heads": 16, "hidden": 256, "inner": 32}} | changes
    return make_cell("causal-transformer-tiny", strategy, {"sp": 2}, 1, 2048, **fields)


def messages(asked: Cell) -> Counter[tuple[str, int]]:
    """How many all-to-alls of which bytes, by phase and bytes."""
    counts = tracing.trace(asked).communication.counts
    return Counter(
        {(op.phase, op.payload_bytes): n for op, n in counts.items() if op.collective == "all_to_all"}
    )


def test_rounds_send_the_bytes_of_ulysses_in_more_messages() -> None:
    whole, rounds = messages(cell("ulysses")), messages(cell("upipe"))
    (_, payload), *_ = whole
    assert whole == {("forward", payload): 4, ("backward", payload): 4}
    assert rounds == {("forward", payload // 8): 4 * 8, ("backward", payload // 8): 8 * 8}
    chunks = messages(cell("fpdt", strategy_options={"chunk": 512}))
    assert chunks == {("forward", payload // 4): 4 * 4, ("backward", payload // 4): 4 * 4}


def test_rounds_and_chunks_hold_less_than_ulysses() -> None:
    peaks = {name: tracing.trace(cell(name)).memory.peak().nbytes for name in ("ulysses", "upipe")}
    peaks["fpdt"] = tracing.trace(cell("fpdt", strategy_options={"chunk": 256})).memory.peak().nbytes
    activations = 1024 * 256 * 2  # [L/N, H] in bfloat16
    # in Ulysses queries, keys and values are whole, beside one of them in a message
    assert peaks["upipe"] < peaks["ulysses"] - 2 * activations
    assert peaks["fpdt"] < peaks["upipe"], peaks


def gradients(device: Device | None, strategy: Strategy) -> dict[str, Tensor]:
    """Gradients of gpt3-tiny by parameter, on one rank, whose sequence is cut in chunks."""
    model = model_preset("gpt3-tiny", {"layers": 2, "dropout": 0.0, "attention_dropout": 0.0})
    with default_dtype(torch.float64):
        module = model.build(strategy, 16)
        initialize(module, 0, deviation=0.3)
        batch = model.inputs(2, 16, torch.Generator().manual_seed(0))
        with device or nullcontext():
            module(batch)["loss"].backward()
    return {name: p.grad for name, p in module.named_parameters() if p.grad is not None}


def chunked() -> FPDT:
    return FPDT(ALONE, FPDTOptions(chunk=4))


def differences(found: dict[str, Tensor], expected: dict[str, Tensor]) -> list[str]:
    assert found.keys() == expected.keys()
    return [n for n, x in expected.items() if not torch.allclose(found[n], x, rtol=1e-10, atol=1e-14)]


def test_copies_as_late_as_streams_allow_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = gradients(None, Strategy())
    assert differences(gradients(None, chunked()), expected) == []
    late = Device(monkeypatch)
    assert differences(gradients(late, chunked()), expected) == []
    assert late.faults == []
    assert late.copied > 2 * 4 * 5  # of each chunk of a layer q, k, v, o and its denominators at least


def deaf(stream: str) -> Callable[[Device, pytest.MonkeyPatch], None]:
    def plant(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
        device.deaf.add(stream)

    return plant


def gives_up_at_once(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is copied to the host is freed while it is copied."""
    to_host = CopyStream.to_host

    def forgets(self: CopyStream, *of: Any, **to: Any) -> Tensor:
        host = to_host(self, *of, **to)
        self._leaving.clear()
        return host

    monkeypatch.setattr(CopyStream, "to_host", forgets)


def does_not_wait(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys are attended to before they have come."""
    monkeypatch.setattr(CopyStream, "wait", lambda self: self._leaving.clear())


@pytest.mark.parametrize("plant", [deaf("compute"), deaf("copies"), gives_up_at_once, does_not_wait])
def test_a_wait_that_is_left_out_is_seen(
    plant: Callable[[Device, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = gradients(None, Strategy())
    device = Device(monkeypatch)
    plant(device, monkeypatch)
    assert differences(gradients(device, chunked()), expected) or device.faults


#: strategy -> the options with which it splits the vocabulary
SPLIT: dict[str, dict[str, str]] = {"tensor_parallel": {}, "megatron_sp": {"vocabulary": "split"}}
B, L, V, N = 2, 64, 1024, 4


def measured(strategy: str, loss: str, **model_options: Any) -> Any:
    options = {"vocabulary": V, "layers": 1, **model_options}
    split = {**SPLIT[strategy], "loss": loss}
    fields = {"model_options": options, "strategy_options": split}
    return VirtualEngine().measure(make_cell("causal-transformer-tiny", strategy, {"tp": N}, B, L, **fields))


@pytest.mark.parametrize("cross_entropy", ["plain", "fused", "loss_parallel"])
@pytest.mark.parametrize("strategy", SPLIT)
def test_gathered_logits_take_bytes_and_memory(strategy: str, cross_entropy: str) -> None:
    parallel, gathered = (
        measured(strategy, loss, cross_entropy=cross_entropy) for loss in ("parallel", "gathered")
    )
    assert parallel.formula_difference == gathered.formula_difference == []
    (logits,) = (row for row in gathered.formula if row["purpose"] == "logits")
    assert (logits["collective"], logits["payload_bytes"]) == ("all_gather", B * L * V * 2)
    assert not any(row["purpose"] == "logits" for row in parallel.formula)
    assert not any(row["purpose"] == "cross entropy" for row in gathered.formula)
    # in place of a part, every rank has all logits in float32 for the loss
    assert gathered.peak_memory_bytes - parallel.peak_memory_bytes > B * L * V * (1 - 1 / N) * 4


def test_logits_gathered_in_full_precision_take_twice_the_bytes() -> None:
    """Automodel's masked loss, ``full_tensor()`` of what ``float()`` made; and in half precision neither the
    log-softmax nor its gradients are larger than the logits."""
    kinds = ("gathered", "plain"), ("gathered_float32", "plain"), ("gathered", "as_given")
    half, whole, given = (measured("tensor_parallel", loss, cross_entropy=way) for loss, way in kinds)
    assert half.formula_difference == whole.formula_difference == given.formula_difference == []
    (logits,) = (row for row in whole.formula if row["purpose"] == "logits")
    assert logits["payload_bytes"] == B * L * V * 4
    # three tensors of all logits at once in backward, each of two bytes less
    assert 5 * B * L * V < half.peak_memory_bytes - given.peak_memory_bytes < 7 * B * L * V


def test_the_loss_of_torch_takes_whole_logits() -> None:
    with pytest.raises(Unsupported, match=r"use strategy_options\.loss gathered"):
        measured("megatron_sp", "parallel", cross_entropy="as_given")


def test_held_logits_live_through_backward() -> None:
    held, freed = (measured("tensor_parallel", "gathered", logits_held=way) for way in ("as_made", "none"))
    part = B * L * V // N * 2
    assert held.peak_memory_bytes - freed.peak_memory_bytes == part


def test_whole_logits_cannot_be_gathered() -> None:
    with pytest.raises(ValueError, match="use it with vocabulary: split"):
        nesting("megatron_sp").options_type(loss="gathered")


def test_the_loss_of_torch_has_four_tensors_at_once() -> None:
    """torch's ``loss_parallel`` works in nothing in place; beside a copy that is worked in stands the
    gradient in half precision alone."""
    in_place, beside = (
        measured("tensor_parallel", "parallel", cross_entropy=way).peak_memory_bytes
        for way in ("fused", "loss_parallel")
    )
    part = B * L * V // N * 4
    assert 2.4 * part < beside - in_place < 2.6 * part


class _OwnGradientAlone(Odysseus):
    """A rank keeps its rows of a gathered weight's gradient from its own positions, and adds no other's."""

    def times_gathered(self, x: Tensor, weight: Tensor, dim: int) -> Tensor:
        return project(x, gather_from_group(weight, dim, self.group))


def test_a_gradient_of_one_ranks_positions_is_seen(pool: RankPool) -> None:
    preset = model_preset(GROUPED, {"layers": 1})
    case = Case(_OwnGradientAlone, preset, "model", options={"mlp": "gathered"})
    assert_red(pool, case, 2, "gradient of blocks.0.mlp")


def sent(**options: Any) -> Counter[tuple[str, str]]:
    """Payload bytes by purpose and phase, of a layer in bfloat16."""
    cell = make_cell(
        "causal-transformer-tiny",
        "odysseus",
        {"tp": 4},
        1,
        64,
        model_options={"layers": 1},
        strategy_options=options,
    )
    found = VirtualEngine().measure(cell)
    assert (found.status, found.formula_difference) == ("ok", [])
    payloads: Counter[tuple[str, str]] = Counter()
    for row in found.formula:
        payloads[row["purpose"], row["phase"]] += row["payload_bytes"]
    return payloads


def test_an_mlp_sends_its_weights_or_nothing() -> None:
    whole, gathered = sent(), sent(mlp="gathered")
    assert {key: nbytes for key, nbytes in gathered.items() if key not in whole} == {
        ("weights of an MLP", "forward"): 3 * 48 * 96 * 2,
        ("weights of an MLP, again", "backward"): 3 * 48 * 96 * 2,
        ("gradient of an MLP's weights", "backward"): 3 * 48 * 96 * 2,
    }
    # of activations, attention's alone
    assert whole["input of a block", "forward"] == 64 * 48 * 2
    assert whole["gradient of a block's output", "backward"] == 64 * 48 * 2


def test_a_gathered_mlp_has_no_biases() -> None:
    model = model_preset("gpt3-tiny")
    planned = Odysseus.planned(2, options={"mlp": "gathered"})
    with pytest.raises(Unsupported, match="mlp: gathered has no biases, which this model's MLPs have"):
        planned.check_sizes(model.sites(1, 8, 2))
    assert isinstance(Strategy.planned(1).of_mlp, Strategy)


# -- plans -------------------------------------------------------------------------------------------


def spent(cut: list[int | None], sizes: tuple[int, ...], parts: int) -> int:
    """Positions that a rank puts into the all-to-alls of a way to cut."""
    return sum(
        switched_elements(sizes, parts, before, after)
        for before, after in pairwise(cut)
        if before is not None and after is not None and before != after
    )


@given(st.data())
@settings(max_examples=150, deadline=None, derandomize=True, database=None)
def test_no_way_is_cheaper_than_the_plan(data: st.DataObject) -> None:
    sizes = tuple(data.draw(st.lists(st.integers(1, 7), min_size=2, max_size=4)))
    dims = st.integers(0, len(sizes) - 1)
    stages = data.draw(st.lists(dims, min_size=1, max_size=4))
    parts, first, last = (data.draw(x) for x in (st.integers(2, 5), st.none() | dims, st.none() | dims))
    plan = plan_switches(stages, sizes, parts, first, last)
    assert all(cut != needed for cut, needed in zip(plan, stages, strict=True))
    ways = [
        [*cut]
        for cut in product(range(len(sizes)), repeat=len(stages))
        if all(c != needed for c, needed in zip(cut, stages, strict=True))
    ]
    cheapest = min(spent([first, *way, last], sizes, parts) for way in ways)
    assert spent([first, *plan, last], sizes, parts) == cheapest


def test_of_two_dims_each_stage_switches() -> None:
    """Section 3.3 of the paper: a message of M/N before every stage but the first, and one at the end."""
    plan = plan_switches([1, 0] * 3, (8, 16), 4, 0, 0)
    assert plan == [0, 1] * 3
    assert spent([0, *plan, 0], (8, 16), 4) == 6 * 8 * 16 // 4


def test_padding_is_paid_for() -> None:
    """The dim that ranks divide is the cheaper of two that would do."""
    assert plan_switches([0], (4, 5, 4), 4, first=0) == [2]
    assert switched_elements((4, 5, 4), 4, 0, 1) == 4 * 1 * 2 * 4


def test_one_dim_has_no_plan() -> None:
    with pytest.raises(Unsupported, match=r"one dim .* use ulysses or ring_attention"):
        plan_switches([0], (8,), 2)


# -- primitives --------------------------------------------------------------------------------------

#: which 2, 3 and 4 ranks do not divide, and of whose 5 places 4 ranks have 2, 2, 1 and none
SIZES = (5, 3, 4)


def whole_tensor(seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, *SIZES, 3, generator=generator, dtype=torch.float64)


def errors_of_switches(mesh: DeviceMesh) -> float:
    """Largest error of values and gradients: after a switch a rank has what a split would have given it."""
    dsp, worst = DynamicSequenceParallel(Place.on(mesh)), 0.0
    for before, after in product(range(len(SIZES)), repeat=2):
        x, gradient = whole_tensor().requires_grad_(), whole_tensor(1)
        switched = dsp.switch(dsp.split(x, before), before, after)
        assert (switched.sharded, switched.index) == (after, dsp.rank)
        worst = max(worst, _difference(switched.x, dsp.split(whole_tensor(), after).x))
        (switched.x * dsp.split(gradient, after).x).sum().backward()
        worst = max(worst, _difference(x.grad, _alone(dsp, gradient, before)))
    return worst


def errors_of_gathers(mesh: DeviceMesh) -> float:
    """The same of a gather, whose whole each rank uses in its own way."""
    dsp, worst = DynamicSequenceParallel(Place.on(mesh)), 0.0
    for dim in range(len(SIZES)):
        x = whole_tensor().requires_grad_()
        whole = dsp.gather(dsp.split(x, dim))
        worst = max(worst, _difference(whole, whole_tensor()))
        uses = [whole_tensor(2 + rank) for rank in range(dsp.size)]
        (whole * uses[dsp.rank]).sum().backward()
        worst = max(worst, _difference(x.grad, _alone(dsp, torch.stack(uses).sum(0), dim)))
    return worst


def _alone(dsp: DynamicSequenceParallel, x: Tensor, dim: int) -> Tensor:
    """x with zeros but for this rank's part along a grid dim."""
    first, count = part_of(SIZES[dim], dsp.size, dsp.rank)
    kept = torch.zeros(SIZES[dim], dtype=x.dtype)
    kept[first : first + count] = 1
    return x * kept.view(-1, *[1] * (x.ndim - 2 - dim))


def _difference(a: Tensor, b: Tensor) -> float:
    if a.shape != b.shape:
        return math.inf
    return (a - b).abs().max().item() if a.numel() else 0.0


@pytest.mark.one_in(2)
@pytest.mark.parametrize("n", [2, 3, 4])
def test_switch_and_gather_give_what_a_split_would(pool: RankPool, n: int) -> None:
    assert max(pool.run({"sp": n}, errors_of_switches)) == 0
    assert max(pool.run({"sp": n}, errors_of_gathers)) < 1e-12


def messages_of_wrong_switches(mesh: DeviceMesh) -> list[str]:
    dsp = DynamicSequenceParallel(Place.on(mesh))
    grid, messages = dsp.split(whole_tensor(), 1), []
    for wrong in (
        lambda: dsp.switch(grid, 0, 2),
        lambda: dsp.switch(Grid(whole_tensor(), SIZES), None, 0),
        lambda: dsp.along(grid, 2, 2),
        lambda: Grid(grid.x, SIZES, 0, dsp.size, dsp.rank),
    ):
        with pytest.raises(ValueError) as raised:
            wrong()
        messages.append(str(raised.value))
    return messages


def test_wrong_switches_are_errors(pool: RankPool) -> None:
    for messages in pool.run({"sp": 2}, messages_of_wrong_switches):
        wrong_dim, whole, same_dim, wrong_part = messages
        assert wrong_dim == "the grid is cut along dim 1, not along dim 0"
        assert whole == "the grid is cut along dim None, not along dim None"
        assert same_dim == "a stage along dim 2 cannot have the grid cut along dim 2"
        assert "sharded along dim 0, is" in wrong_part


def test_one_device_switches_nothing() -> None:
    dsp = DynamicSequenceParallel()
    grid = dsp.split(whole_tensor(), 0)
    assert dsp.along(grid, 0, None) is grid
    assert dsp.restored(grid) is grid
    assert torch.equal(dsp.gather(grid), whole_tensor())


@pytest.mark.parametrize(("size", "parts"), [(5, 4), (1, 3), (9, 4), (8, 4)])
def test_parts_are_all_and_no_more(size: int, parts: int) -> None:
    held = [part_of(size, parts, index) for index in range(parts)]
    assert [place for first, count in held for place in range(first, first + count)] == [*range(size)]


# -- steps -------------------------------------------------------------------------------------------


PAGE = Path(__file__).parents[3] / "docs" / "add_strategy.md"
ROWS = [
    [set(re.findall(r"`(\w+)`", cell)) for cell in line.split("|")[1:-1]]
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ")
]


def is_hook(name: str, value: Any) -> bool:
    function = value.fget if isinstance(value, property) else getattr(value, "__func__", value)
    return not name.startswith("_") and not getattr(function, "__final__", False)


def hooks() -> set[str]:
    ours = [cls for cls in Strategy.__mro__ if cls.__module__.startswith("spbench.")]
    return {name for cls in ours for name, value in vars(cls).items() if is_hook(name, value)}


def test_every_hook_is_on_the_page() -> None:
    listed = [row[1] for row in ROWS if len(row) == 3 and not row[0] and not row[2]]
    assert sorted(name for names in listed for name in names) == sorted(hooks())


def test_every_kind_of_site_is_on_the_page() -> None:
    (row,) = (row for row in ROWS if len(row) == 3 and all(row))
    assert row[0] == set(MEETINGS)
    assert row[1] <= hooks()
    assert set.union(*row) == SITE_KINDS


def test_collectives_lists_what_it_has_for_strategies_alone() -> None:
    listed = {name for row in ROWS if len(row) == 4 for name in row[0]}
    assert {"all_gather", "reduce_scatter"} < listed <= set(dir(spbench.collectives))
    assert not {"Any", "torch", "dist"} & set(dir(spbench.collectives))


def test_a_misspelt_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="a site cannot be 'attenton'; its kind is one of attention"):
        spbench.Site("attenton", 1)  # type: ignore[arg-type]
    with pytest.raises(
        TypeError, match=r"Misspelt.meets has 'attenton', where positions cannot meet; choices: "
    ):
        type("Misspelt", (Strategy,), {"meets": frozenset({"attenton"})})
