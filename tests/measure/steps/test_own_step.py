"""A training step of the user's own: counts by hand arithmetic, phases, lines, classes of ranks, refusals."""

from contextlib import suppress
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode

import spbench
from spbench.bench.errors import UserError
from spbench.bench.measure import with_band
from spbench.bench.measure.engines import own_steps, tracing
from spbench.bench.measure.engines.own_steps import mesh_of
from spbench.bench.measure.steps.step_file import OwnStep
from spbench.bench.measure.steps.step_recorder import StepWatcher
from spbench.bench.measure.trace.recorder import FastRecorder, Recorder
from spbench.bench.tools.changes.judgement import judge
from spbench.bench.tools.changes.result_files import read_results
from spbench.impls import OVER_HOST_LINK
from tests.grid import data, tabled

EXAMPLES = Path(__file__).parents[2] / "examples" / "steps"
HEAD = data(__file__)["HEAD"]


def measured(folder: Path, body: str, world_size: int = 4, **further):
    (folder / "step.py").write_text(HEAD + body)
    return spbench.measure_step(
        f"{folder / 'step.py'}:train", world_size=world_size, cluster="dgx-h100", **further
    )


def sent(step) -> dict[tuple[str, str, str], float]:
    return {
        (row["phase"], row["collective"], row["axis"]): row["sent_bytes"]
        for row in step.measurement.communication
    }


FSDP = data(__file__)["FSDP"]


def test_an_mlp_under_fully_shard_by_hand(tmp_path):
    step = measured(tmp_path, FSDP)
    weights = 4 * 2 * 256 * 1024  # blocks, matrices, elements of each
    assert sent(step) == {
        ("forward", "all_gather", "shard"): 2 * weights * 3 / 4,  # bf16
        ("backward", "all_gather", "shard"): 2 * weights * 3 / 4,
        ("backward", "reduce_scatter", "shard"): 4 * weights * 3 / 4,
    }
    last = step.measurement.by_class[-1]
    assert (last["rank"], last["ranks"], last["step"]) == (0, 4, 2)
    assert last["peak_held"]["parameters"] == 4 * weights // 4
    adam = 2 * 4 * weights // 4
    steps = 8 * 512  # a number for each matrix
    assert last["peak_held"]["optimizer_state"] == adam + steps
    assert str(step.classes) == "ranks 0, 2, 3 of 4 traced; one class"
    assert step.measurement.flops == {
        "model": 6 * weights * 64 * 4,  # 64 rows on each of 4 ranks
        "forward": 2 * weights * 64 * 4,
        "all": 6 * weights * 64 * 4 - 4 * 2 * 64 * 256 * 1024,  # the inputs need no gradient
    }
    marks = [phase for phase, _ in step.classes.traced[0].trace.memory.marks]
    assert marks == ["forward", "backward", "gradient_sync", "optimizer"] * 2
    assert step.fits()
    moments = {"kind": "optimizer_state", "place": "step.py:27", "bytes": adam + steps, "tensors": 24}
    assert moments in step.held()


@pytest.mark.parametrize("name", ["fsdp", "tensor_parallel", "ring_attention", "pipeline", "ddp_by_hand"])
def test_the_plain_recorder_sees_the_same(monkeypatch, name):
    """Results that the fast recorder builds itself are those of FakeTensorMode, operator by operator."""
    step = OwnStep.of(f"{EXAMPLES / name}.py:train")
    cell = spbench.Cell(model=step.name, strategy="own_step", sizes={"dp": 2}, cluster="dgx-h100")
    fast = own_steps.trace_step(step, cell, 1)
    monkeypatch.setattr(FastRecorder, "__torch_dispatch__", Recorder.__torch_dispatch__)
    assert own_steps.trace_step(step, cell, 1).trace.same(fast.trace)


def test_only_building_may_communicate_without_a_meter():
    """Even if building has failed, so that a step after it cannot leave communication out."""
    with tracing.fake_mesh({"dp": 2}, 0) as mesh, FakeTensorMode(), StepWatcher(mesh) as recorder:
        x = torch.zeros(8)
        with suppress(KeyError), recorder.building():
            dist.scatter(x, [x, x])
            raise KeyError
        with recorder.step(last=True), pytest.raises(NotImplementedError):
            dist.scatter(x, [x, x])


