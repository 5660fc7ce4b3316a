"""scripts/compiled_step.py on the CPU at small sizes: files, errors, and layers with equal gradients."""

import argparse
import csv
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.slow import slow

SCRIPTS = Path(__file__).parents[2] / "scripts"
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


def test_without_a_gpu_it_says_so(
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
