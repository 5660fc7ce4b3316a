"""A strategy or a backend is measured only where verification proves its gradients right."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import spbench
from spbench.bench.cell import Cell
from spbench.bench.files import CACHE_FOLDER
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.sweep.results import ResultsFile
from spbench.bench.measure.sweep.sweep import sweep
from spbench.bench.measure.verify import proof
from spbench.bench.measure.verify.cases import VerifyRow
from spbench.bench.measure.verify.proof import unproven
from spbench.bench.measurement import Outcome
from spbench.impls import loose_files
from spbench.impls.strategies.nesting import Nesting
from tests.bench import fakes
from tests.measure.verify import attention_faults

EXAMPLES = Path(__file__).parents[2] / "plugins" / "examples"


def cell(strategy: str = "torch_context_parallel", **settings: Any) -> Cell:
    defaults = {"model": "causal-transformer-tiny", "sizes": {"sp": 2}, "batch": 2, "seq_len": 48}
    return Cell.model_validate({**defaults, "strategy": strategy, "precision": "fp32", **settings})


@pytest.fixture(autouse=True)
def nothing_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A new cache, and a process that has verified nothing; the package is proven."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    monkeypatch.setattr(proof, "_verdicts", {})
    monkeypatch.setattr(proof, "_package_is_proven", lambda: True)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What is verified, in turn."""
    rows: list[str] = []
    verified = proof.verify_case

    def counted(*arguments: Any, **how: Any) -> VerifyRow:
        row = verified(*arguments, **how)
        rows.append(f"{row.strategy} {row.model} {row.mesh} {row.dtype} {row.status}")
        return row

    monkeypatch.setattr(proof, "verify_case", counted)
    return rows


class PlantedPeer(attention_faults.OneNthGradients):
    """Gradients scaled by 1/N, as if another package had made them."""

    requires = ("torch",)


class NoPool:
    """What must not be needed."""

    def run(self, *_: Any) -> None:
        raise AssertionError


def test_one_that_is_right_is_verified_once_for_its_code(
    pool: RankPool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell(), cell(batch=4), cell(sizes={"sp": 6}, model="llama3-8b")]
    said: list[str] = []
    assert unproven(cells, pool, said.append) == {}
    small = ("causal-transformer-tiny sp2", "llama3-8b sp4")
    assert asked == [f"torch_context_parallel {each} fp32 green" for each in small]
    assert said == ["verifying torch_context_parallel: not verified yet as its code is now"]
    assert unproven(cells, NoPool(), said.append) == {}  # type: ignore[arg-type]
    monkeypatch.setattr(proof, "_verdicts", {})  # as in another process, by the cache
    assert unproven(cells, NoPool(), said.append) == {}  # type: ignore[arg-type]
    assert len(said) == 1
    monkeypatch.setattr(proof, "verified_code", lambda: "changed")
    assert unproven(cells, pool, said.append) == {}
    assert len(asked) == 4


@pytest.mark.parametrize("least", [2, 0])
def test_fewer_ranks_are_tried_where_more_cannot_run_a_small_model(
    monkeypatch: pytest.MonkeyPatch, least: int
) -> None:
    tried: list[int] = []

    def verified(pool: object, case: object, sizes: Any, *_: str) -> VerifyRow:
        tried.append(sizes["sp"])
        status: Any = "green" if sizes["sp"] == least else "unsupported"
        of = {"strategy": "", "model": "", "part": "", "size": 1, "dtype": "fp32"}
        return VerifyRow(**of, status=status, reason="3 heads; use 3")  # type: ignore[arg-type]

    monkeypatch.setattr(proof, "verify_case", verified)
    outcomes = [*unproven([cell(sizes={"sp": 4})], object()).values()]  # type: ignore[arg-type]
    assert tried == ([4, 3, 2] if least else [4, 3, 2, 1])
    refused = Outcome("unsupported", "not measured, as nothing could be verified: 3 heads; use 3")
    assert outcomes == ([] if least else [refused])


def test_one_that_rounds_to_float32_may_not_be_measured_in_float64(pool: RankPool) -> None:
    (outcome,) = unproven([cell(precision="fp64"), cell()], pool).values()
    assert outcome.status == "mismatch"
    assert outcome.reason.startswith("not measured, as verification is red: ")
    assert "(causal-transformer-tiny on sp2 Gloo ranks in fp64; " in outcome.reason


def test_a_planted_factor_is_in_the_reason(pool: RankPool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof.impls, "nesting", lambda name: Nesting((PlantedPeer,)))
    planted = cell("ring_self_attention", model="bert-tiny", sizes={"sp": 4})
    (outcome,) = unproven([planted], pool).values()
    assert " is 0.25 times the reference (residual " in outcome.reason
    assert "\n" not in outcome.reason


