"""The summary of a GPU's check: what it finds well, and what it does not. The GPU check without a GPU: it
says so, and its comparison finds a wrong kernel.
scripts/compiled_step.py on the CPU at small sizes: files, errors, and layers with equal gradients."""

import argparse
import csv
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from spbench.bench.cell import Cell, Sizes
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.measurement import Outcome
from spbench.bench.row import json_line
from tests.grid import tabled
from tests.slow import slow

SCRIPTS = Path(__file__).parents[2] / "scripts"
SUMMARY = runpy.run_path(str(SCRIPTS / "gpu_summary.py"), run_name="summary")


def folder_with(tmp_path: Path, measured_bytes: int | None, status: Any = "ok", code: int = 0) -> Path:
    cell = Cell(model="bert-tiny", strategy="ring_self_attention", sizes=Sizes(sp=4), batch=2, seq_len=24)
    played = cell.model_copy(update={"engine": "emulated", "device": "cuda", "rank": 3})
    rows = [
        as_row(cell, Outcome("ok", measurement={"peak_memory_bytes": 1000, "reserved_memory_bytes": 2048})),
        as_row(played, Outcome(status, measurement={"peak_memory_bytes": measured_bytes})),
    ]
    (tmp_path / "memory").mkdir()
    lines = "".join(map(json_line, rows))
    (tmp_path / "memory" / "cells.jsonl").write_text(lines)
    (tmp_path / "parts.csv").write_text(f"doctor,0,3,30\nmemory,{code},17,230\n")
    (tmp_path / "verify.txt").write_text(
        "strategy,model,dtype,status\nlasp,tnl-tiny,bf16,green\nulysses,tnl-tiny,bf16,unsupported\n"
    )
    return tmp_path


def test_all_is_well(tmp_path: Path) -> None:
    text, well = SUMMARY["summary"](folder_with(tmp_path, 1010))
    assert well
    assert "1 of 1 cells, error 1.00% in the median, 1.00% at most" in text
    assert "1 green, 1 unsupported" in text
    line = (tmp_path / "memory.csv").read_text().splitlines()[1].split(",")
    assert line[:4] == ["bert-tiny", "ring_self_attention", "sp4", "2"]


@tabled(__file__, "what_is_not_well")
def test_what_is_not_well(
    tmp_path: Path, measured_bytes: int | None, status: str, code: int, said: str
) -> None:
    text, well = SUMMARY["summary"](folder_with(tmp_path, measured_bytes, status, code))
    assert not well
    assert said in text


def test_every_cell_of_its_scenario_can_run() -> None:
    """On virtual ranks, and on any card of 16 GB."""
    (cells,) = load_scenario("gpu_check").cells.values()
    assert {cell.engine for cell in cells} == {"virtual", "emulated"}
    for cell in cells:
        plan(cell)


SCRIPT = Path(__file__).parents[2] / "scripts" / "check_kernels_on_gpu.py"


@pytest.fixture
def script() -> dict[str, Any]:
    found = runpy.run_path(str(SCRIPT), run_name="check")
    # run_path hands out a copy of the names that the functions see
    found["check"].__globals__.update(HEADS=3, HEAD_SIZES=(8,), CHECKED_LENGTHS=(40, 300))
    return found["check"].__globals__


def test_without_a_gpu_it_says_so(
    script: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["check"])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert script["main"]() == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_right_kernels_pass(script: dict[str, Any]) -> None:
    rows = list(script["check"]("cpu"))
    assert len(rows) == 2 * 3 * 6
    assert all(row["ok"] for row in rows)


