"""The memory meter against counts by hand, torch's profiler and autograd's own list of saved tensors."""

import gc
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from spbench.bench.cell import Cell
from spbench.bench.measure.engines import tracing
from spbench.bench.measure.engines.setup import set_up
from spbench.bench.measure.engines.virtual import VirtualEngine
from spbench.bench.measure.memory.allocator import rounded
from spbench.bench.measure.trace.memory_log import MemoryLog
from spbench.bench.measure.trace.recorder import Recorder
from spbench.impls.layout import Unsupported
from tests.cells import make_cell
from tests.measure.engines.cells import cell_of
from tests.slow import slow


@pytest.fixture(scope="module", autouse=True)
def _no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def recorded(program: Callable[[Recorder], None], *, fake: bool) -> MemoryLog:
    recorder = Recorder()
    with FakeTensorMode() if fake else nullcontext(), recorder:
        program(recorder)
    return recorder.memory.stop()


def hand_countable(recorder: Recorder) -> None:
    a = torch.ones(300)  # 0: 1200 B, 1536 as the allocator counts
    recorder.memory.tag([a], "parameters")
    with recorder.phase("forward"):
        b = a * 2  # 1
        c = b + 1  # 2
        d = c.view(10, 30)[2:].transpose(0, 1)  # views have no storage of their own
        c.add_(1).mul_(2)  # nor has what is done in place
        del c
        del b  # -1; c lives in its view
        e = d.sum()  # 3: 4 B, 512
    with recorder.phase("backward"):
        f = torch.empty(1000)  # 4: 4000 B, 4096
        g = f.half()  # 5: 2000 B, 2048; the peak
        nothing = torch.empty(0)  # 6: no bytes
        del f, nothing
    with recorder.phase("optimizer"):
        low, where = g.view(20, 50).max(0)  # 7: 100 B, 512; 8: 400 B, 512
        del g, d, a, e, where, low


@pytest.mark.parametrize("fake", [False, True])
def test_program_counted_by_hand(fake: bool) -> None:
    log = recorded(hand_countable, fake=fake)
    assert log.sizes == [1200, 1200, 1200, 4, 4000, 2000, 0, 100, 400]
    assert log.events == [1, 2, 3, -2, 4, 5, 6, 7, -5, -7, 8, 9, -1, -3, -4, -6, -8, -9]
    assert log.marks == [("forward", 1), ("backward", 5), ("optimizer", 10)]
    assert log.step_start == 1
    assert [log.step_of(event) for event in range(3)] == [0, 1, 1]
    peak = log.peak()
    assert (peak.nbytes, peak.phase) == (1536 + 1536 + 512 + 4096 + 2048, "backward")
    expected = {"parameters": 1536, "activations": 1536 + 512, "temporaries": 4096 + 2048}
    assert {name: held for name, held in peak.held.items() if held} == expected


def test_peak_of_setup_does_not_count() -> None:
    def program(recorder: Recorder) -> None:
        large = torch.empty(10_000)
        del large
        with recorder.phase("forward"):
            torch.empty(10)

    peak = recorded(program, fake=True).peak()
    assert (peak.nbytes, peak.phase) == (512, "forward")


def test_forward_of_what_lives_is_activation_and_what_died_is_temporary() -> None:
    def program(recorder: Recorder) -> None:
        with recorder.phase("forward"):
            died = torch.empty(128)
            lives = died + 1
            del died
            more = torch.empty(256)  # the peak: lives and more
        with recorder.phase("backward"):
            del lives, more

    held = recorded(program, fake=True).peak().held
    assert held["activations"] == 512 + 1024
    assert held["temporaries"] == 0


def test_tags() -> None:
    def program(recorder: Recorder) -> None:
        x, y = torch.empty(128), torch.empty(256)
        memory = recorder.memory
        memory.tag([x.view(2, 64)], "parameters")  # a tensor's tag is its storage's
        memory.tag([x], "optimizer_state", keep=True)
        memory.tag([y], "gradients")
        memory.tag([y], "inputs")
        with recorder.phase("forward"):
            torch.empty(1)

    held = recorded(program, fake=True).peak().held
    assert (held["parameters"], held["optimizer_state"]) == (512, 0)
    assert (held["gradients"], held["inputs"]) == (0, 1024)


