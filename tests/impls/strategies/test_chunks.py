"""Attention in rounds of heads (UPipe) and by chunks of the sequence with keys on the host (FPDT): sizes,
what is sent, what is held, and copies that come too early or too late.
The loss of split logits and of gathered ones: what loss parallelism saves. Odysseus: MLPs on each rank's
own positions, with weights that are whole or gathered for each product."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.collectives import gather_from_group
from spbench.impls.kernels.copy_stream import CopyStream
from spbench.impls.kernels.projection import project
from spbench.impls.models.model import model_preset
from spbench.impls.place import ALONE
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.fpdt import FPDT, FPDTOptions
from spbench.impls.strategies.nesting import nesting
from spbench.impls.strategies.odysseus import Odysseus
from spbench.impls.strategies.upipe import rounds_of
from spbench.impls.training.step import default_dtype, initialize
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
    asked: dict[str, Any] = {
        "model": "causal-transformer-tiny",
        "model_options": {"layers": 1, "heads": 16, "hidden": 256, "inner": 32},
        "strategy": strategy,
        "sizes": {"sp": 2},
        "batch": 1,
        "seq_len": 2048,
        "precision": "bf16",
    }
    return Cell.model_validate(asked | changes)


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
    return VirtualEngine().measure(
        Cell.model_validate(
            {
                "model": "causal-transformer-tiny",
                "model_options": {"vocabulary": V, "layers": 1, **model_options},
                "strategy": strategy,
                "strategy_options": {**SPLIT[strategy], "loss": loss},
                "sizes": {"tp": N},
                "batch": B,
                "seq_len": L,
                "precision": "bf16",
            }
        )
    )


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
    cell = Cell.model_validate(
        {
            "model": "causal-transformer-tiny",
            "model_options": {"layers": 1},
            "strategy": "odysseus",
            "strategy_options": options,
            "sizes": {"tp": 4},
            "batch": 1,
            "seq_len": 64,
            "precision": "bf16",
        }
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