@pytest.mark.parametrize("name", ["states", "output", "state_gradients", "input_gradients"])
def test_a_wrong_kernel_does_not(name: str, script: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    right = script["operator"]

    def off_by_some_percent(*arguments: Any) -> Any:
        result = right(name)(*arguments)
        return result * 1.02 if isinstance(result, Tensor) else tuple(x * 1.02 for x in result)

    monkeypatch.setitem(script, "operator", lambda x: off_by_some_percent if x == name else right(x))
    wrong = {row["tensor"] for row in script["check"]("cpu") if not row["ok"]}
    assert wrong >= ({"d_q", "d_k", "d_v"} if name == "input_gradients" else {name})


SIZES = {"hidden": 64, "heads": 4, "kv_heads": 2, "inner": 96, "vocabulary": 128}
ON_CPU = ["--device", "cpu", "--seq-len", "32", *(x for n, v in SIZES.items() for x in ("--set", f"{n}={v}"))]


@pytest.fixture
def step(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.delitem(sys.modules, "compiled_layers", raising=False)
    names: dict[str, Any] = runpy.run_path(str(SCRIPTS / "compiled_step.py"), run_name="script")[
        "main"
    ].__globals__
    names.update(SAMPLES=2, WARMUP=1, LONGEST=10_000)  # which take longest, is chance
    return names


def run(step: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr("sys.argv", ["compiled_step", *arguments])
    code: int = step["main"]()
    return code


def lines(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8") as file:
        return list(csv.DictReader(file))


def test_without_a_gpu_compiled_steps_say_so(
    step: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run(step, monkeypatch, str(tmp_path)) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_line_a_variant_and_an_error_in_the_place_of_one(
    step: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    asked = [str(tmp_path), "--variants", "eager,fused,compiled", "--backend", "absent", *ON_CPU]
    assert run(step, monkeypatch, *asked) == 0
    rows = lines(tmp_path / "compiled_step.csv")
    assert [(row["variant"], row["recompute"]) for row in rows] == [
        (variant, again) for again in ("none", "full") for variant in ("eager", "fused", "compiled")
    ]
    eager, fused, compiled, again, *_ = rows
    assert "absent" in compiled["error"]
    assert not compiled["seconds"]
    assert eager["loss"] == again["loss"]
    assert float(fused["loss"]) == pytest.approx(float(eager["loss"]), rel=1e-3)
    assert int(again["kernels"]) > int(eager["kernels"])
    calls = {
        (row["variant"], row["kernel"]): int(row["calls"])
        for row in lines(tmp_path / "compiled_kernels.csv")
        if row["recompute"] == "none"
    }
    assert calls["fused", "spbench::silu_times"] == 4
    assert calls["eager", "aten::mm"] == 3 * (4 * 7 + 1)


def gradients(step: dict[str, Any], variant: str, recompute: str, backend: str) -> list[torch.Tensor]:
    """Those of a step in float64, by the order of the weights' names in a layer of the project's own."""
    asked = argparse.Namespace(device="cpu", seq_len=32, sizes=SIZES, backend=backend)
    step = step["Step"](variant, recompute, 2, asked)
    weights = step.weights
    step.module.double()
    step.inputs["loss_weights"] = step.inputs["loss_weights"].double()
    step()
    return [weight.grad for weight in weights]


@pytest.mark.parametrize(
    ("variant", "recompute"), [("fused", "none"), ("compiled", "none"), slow("compiled", "full")]
)
def test_variants_have_the_gradients_of_eager_ones(
    step: dict[str, Any], variant: str, recompute: str
) -> None:
    """No graph breaks either: ``fullgraph`` makes one an error."""
    torch._dynamo.reset()
    right = gradients(step, "eager", "none", "")
    assert all(each.abs().max() > 0 for each in right)
    torch.testing.assert_close(gradients(step, variant, recompute, "aot_eager"), right)


@pytest.mark.slow  # compiles
@pytest.mark.parametrize("recompute", ["none", "full"])
def test_inductor_takes_the_layer(step: dict[str, Any], recompute: str) -> None:
    torch._dynamo.reset()
    right = gradients(step, "eager", "none", "")
    torch.testing.assert_close(gradients(step, "compiled", recompute, "inductor"), right)