def test_its_rows_are_kept_and_compared_as_those_of_cells(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    measured(tmp_path, FSDP).keep(before)
    body = FSDP.replace(
        "        optimizer.step()", "        dist.all_reduce(loss.detach())\n        optimizer.step()"
    )
    measured(tmp_path, body).keep(after)
    (row,) = spbench.read_results(after).to_dict("records")
    assert (row["model"], row["strategy"], row["world_size"]) == ("step.py:train", "own_step", 4)
    assert row["status"] == "ok"
    assert row["step_time_low_s"] < row["step_time_s"] < row["step_time_high_s"]
    judgement = judge(read_results(before), read_results(after, judged=True))
    assert judgement.word == "worse"
    assert "sent_bytes" in {each.quantity for each in judgement.differences}


def test_a_scenario_has_cells_of_steps(tmp_path):
    whole = measured(tmp_path, FSDP)
    (tmp_path / "my.yaml").write_text(
        "title: mine\ngroups: [{step: step.py:train, sizes: {dp: [2, 4]}, cluster: dgx-h100}]"
    )
    frame = spbench.run(tmp_path / "my.yaml", output=tmp_path / "rows", jobs=0)
    assert frame["world_size"].tolist() == [2, 4]
    assert frame["step_time_s"][1] == whole.measurement.step_time_s
    again = spbench.run(tmp_path / "my.yaml", output=tmp_path / "rows", jobs=0)
    assert again["elapsed_s"].tolist() == frame["elapsed_s"].tolist()  # kept
    (tmp_path / "step.py").write_text(HEAD + FSDP.replace("1024", "512"))
    once = {"world_sizes": [4], "clusters": ["dgx-h100"]}
    assert spbench.run(f"{tmp_path}/step.py:train", **once, jobs=0)["key"].tolist() == [frame["key"][1]]
    changed = spbench.run(tmp_path / "my.yaml", output=tmp_path / "rows", jobs=0)
    assert changed["elapsed_s"][1] != frame["elapsed_s"][1]


@tabled(__file__, "what_a_step_does_not_heed_is_refused")
def test_what_a_step_does_not_heed_is_refused(tmp_path, settings, said):
    (tmp_path / "step.py").write_text(HEAD + FSDP)
    group = f"{{step: step.py:train, {settings}}}" if "step:" not in settings else f"{{{settings}}}"
    (tmp_path / "my.yaml").write_text(f"title: mine\ngroups: [{group}]")
    with pytest.raises(UserError, match=said):
        spbench.load_scenario(tmp_path / "my.yaml")


def test_ranks_of_unlike_programs_are_classes(tmp_path):
    body = """
def train():
    model, x = nn.Linear(64, 64), torch.randn(8, 64)
    mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("outer", "inner"))
    def step():
        if mesh.get_local_rank("outer") == 1:
            x.clone()
        model(x).sum().backward()
        for p in model.parameters():
            dist.all_reduce(p.grad, group=mesh.get_group("inner"))
            dist.all_reduce(p.grad, group=mesh.get_group("outer"))
            p.grad = None
    return step
"""
    step = measured(tmp_path, body, 8)
    assert step.classes.ranks == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert {axis for _, _, axis in sent(step)} == {"outer", "inner"}
    assert step.classes.traced[0].mesh == (2, 4)
    assert step.measurement.step_time_s > 0
    assert set(measured(tmp_path, body, 8, ranks=None).classes.tried) == {*range(8)}


def test_two_ranks_that_wait_for_each_other_are_named(tmp_path):
    step = measured(
        tmp_path,
        """
def train():
    x, other = torch.randn(64), 1 - dist.get_rank()
    def step():
        if dist.get_rank() == 0:
            dist.recv(x, other)
            dist.send(x, other)
        else:
            dist.recv(x, other)
            dist.send(x, other)
    return step
""",
        2,
    )
    with pytest.raises(UserError, match=r"never ends: rank 0.* at step\.py:13; rank 1.* at step\.py:16"):
        step.measurement  # noqa: B018


@tabled(__file__, "what_is_on_the_host")
def test_what_is_on_the_host(tmp_path, old, new, copies, host):
    step = measured(tmp_path, FSDP.replace(old, new))
    program = step.classes.traced[0].trace.program
    moved = {name: int(program.nbytes[program.calls_of([name])].sum()) for name in OVER_HOST_LINK}
    assert {name: nbytes for name, nbytes in moved.items() if nbytes} == copies
    assert step.measurement.peak_host_memory_bytes == host
    assert step.measurement.peak_held["parameters"] == 2**21 * ("offload" not in new)


STEP = data(__file__)["STEP"]


@tabled(__file__, "the_users_line_is_named")
def test_the_users_line_is_named(tmp_path, line, said):
    with pytest.raises(UserError) as error:
        measured(tmp_path, STEP.format(line))
    assert said in str(error.value)


@torch.compile
def compiled_before(x):
    return x @ x.T


def test_a_compiled_step_runs_eagerly_and_says_so(tmp_path):
    with pytest.warns(UserWarning, match="torch.compile has no effect in a trace"):
        step = measured(tmp_path, data(__file__)["COMPILED"])
    assert step.measurement.flops["forward"] == 4 * (3 * 2 * 8 * 64 * 64 + 2 * 8 * 8 * 64)
    banded, eager = with_band(step.row)["measurement"], with_band(measured(tmp_path, FSDP).row)["measurement"]
    assert banded["band"].startswith("compiled code priced as eager code: no measured step, so the widest")
    assert "compiled code" in banded["lacks"]
    assert "compiled code" not in eager["lacks"]


def test_what_is_no_step_is_refused(tmp_path):
    with pytest.raises(UserError, match="has no function train"):
        measured(tmp_path, "def trains(): pass")
    with pytest.raises(UserError, match="returns NoneType, and not a callable"):
        measured(tmp_path, "def train(): pass")
    with pytest.raises(UserError, match="cannot be read"):
        spbench.measure_step("nowhere.py:train", world_size=2, cluster="dgx-h100")


def test_a_function_is_a_step_too():
    def train():
        import torch

        weight = torch.randn(4096, 4096, requires_grad=True)

        def step():
            weight.square().sum().backward()
            weight.grad = None

        return step

    step = spbench.measure_step(train, world_size=2, cluster="dgx-h100")
    assert step.cell.model == "test_own_step.py:train"
    assert step.fits("dgx-h100")
    assert step.on("piz-daint-p100").measurement.usable_memory_bytes < 2**34


@tabled(__file__, "the_mesh_of_groups")
def test_the_mesh_of_groups(groups, world, mesh):
    assert mesh_of(groups, world) == (*mesh,)
