"""The layout that a job has already, in the answer beside the best."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import TrainingOptions
from spbench.bench.errors import UserError
from spbench.bench.measure.scenarios.choices import names
from spbench.bench.tools.choose import asking
from spbench.bench.tools.choose.advice import Advice, own_content, own_in_words
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.asking import Asking
from spbench.bench.tools.choose.layout_search import Search
from spbench.bench.tools.choose.layouts import backend_settings
from spbench.bench.tools.choose.question import Question, question
from spbench.bench.tools.choose.ranking import SearchResult, Seen
from tests.bench.hostile import case
from tests.bench.hosts import CrewHere
from tests.grid import data
from tests.slow import slow
from tests.tools.choose.questions import measured
from tests.tools.commands.conftest import Run

#: a script of Megatron-LM, all of whose sizes are small
SCRIPT = data(__file__)["SCRIPT"]


def job(folder: Path, tp: int = 2, more: str = "") -> str:
    path = folder / "job.sh"
    path.write_text(SCRIPT.format(tp=tp, more=more))
    return str(path)


def asked_of(path: str, settings: dict[str, Any] | None = None, **more: Any) -> Question:
    return question((path,), Asked("dgx-a100", None, None, settings or {}), **more)


def test_what_a_job_says_is_what_is_asked(tmp_path: Path) -> None:
    about = asked_of(job(tmp_path))
    assert (about.gpus, about.cell.batch, about.cell.seq_len, about.cell.precision) == (2, 8, 128, "bf16")
    assert about.own is not None
    assert about.own.job == "megatron"
    assert about.own.cell.sizes.tp == 2
    assert about.own.looked_at.training.micro_batches == 4


def test_what_a_job_recomputes_is_searched_anew(tmp_path: Path) -> None:
    path = job(tmp_path)
    free, held = asked_of(path), asked_of(path, {"model_options.recompute": "full"})
    assert "recompute" not in free.cell.model_options
    assert held.cell.model_options["recompute"] == "full"
    assert free.own is not None
    assert free.own.cell.model_options["recompute"] == "full"
    assert any("choose anew: model_options.recompute=full" in line for line in free.remarks)


def test_other_layouts_sum_gradients_in_the_same_dtype(tmp_path: Path) -> None:
    """Megatron-LM's buffers are float32, so fully_shard reduces in float32."""
    every = backend_settings(asked_of(job(tmp_path)))
    assert {each["reduce_dtype"] for each in every if each["backend"].startswith("zero3")} == {"fp32"}
    in_bf16 = backend_settings(asked_of(job(tmp_path, more="--grad-reduce-in-bf16")))
    assert not any("reduce_dtype" in each for each in in_bf16)


def test_a_job_with_muon_keeps_it(tmp_path: Path) -> None:
    every = backend_settings(asked_of(job(tmp_path, more="--optimizer muon")))
    assert every
    assert {(each["backend"], each["update"]) for each in every} == {("megatron", "muon")}


def test_a_strategy_that_divides_nothing_is_none(tmp_path: Path) -> None:
    own = asked_of(job(tmp_path, tp=1)).own
    assert own is not None
    assert (own.cell.strategy, own.looked_at.strategy) == ("tensor_parallel", "single")


