"""`spbench advise`: its answer in all forms, and its exit codes."""

import json
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.measurement import Measurement
from spbench.bench.tools.choose import look as module
from spbench.bench.tools.choose.look import Depth
from tests.plugins.additions import EXAMPLES
from tests.tools.choose.questions import MODEL, small_cards
from tests.tools.commands.conftest import Run

pytestmark = pytest.mark.usefixtures("no_savings")

ON = ("--cluster", "dgx-a100", "--gpus", "2")
#: few enough layouts that a search takes moments
FEW = (
    *(*ON, "--batch", "2", "--only", "tensor_parallel,zero3"),
    *("--fixed", "micro_batch=1,training.optimizer=device"),
)


def test_the_best_layouts_and_why(advise: Run) -> None:
    code, out, _ = advise(
        *(MODEL, *FEW, "--seq-len", "256", "--output", "best.yaml", "--figure", "layouts.svg"),
        *("--why", "tp=2", "--format", "json"),
    )
    assert code == 0
    assert Path("layouts.svg").read_text().startswith("<?xml")
    (answer,) = json.loads(out)
    layouts = answer["layouts"]
    assert [each["rank"] for each in layouts] == list(range(1, len(layouts) + 1))
    assert {(each["backend"], each["strategy"]) for each in layouts} == {("zero3", "tensor_parallel")}
    assert answer["nearest"] is None
    for each in layouts:
        assert each["step_time_low_s"] < each["step_time_s"] < each["step_time_high_s"]
        assert min(each["peak_memory_bytes"], each["spare_bytes"]) > 0
        assert 0 <= each["exposed_communication"] <= 1
    cells = Narrowing().declared(load_scenario("best.yaml"))
    assert [cell.key for cell in cells] == [each["cell"] for each in layouts]
    code, out, _ = advise(MODEL, *FEW, "--seq-len", "256", "--why", "tp=2")
    assert code == 0
    assert out.startswith(f"The best layouts: {MODEL}, 2 GPUs of dgx-a100, 2 sequences of 256\n")
    for text in ("Layouts with tp2", "| floors ", " layouts looked at in ", answer["why"]):
        assert text in out


@pytest.mark.slow
def test_several_lengths_give_a_map(advise: Run) -> None:
    code, out, err = advise(
        *(MODEL, *ON, "--batch", "2", "--only", "single,ddp", "--fixed", "micro_batch=1"),
        *("--seq-len", "128,256", "--figure", "map.png"),
    )
    assert code == 0
    assert out.startswith("Which layout where\n")
    assert "[50%] answered" in err
    assert "[100%] answered" in err
    assert Path("map.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_where_nothing_fits_the_nearest_and_what_is_missing_are_said(advise: Run, tmp_path: Path) -> None:
    words = ("--gpus", "2", "--batch", "2", "--only", "ring_attention,zero3", "--fixed", "sp=2")
    small = ("--cluster", small_cards(tmp_path, 1))
    code, out, _ = advise(MODEL, *small, *words, "--seq-len", "4K")
    assert code == 0
    assert ": nothing fits; the nearest is ring_attention sp2 with zero3, which needs 0." in out
    assert "more than a card has" in out
    (answer,) = json.loads(advise(MODEL, *small, *words, "--seq-len", "4K", "--format", "json")[1])
    assert answer["layouts"] == []
    assert answer["nearest"]["peak_memory_bytes"] > 2**20


def test_a_model_that_cannot_be_run_says_why(advise: Run) -> None:
    code, out, err = advise("gpt3-345m", *FEW, "--seq-len", "4K")
    assert (code, out) == (2, "")
    assert err.splitlines()[-1].startswith("spbench: gpt3-345m cannot be run: ")


@pytest.mark.slow
def test_one_of_several_questions_without_a_layout(advise: Run) -> None:
    words = ("--cluster", "dgx-a100", "--batch", "2", "--only", "zero3,tensor_parallel", "--fixed", "tp=2")
    code, out, _ = advise(MODEL, *words, "--gpus", "2,3", "--seq-len", "128")
    assert code == 0
    assert "no layout is possible" in out
    assert f"{MODEL}, 3 GPUs of dgx-a100, 2 sequences of 128: no layout of 3 GPUs is possible" in out
    assert f"The best layouts: {MODEL}, 2 GPUs of dgx-a100, 2 sequences of 128\n" in out


@pytest.mark.slow
def test_a_figure_of_the_cluster_is_swept(
    advise: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "kept"))
    name = "node_link.bandwidth_bytes_per_s"
    words = (MODEL, *FEW, "--seq-len", "256", "--set", f"{name}=x0.0001..x0.0002")
    code, out, _ = advise(*words, "--format", "json")
    slow, fast = json.loads(out)
    assert code == 0
    assert [each["question"]["figures"] for each in (slow, fast)] == [f"{name}=x0.0001", f"{name}=x0.0002"]
    assert slow["layouts"][0]["step_time_s"] > fast["layouts"][0]["step_time_s"]
    floors = [each["layouts"][0]["links_floor_s"] for each in (slow, fast)]
    assert floors[0] == pytest.approx(2 * floors[1])
    code, out, _ = advise(*words, "--figure", "map.png")
    assert f"tensor_parallel from {name}=x0.0001 on" in out
    assert Path("map.png").read_bytes().startswith(b"\x89PNG")


def test_a_stopped_search_goes_on(advise: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The looks of a search that was interrupted are not taken again."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "kept"))
    taken: list[str] = []
    plain = module.look

    def look(cell: Cell, depth: Depth, **how: Any) -> Measurement:
        if len(taken) == 5:
            raise KeyboardInterrupt
        taken.append(f"{cell.key} {depth} {how}")
        return plain(cell, depth, **how)

    monkeypatch.setattr(module, "look", look)
    words = (MODEL, *FEW, "--seq-len", "256")
    assert advise(*words)[0] == 130
    first, taken[:] = [*taken], ["none"] * 6
    assert advise(*words)[0] == 0
    again = taken[6:]
    assert len(first) == 5
    assert again
    assert not set(first) & set(again)


def test_a_plugin_is_advised_as_ours_are(advise: Run, tmp_path: Path) -> None:
    for name in ("one_layer_lm", "gathered_attention"):
        (tmp_path / f"{name}.py").write_text(text := (EXAMPLES / f"{name}.py").read_text())
    words = ("one_layer_lm.py", *ON, "--batch", "2", "--seq-len", "128", "--format", "json")
    only = "gathered_attention,tensor_parallel,ddp"
    code, out, _ = advise(*words, "--only", only, "--strategy", "gathered_attention.py")
    assert code == 0
    (answer,) = json.loads(out)
    assert {each["strategy"] for each in answer["layouts"]} == {"gathered_attention", "tensor_parallel"}
    assert answer["question"]["model"] == "one-layer-lm-tiny"
    wrong = text.replace("gathered_attention", "misscaled").replace("gqa=True", "gqa=True, scale=0.1")
    (tmp_path / "other.py").write_text(wrong)  # a process keeps its files' classes, so names are unlike
    code, out, message = advise(*words, "--only", "misscaled,tensor_parallel,ddp", "--strategy", "other.py")
    assert (code, out) == (2, "")
    assert "not measured, as verification is red: wrong in forward" in message