def test_rounding() -> None:
    nbytes = np.asarray([0, 1, 512, 513, 2**40 + 1])
    assert rounded(nbytes).tolist() == [0, 512, 512, 1024, 2**40 + 512]


@pytest.mark.parametrize("fake", [False, True])
def test_views_of_nothing_have_no_storage_of_their_own(fake: bool) -> None:
    def program(recorder: Recorder) -> None:
        x = torch.empty(4, 3, 0, 37)
        # torch 2.13's fake tensors: the second shape that is the same in other words
        views = [x.view(0, 37), x.view(-1, 37), torch.ops.aten._unsafe_view(x, [-1, 37])]
        del x, views

    assert recorded(program, fake=fake).events == [1, -1]


def test_address_of_a_dead_storage_can_be_used_again() -> None:
    def program(recorder: Recorder) -> None:
        for _ in range(50):
            torch.empty(1000)

    log = recorded(program, fake=False)
    assert log.sizes == [4000] * 50
    assert log.events == [sign * (n + 1) for n in range(50) for sign in (1, -1)]


# -- against torch's own counts -------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def step_of_mlp(module: Mlp, x: Tensor) -> None:
    module(x).backward()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.sub_(parameter.grad * 0.1)
            parameter.grad = None


def test_peak_is_the_profilers() -> None:
    """The profiler sees every allocation of torch's CPU allocator, from below; the meter sees tensors."""
    torch.manual_seed(0)
    module, x = Mlp(), torch.randn(32, 64)
    step_of_mlp(module, x)  # the first call of an operator may allocate for good
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True) as prof:
        step_of_mlp(module, x)
    events = prof.profiler.kineto_results.events()
    theirs = np.asarray([event.nbytes() for event in events if event.name() == "[memory]"])
    recorder = Recorder()
    for tensor in (*module.parameters(), x):
        recorder.memory.note(tensor)
    with recorder, recorder.phase("forward"):
        step_of_mlp(module, x)
    log = recorder.memory.stop()
    step = np.asarray(log.events[log.step_start :])
    mine = np.sign(step) * np.asarray(log.sizes)[np.abs(step) - 1]
    # the meter does not see the numbers of 4 or 8 bytes that operators make of Python's inside
    mine, theirs = (np.cumsum(changes[np.abs(changes) > 8]) for changes in (mine, theirs))
    assert mine.max() == theirs.max()
    assert mine.tolist() == theirs.tolist()


PLAIN = {"softmax": "plain", "fused_bias_gelu": False, "fused_cross_entropy": False}


@pytest.mark.covering(1)
@pytest.mark.parametrize("model", ["bert-tiny", "bert-tiny-linformer"])
@pytest.mark.parametrize("options", [{}, PLAIN, {"bias_dropout_add": "torchscript"}])
def test_activations_are_what_autograd_saved(model: str, options: dict[str, Any]) -> None:
    cell = Cell(
        model=model, strategy="single", batch=3, seq_len=40, model_options={**options, "dropout": 0.1}
    )
    saved: dict[int, int] = {}

    def pack(x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        saved[storage._cdata] = storage.nbytes()
        return x

    with tracing.fake_mesh(cell.mesh_sizes, 0) as mesh, torch.random.fork_rng(devices=[]):
        recorder = Recorder()
        with recorder:
            training, inputs = set_up(cell, mesh)
            with (
                recorder.phase("forward"),
                torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x),
            ):
                outputs = training.module(inputs)
        log = recorder.memory.stop()
    for tensor in outputs.values():
        pack(tensor)
    for tensor in (*training.module.parameters(), *inputs.values()):
        saved.pop(tensor.untyped_storage()._cdata, None)
    events = log.events[log.step_start :]
    left = {abs(event) for event in events if event > 0} - {abs(event) for event in events if event < 0}
    assert sum(log.sizes[event - 1] for event in left) == sum(saved.values())


