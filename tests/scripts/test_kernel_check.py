"""The GPU check without a GPU: it says so, and its comparison finds a wrong kernel."""

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

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
