"""What the event log counts of the host's work between two events, on either path."""

import pytest
import torch
from torch import nn

from spbench.bench.measure.engines.tracing import fake_mesh
from spbench.bench.measure.simulator.program import HOST_WORK, Program
from spbench.bench.measure.trace.recorder import FastRecorder, Recorder
from spbench.bench.measure.trace.torch_internals import FakeTensorMode
from tests.measure.engines.cells import differing_fields


def one_step(fast: bool) -> Program:
    """A linear layer and an activation in a module, forward and backward, then a value that is read before an
    update, and modules that are called between steps."""
    with fake_mesh({"dp": 1}, 0) as mesh:
        mode = FakeTensorMode()
        recorder = FastRecorder(mode, mesh, events=True) if fast else Recorder(mesh, events=True)
        with mode, recorder:
            module = nn.Sequential(nn.Linear(4, 4), nn.GELU())
            x = torch.empty(2, 4)
            module(x)  # before the step
            with recorder.phase("forward"):
                y = module(x).sum()
            with recorder.phase("backward"):
                y.backward()
            with recorder.phase("optimizer"):
                torch.cpu.synchronize()
                for parameter in module.parameters():
                    parameter.detach().view(-1).add_(1.0)
        assert nn.Module.__call__.__name__ == "_wrapped_call_impl"
        return recorder.events.program()


@pytest.fixture(params=[False, True], ids=["plain", "fast"])
def program(request: pytest.FixtureRequest) -> Program:
    one_step(request.param)
    return one_step(request.param)  # with what the first has remembered


def test_work_stands_at_the_event_that_it_comes_before(program: Program) -> None:
    by_name = {
        (program.names[name], phase): dict(zip(HOST_WORK, host, strict=True))
        for event, (name, host) in enumerate(zip(program.name, program.host.tolist(), strict=True))
        if (phase := program.phase_of(event))
    }
    # the outer module and the linear one, with a transposed weight; then the activation's module
    assert by_name["addmm", "forward"] == {"views": 1, "nodes": 0, "modules": 2, "joins": 0}
    assert by_name["gelu", "forward"] == {"views": 0, "nodes": 0, "modules": 1, "joins": 0}
    assert by_name["sum", "forward"] == {"views": 0, "nodes": 0, "modules": 0, "joins": 0}
    # of the sum, which expands its gradient, and of the activation
    assert by_name["gelu_backward", "backward"] == {"views": 1, "nodes": 2, "modules": 0, "joins": 0}
    assert by_name["mm", "backward"]["nodes"] == 1
    assert program.host[:, HOST_WORK.index("modules")].sum() == 3


def test_the_host_waits_once_before_the_update(program: Program) -> None:
    joins = program.host[:, HOST_WORK.index("joins")]
    assert joins.sum() == 1
    (event,) = joins.nonzero()[0]
    assert (program.names[program.name[event]], program.phase_of(int(event))) == ("add_", "optimizer")


def test_both_paths_count_alike() -> None:
    assert differing_fields(one_step(fast=True), one_step(fast=False)) == []