def activation_bytes(**changes: object) -> int:
    """Bytes that forward leaves alive."""
    cell = Cell.model_validate({"model": "bert-base", "strategy": "single", "precision": "fp16"} | changes)
    log = tracing.trace(cell).memory
    live = np.cumsum(log.signed_bytes())
    forward = next(span for name, span in log.spans() if name == "forward")
    return int(live[forward.stop - 1] - live[forward.start - 1])


def test_a_layer_holds_what_megatrons_authors_count() -> None:
    """34 BLH + 5 B Z L^2 bytes a layer in half precision (Korthikanti et al., arXiv 2205.05198, equation 1),
    and float32 mean and deviation of two layer norms, which they neglect."""
    batch, length, hidden, heads = 2, 256, 768, 12
    layers = [activation_bytes(batch=batch, seq_len=length, model_options={"layers": n}) for n in (1, 2, 3)]
    published = 34 * batch * length * hidden + 5 * batch * heads * length**2
    assert layers[1] - layers[0] == layers[2] - layers[1] == published + 4 * 4 * batch * length


def test_a_checkpointed_layer_holds_its_input() -> None:
    batch, length, hidden = 2, 256, 768
    layers = [
        activation_bytes(batch=batch, seq_len=length, model_options={"layers": n, "checkpointing": True})
        for n in (1, 2, 3)
    ]
    assert layers[1] - layers[0] == layers[2] - layers[1] == 2 * batch * length * hidden


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("strategy", "axis"), [("tensor_parallel", "tp"), ("ring_self_attention", "sp")])
def test_checkpointing_lowers_the_peak(strategy: str, axis: str) -> None:
    peaks = []
    for checkpointing in (False, True):
        options = {"layers": 6, "checkpointing": checkpointing}
        cell = make_cell("bert-tiny", strategy, {axis: 2}, 8, 128, "fp32", model_options=options)
        peaks.append(tracing.trace(cell).memory.peak())
    assert peaks[1].nbytes < peaks[0].nbytes / 2
    assert peaks[1].held["activations"] < peaks[0].held["activations"] / 2
    assert peaks[1].held["parameters"] == peaks[0].held["parameters"]


@pytest.mark.parametrize("plain", ["", slow("1")])
def test_more_bytes_than_64_bits_count(monkeypatch: pytest.MonkeyPatch, plain: str) -> None:
    """The scores of 2**28 positions are out of memory, those of 2**29 have too large a sum, and of 2**30 not
    even a fake tensor can be."""
    monkeypatch.setenv(tracing.PLAIN_TRACE, plain)
    longs = [
        cell_of("tensor_parallel", 2, batch=1, seq_len=2**n, cluster="piz-daint-p100") for n in (28, 29, 30)
    ]
    assert VirtualEngine().measure(longs[0]).status == "oom"
    shape = re.escape(f"[6, {2**30}, {2**30}]")
    for long, what in zip(longs[1:], ("what is alive at once", f"a tensor of shape {shape}"), strict=True):
        with pytest.raises(Unsupported, match=f"{what} has more bytes than 64 bits count; choose a smaller"):
            VirtualEngine().measure(long)


@pytest.mark.parametrize("events", [False, True])
def test_buffers_of_fully_shard_are_of_its_streams(events: bool) -> None:
    settings = {"model": "causal-transformer-tiny", "strategy": "single", "sizes": {"dp": 2}, "batch": 2}
    cell = Cell.model_validate({**settings, "seq_len": 16, "training": {"backend": "zero3"}})
    log = tracing.trace(cell, 0, events=events).memory
    buffers = {number for number, tag in log.tags.items() if tag == "communication_buffers"}
    died = {-event - 1 for event in log.events if event < 0}
    # weights are made on the stream that copies in, gradients outlive the step
    gathered, reduced = (
        {log.streams[number] for number in each} for each in (buffers & died, buffers - died)
    )
    assert len(gathered) == len(reduced) == 1
    assert 0 not in gathered | reduced
    assert gathered != reduced
    assert {log.streams[number] for number in range(len(log.sizes)) if number not in buffers} == {0}
