"""What memory switches cost: steps with and without each, on made-up times and on traces."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, cast

import pytest

from spbench.bench.cell import Cell, TrainingOptions
from spbench.bench.measure.scenarios.scenario import changed
from spbench.bench.measurement import Outcome
from spbench.bench.tools.advise.look import BY_KERNEL, look
from spbench.bench.tools.advise.switch_prices import SwitchPrice, by_kernel, other_kernels, prices
from spbench.bench.tools.fit.asking import Task
from spbench.bench.tools.fit.subject import ATTENTION
from tests.tools.advise.questions import asked

GIB = 2**30
#: what each option multiplies a step's time by, and the GiB that it takes off a peak of 64
MADE_UP = {
    "cross_entropy": (0.99, 4),
    "recompute": (1.3, 20),
    "checkpoints": (1.01, 3),
    "optimizer": (1.1, 8),
    "parameters": (1.05, 2),
    "mlp_tile": (1.04, 5),
    "loss_tile": (0.995, 0),
    "state_dtype": (1.0, -1),
}


class MadeUp:
    """In place of :class:`Asking`."""

    def __init__(self, refused: Any = ()):
        self.refused = refused
        self.depths: set[str] = set()

    def __call__(self, tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        for task in tasks:
            cell, run = task.cell, cast(Any, task.run)
            self.depths.add(run.keywords["depth"])
            on = {**cell.model_options, **cell.training.backend_options}
            known = [MADE_UP[name] for name in on if name in MADE_UP]
            if any(name in on for name in self.refused):
                yield task, Outcome("unsupported", "no rate")
            else:
                peak = (64 - sum(gib for _, gib in known)) * GIB
                times = math.prod(factor for factor, _ in known)
                yield task, Outcome("oom", measurement={"step_time_s": times, "peak_memory_bytes": peak})


def layout(options: dict[str, Any], **training: Any) -> Cell:
    cell = asked(8).cell
    backend = TrainingOptions.model_validate({"backend": "zero3", **training})
    return cell.model_copy(update={"model_options": {**cell.model_options, **options}, "training": backend})


def of(found: list[SwitchPrice], used: bool) -> dict[str, tuple[float, float]]:
    return {
        each.settings: (pytest.approx(each.ratio), each.saved_bytes / GIB)
        for each in found
        if each.used is used
    }


def test_each_switch_of_a_layout_beside_those_before_it() -> None:
    cell = layout({"cross_entropy": "in_place", "recompute": "full", "checkpoints": "host"}, optimizer="host")
    answers: Any = MadeUp()
    found = prices(asked(8), cell, answers)
    assert of(found, True) == {
        "training.optimizer=host": (1.1, 8),
        "model_options.cross_entropy=in_place": (0.99, 4),
        "model_options.recompute=full": (1.3, 20),
        "model_options.checkpoints=host": (1.01, 3),
    }
    assert answers.depths == {"few_layers"}


def test_what_others_would_cost_as_far_as_they_save_memory() -> None:
    found = prices(asked(8), layout({"recompute": "full"}), MadeUp())  # type: ignore[arg-type]
    others = of(found, False)
    assert others["model_options.checkpoints=host"] == (1.01, 3)
    assert others["training.optimizer=host,training.parameters=host"] == (1.1 * 1.05, 10)
    assert not [name for name in others if "state_dtype" in name or "backend" in name or "_layers" in name]


def test_what_is_given_or_cannot_be_traced_is_left_out() -> None:
    question = asked(8, fixed=[("training.optimizer", "device")])
    answers: Any = MadeUp(refused=["checkpoints"])
    found = prices(question, layout({"recompute": "full", "recompute_layers": 2}), answers)
    assert [each.settings for each in found if each.used] == [
        "model_options.recompute=full,model_options.recompute_layers=2"
    ]
    assert not [each for each in found if "optimizer" in each.settings or "checkpoints" in each.settings]


def test_what_a_backend_searches_with_a_switch_comes_and_goes_with_it() -> None:
    overlapped = {"overlap_grad_reduce": True, "distributed_optimizer": True, "overlap_param_gather": True}
    on_host = {"optimizer": "host", "overlap_cpu_optimizer_d2h_h2d": True}
    cell = layout({}, backend="megatron", **overlapped, **on_host)
    used = of(prices(asked(8), cell, MadeUp()), True)  # type: ignore[arg-type]
    assert [*used.values()] == [(1.0, 0), (1.1, 8)]
    assert [*used][1] == "training.optimizer=host,training.overlap_cpu_optimizer_d2h_h2d=true"


def test_prices_are_those_of_traces() -> None:
    plain, cell = layout({}), layout({"recompute": "full"})
    taken = {each.key: look(each, "few_layers") for each in (plain, cell)}

    def answers(tasks: Sequence[Task]) -> Iterator[tuple[Task, Outcome]]:
        for each in tasks:
            found = taken.get(each.cell.key)
            yield each, Outcome("ok", measurement=vars(found)) if found else Outcome("unsupported", "other")

    (price,) = prices(asked(8), cell, answers)  # type: ignore[arg-type]
    before, after = taken[plain.key].step_time_s, taken[cell.key].step_time_s
    assert before is not None
    assert after is not None
    assert (price.settings, price.ratio) == ("model_options.recompute=full", after / before)
    assert price.ratio > 1.0


def test_a_step_by_another_kernel_is_that_of_the_model_that_names_it() -> None:
    kernels = ("flash_attention_2", "triton")
    cell = layout({}, micro_batches=2).model_copy(update={"seq_len": 2**17})
    found = look(cell, "few_layers", kernels).meters[BY_KERNEL]
    named = [changed(cell, {ATTENTION: name}) for name in kernels]
    assert found == {
        name: look(other, "few_layers").step_time_s for name, other in zip(kernels, named, strict=True)
    }
    assert len({*found.values()}) == 2


def test_other_kernels_beside_the_layouts_own() -> None:
    cell = layout({"attention": "flash_attention_2"})
    kernels = other_kernels(cell)
    assert len(kernels) > 1
    assert "flash_attention_2" in kernels
    seconds = {"triton": 3.0, "flash_attention_2": 2.0, "flash_attention_1": 2.5}
    assert [*by_kernel(cell, {"meters": {BY_KERNEL: seconds}}).items()] == [
        ("flash_attention_1", 1.25),
        ("triton", 1.5),
    ]
    assert by_kernel(cell, {"meters": {BY_KERNEL: {"triton": 3.0}}}) == {}