def test_the_package_is_verified_where_its_code_is_not_that_which_was_green(
    pool: RankPool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell("ring_attention"), cell(seq_len=47), cell("single", sizes={"sp": 1})]
    assert unproven(cells, NoPool()) == {}  # type: ignore[arg-type]
    monkeypatch.setattr(proof, "_package_is_proven", lambda: False)
    assert unproven([*cells, cell("ring_attention", training={"backend": "zero3"})], pool) == {}
    assert [row.split()[0] for row in asked] == ["ring_attention", "ring_attention"]
    assert {row.split()[-1] for row in asked} == {"green"}


def test_options_for_more_replicas_than_a_small_case_has_are_left_out(
    pool: RankPool, asked: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "_package_is_proven", lambda: False)
    options = {"distributed_optimizer": True, "num_distributed_optimizer_instances": 2}
    two = cell(
        "tensor_parallel", sizes={"dp": 4, "tp": 2}, batch=4, training={"backend": "megatron", **options}
    )
    assert unproven([two], pool) == {}
    assert {"unsupported", "green"} == {row.split()[-1] for row in asked}


@pytest.mark.parametrize(("known", "proven"), [("this", True), ("another", False), ("cached", True)])
def test_the_package_is_proven_for_the_code_that_it_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, known: str, proven: bool
) -> None:
    monkeypatch.undo()
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    code = proof.package_code() if known == "this" else "0"
    (tmp_path / proof.PROVEN).write_text(json.dumps({"code": code}))
    monkeypatch.setattr(proof, "files", lambda package: tmp_path)
    if known == "cached":
        proof.keep_package_proof()
    assert proof._package_is_proven.__wrapped__() is proven


def of_users(example: str, wrong: Mapping[str, str], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a file with the example of a plug-in, in which other texts stand."""
    monkeypatch.setenv(loose_files.LOOSE_FILES, "")
    text = (EXAMPLES / example).read_text()
    for right, other in wrong.items():
        assert right in text
        text = text.replace(right, other)
    (folder / f"wrong_{example}").write_text(text)
    loose_files.add_file(folder / f"wrong_{example}")


def test_a_wrong_strategy_has_no_time_and_is_marked_where_it_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scaled = {"enable_gqa=True": "enable_gqa=True, scale=0.1", '"gathered_attention"': '"wrong"'}
    of_users("gathered_attention.py", scaled, tmp_path, monkeypatch)
    wrong = cell("wrong")
    with ResultsFile(tmp_path / "rows") as results:
        (row,) = sweep([wrong], results, jobs=1)
        assert (row["status"], row["measurement"]) == ("mismatch", {})
        assert "verification is red: wrong in forward" in row["reason"]
        (marked,) = sweep([wrong], results, jobs=1, unverified=True)
        assert marked["status"] == "mismatch"
        assert marked["reason"].startswith("unverified: not measured, as verification is red")
        assert marked["measurement"]["peak_memory_bytes"] > 0
        (again,) = sweep([wrong], results, jobs=1)
        assert (again["status"], again["measurement"]) == ("mismatch", {})


def test_a_wrong_backend_has_no_time_beside_a_strategy_without_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unsummed = {
        "all_reduce(parameter.grad, group)": "all_reduce(parameter, group)",
        '"unbucketed"': '"wrong"',
    }
    of_users("unbucketed.py", unsummed, tmp_path, monkeypatch)
    table = spbench.run([cell("single", sizes={"dp": 2}, training={"backend": "wrong"})], jobs=0)
    (row,) = table.to_dict("records")
    assert row["status"] == "mismatch", row["reason"]
    assert "step_time_s" not in row
    assert "verification is red: forward right, backward wrong" in row["reason"]


def test_a_sweep_keeps_the_reason_and_runs_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell(), cell("ring_attention"), cell(batch=4)]
    wrong = {cells[-1].key: Outcome("mismatch", "planted")}
    monkeypatch.setattr(f"{sweep.__module__}.unproven", lambda cells, say: wrong)
    events: list[str] = []
    with ResultsFile(tmp_path) as results:
        rows = sweep(
            cells,
            results,
            run=fakes.answer,
            jobs=1,
            on_start=lambda each: events.append(f"start {each.key}"),
            on_end=lambda row: events.append(f"end {row['key']}"),
        )
    assert {row["key"]: row["status"] for row in rows} == {
        each.key: "mismatch" if each.key in wrong else "ok" for each in cells
    }
    kept = next(row for row in rows if row["status"] == "mismatch")
    assert (kept["reason"], kept["measurement"]) == ("planted", {})
    assert events[:2] == [f"start {kept['key']}", f"end {kept['key']}"]
    assert len(events) == 6