def test_on_other_gpus_a_scenario_has_no_layout(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    shape = "model: causal-transformer-tiny, strategy: single, batch: 8, seq_len: 128"
    path.write_text(f"title: mine\ngroups:\n  - {{{shape}, cluster: dgx-a100, sizes: {{dp: 2}}}}\n")
    own = asked_of(str(path)).own
    assert own is not None
    assert own.job == ""
    assert question((str(path),), Asked(None, 4)).own is None


def seen(
    question: Question, step_s: float, status: Any = "ok", peak_memory_bytes: int = 2**30, **parts: Any
) -> Seen:
    usable = 2**31 if status == "ok" else 2**29
    measurement = measured(step_s, peak_memory_bytes, usable, parts={"matmul_s": step_s})
    assert question.own is not None
    cell = question.own.looked_at.model_copy(update=parts)
    return Seen(cell, {**measurement, "status": status})


def answer(about: Question, own: Seen, *best: Seen) -> Advice:
    return Advice(about, SearchResult(best=sorted(best, key=lambda each: each.step_s), own=own))


def test_how_far_it_is_behind_and_the_arguments_that_mend_it(tmp_path: Path) -> None:
    about = asked_of(job(tmp_path))
    assert about.own is not None
    own = seen(about, 3.0)
    replicas = {"strategy": "single", "sizes": own.cell.sizes.model_copy(update={"tp": 1, "dp": 2})}
    training = own.cell.training.model_copy(update={"micro_batches": 2})
    faster = seen(about, 2.0, **replicas, training=training)
    unlike = seen(about, 1.5, **replicas, training=TrainingOptions(backend="zero1"))
    lines = [*own_in_words(answer(about, own, faster, own))]
    assert lines[0] == (
        "yours, tensor_parallel tp2 with megatron, takes 50% more time than single dp2, the fastest: "
        "matmul 3 s against 2"
    )
    assert lines[1] == "to single dp2 (-33%) by Megatron-LM: without --tensor-model-parallel-size"
    first, second = own_in_words(answer(about, own, unlike, faster, own))
    assert "takes 2.0 times as long as single dp2, the fastest" in first
    assert second.startswith("single dp2: Megatron-LM has no training.backend zero1 (it has megatron); to ")
    assert second.endswith("; to single dp2 (-33%) by Megatron-LM: without --tensor-model-parallel-size")
    assert [*own_in_words(answer(about, own, own))] == [
        "yours, tensor_parallel tp2 with megatron, is the fastest that was traced"
    ]


def test_what_does_not_fit_is_led_to_the_tie_that_differs_least(tmp_path: Path) -> None:
    about = asked_of(job(tmp_path))
    assert about.own is not None
    own = seen(about, 3.0, "oom")
    replicas = {"strategy": "single", "sizes": own.cell.sizes.model_copy(update={"tp": 1, "dp": 2})}
    more = own.cell.training.model_copy(update={"micro_batches": 8})
    fewer = own.cell.training.model_copy(update={"micro_batches": 2})
    faster, near = seen(about, 2.0, **replicas, training=fewer), seen(about, 2.01, training=more)
    of_job = answer(about, own, faster, near)
    assert [*own_in_words(of_job)][1] == "to tensor_parallel tp2 by Megatron-LM: --micro-batch-size 1"
    assert "a model of 2 layers of width 64" in of_job.text("question")
    slower = answer(about, own, faster, seen(about, 9.0, training=more))
    assert [*own_in_words(slower)][1].startswith("to single dp2 by Megatron-LM: ")


def test_a_layout_that_fills_its_card_is_said_to(tmp_path: Path) -> None:
    about = asked_of(job(tmp_path))
    assert about.own is not None
    own = seen(about, 3.0)
    replicas = {"strategy": "single", "sizes": own.cell.sizes.model_copy(update={"tp": 1, "dp": 2})}
    fewer = own.cell.training.model_copy(update={"micro_batches": 2})
    full = seen(about, 2.0, peak_memory_bytes=int(2**31 * 0.97), **replicas, training=fewer)
    roomy = seen(about, 2.01, training=own.cell.training.model_copy(update={"micro_batches": 8}))
    both = answer(about, own, full, roomy)
    head = "single dp2 leaves 0.1 GiB, less than 5% of a card; tensor_parallel tp2 takes +0% and leaves "
    assert both.text("fullness") == f"{head}1.0"
    assert [*own_in_words(both)][1].startswith("to tensor_parallel tp2 (-33%) by Megatron-LM: ")
    assert answer(about, own, full).text("fullness").endswith("less than 5% of a card")
    as_full = seen(about, 2.01, peak_memory_bytes=int(2**31 * 0.97))
    assert answer(about, own, full, as_full).text("fullness").endswith("every tie that was traced whole")
    assert answer(about, own, roomy).text("fullness") == ""


def test_where_no_arguments_are_known_the_settings_are_named(tmp_path: Path) -> None:
    about = asked_of(job(tmp_path))
    assert about.own is not None
    about = replace(about, own=replace(about.own, job="verl"))
    own = seen(about, 3.0)
    kept = seen(about, 2.0, model_options={**own.cell.model_options, "recompute": "none"})
    first, second = own_in_words(answer(about, own, kept, own))
    assert "takes 50% more time than the same with other settings, the fastest" in first
    assert second == "to tensor_parallel tp2 (-33%): recompute full to none"


def test_a_job_that_does_not_fit_says_so_and_is_no_tie(tmp_path: Path) -> None:
    about = asked_of(job(tmp_path))
    own = seen(about, 1.0, "oom")
    fits = seen(about, 1.01, mesh=None, sizes=own.cell.sizes.model_copy(update={"tp": 1, "dp": 2}))
    found = answer(about, own, fits)
    assert [each["yours"] for each in found.records()] == [False, True]
    assert not found.is_tie(own)
    content = own_content(found)
    assert content is not None
    assert not content["fits"]
    assert content["words"][0].startswith("yours, tensor_parallel tp2 with megatron, does not fit: it needs ")
    assert content["changes"][0]["left_out"] == ("--tensor-model-parallel-size",)
    assert own_content(Advice(replace(about, own=None), SearchResult())) is None


@pytest.mark.slow
@pytest.mark.usefixtures("no_savings", "kept_traces")
def test_a_search_looks_at_it_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asking, "Crew", CrewHere)
    fixed = [("micro_batch", "4"), ("dp", "2"), ("training.optimizer", "device")]
    about = asked_of(job(tmp_path), only=["single", "megatron"], fixed=fixed)
    with Asking() as here:
        found = Advice(about, Search(about, here).run())
    (single, yours) = found.ranked
    assert (single.cell.mesh_text, yours.cell.mesh_text) == ("dp2", "tp2")
    assert [each["yours"] for each in found.records()] == [False, True]
    assert yours.exact


