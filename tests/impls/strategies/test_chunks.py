"""Attention in rounds of heads (UPipe) and by chunks of the sequence with keys on the host (FPDT): sizes,
what is sent, what is held, and copies that come too early or too late."""

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.kernels.copy_stream import CopyStream
from spbench.impls.models.model import model_preset
from spbench.impls.place import ALONE
from spbench.impls.strategies.base import Strategy, Unsupported
from spbench.impls.strategies.fpdt import FPDT, FPDTOptions
from spbench.impls.strategies.nesting import nesting
from spbench.impls.strategies.upipe import UPipe, rounds_of
from spbench.impls.training.step import default_dtype, initialize
from tests.impls.models.deferred_streams import Device
from tests.measure.verify.assertions import assert_green
from tests.measure.verify.attention_model import AttentionModel

GROUPED = "causal-transformer-tiny-gqa"  # 12 heads in 4 groups


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("strategy", "options", "sizes"),
    [
        ("upipe", {"heads_a_round": 2}, 3),
        ("upipe", {"heads_a_round": 6}, 2),
        ("fpdt", {"chunk": 9}, 3),  # and a last chunk of 6
        ("fpdt", {"chunk": 4, "offload": False}, 2),
        ("upipe+ring_attention", {"placement": "zigzag"}, {"sp": 2, "cp": 2}),
        ("upipe+ulysses", {"heads_a_round": 6}, {"sp": 2, "cp": 2}),
        ("upipe+fpdt", {"heads_a_round": 6, "chunk": 8}, {"sp": 2, "cp": 2}),
    ],
)
def test_options_are_green(pool: RankPool, strategy: str, options: dict[str, Any], sizes: Any) -> None:
    model = model_preset(GROUPED, {"layers": 1, "recompute": "full"})
    assert_green(pool, Case(nesting(strategy), model, "model", options=options), sizes)


def test_heads_that_are_given_are_sent_in_rounds_by_two_ranks_too(pool: RankPool) -> None:
    assert_green(pool, Case(UPipe, AttentionModel("causal_attention"), "attention"), 2)


def test_heads_are_padded(pool: RankPool) -> None:
    model = model_preset("causal-transformer-tiny", {"layers": 1, "heads": 6})
    assert_green(pool, Case(FPDT, model, "model", options={"pad_heads": True}), 4)


def test_rounds_send_a_group_once() -> None:
    eight = rounds_of(32, 8, 8, 1)  # Llama 3 8B: four queries a group, each a round
    assert (eight.sets, eight.each, eight.keys, eight.queries, eight.runs) == (1, 4, 1, 1, 1)
    replicated = rounds_of(32, 8, 16, 1)  # two ranks have the same keys, and half of their queries each
    assert (replicated.sets, replicated.each, replicated.runs) == (1, 2, 2)
    assert rounds_of(32, 8, 8, 3) is None
    wide = rounds_of(32, 8, 2, 8)
    assert (wide.sets, wide.each, wide.keys, wide.queries) == (2, 1, 2, 4)


@pytest.mark.parametrize(
    ("strategy", "options", "size", "message"),
    [
        (UPipe, {}, 8, "12 attention heads cannot be split over 8 ranks; use 6 or 12, or ulysses with its"),
        (UPipe, {"heads_a_round": 2}, 4, "use heads_a_round 1 or 3"),
        (FPDT, {"chunk": 10}, 4, "chunks of 10 positions cannot be split over 4 ranks; use chunk 8 or 12"),
        (
            FPDT,
            {},
            5,
            "sequence length 24 is not divisible by twice 5 ranks; use a sequence length of 20 or 30",
        ),
        (FPDT, {"chunk": 8}, 8, "12 attention heads cannot be split over 8 ranks; use 6 or 12, or the"),
    ],
)
def test_sizes_that_cannot_be_run(
    strategy: type[Strategy], options: dict[str, Any], size: int, message: str
) -> None:
    plan = strategy.planned(size, options=options)
    with pytest.raises(Unsupported, match=message.replace("(", r"\(")):
        plan.check(model_preset(GROUPED).sites(3, 24))


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