@pytest.mark.slow
@pytest.mark.usefixtures("no_savings")
def test_its_row_stands_beside_the_best(advise: Run, tmp_path: Path) -> None:
    words = ("--cluster", "dgx-a100", "--only", "single,tensor_parallel,megatron", "--fixed", "micro_batch=2")
    code, out, _ = advise(job(tmp_path), *words, "--format", "json")
    assert code == 0
    (found,) = json.loads(out)
    (yours,) = [each for each in found["layouts"] if each["yours"]]
    assert (yours["strategy"], yours["mesh"]) == ("tensor_parallel", "tp2")
    assert yours["behind"] > 0
    assert found["own"]["step_time_s"] == yours["step_time_s"]
    assert found["own"]["changes"][0]["mesh"] == "dp2"
    code, out, _ = advise(job(tmp_path), *words)
    assert code == 0
    assert " yours |" in out or "| yours " in out
    assert "yours, tensor_parallel tp2 with megatron, takes " in out


# -- damaged jobs ----------------------------------------------------------------------------------------


def asked_of_damaged(numbers: range, folder: Path) -> int:
    """Ask for the own layout of damaged jobs, in as many training settings as there are backends; returns
    how many were read."""
    there = 0
    for number in numbers:
        damage = case("job files", number)
        for name, content in damage.files.items():
            (folder / name).write_bytes(content)
        words, gpus = [*damage.words], int(damage.words[damage.words.index("--gpus") + 1])
        given = dict(
            word.removeprefix("--given=").split("=", 1) for word in words if word.startswith("--given")
        )
        try:
            asked = question([*damage.files], Asked("dgx-h100", gpus, None, {}, given=given))
        except UserError:
            continue
        there += 1
        assert asked.own is not None
        assert asked.own.looked_at.training.steps == 1
        for backend in names("backend"):
            training = asked.own.training(backend, {})
            assert training is None or training["backend"] == backend
    return there


@pytest.mark.parametrize("numbers", [range(20), slow(range(20, 1000))])
def test_damaged_jobs_have_a_layout_or_one_line(
    numbers: range, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert asked_of_damaged(numbers, tmp_path) > len(numbers) / 8
