"""Training runs: every strategy and size learns as one device does, and a fault shows in the curves."""

from typing import Any

import pytest
import torch
from pydantic import ValidationError

from spbench.bench.cell import Cell, Learning
from spbench.bench.measure.engines import distributed
from spbench.bench.measure.engines.distributed import learning_rate, losses_of_rank
from spbench.bench.measure.engines.run_cell import run_cell
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.measure.sweep.sweep import as_row
from spbench.bench.measurement import Outcome
from spbench.bench.row import Row
from spbench.bench.tools.papers.answer import compare, load_scenario
from spbench.bench.tools.papers.answers.claims import deviations, final
from spbench.impls.models.blocks.text import CHOSEN, CLS, MASK, PAD, SEP, SPECIAL, WordPieces, corpus
from spbench.impls.registries import model_preset
from spbench.impls.strategies.base import Strategy, Unsupported
from tests.measure.verify.attention_faults import BiasesNotSynchronized, OneNthGradients, OrderLossOnEveryRank
from tests.slow import slow

STEPS = 4
#: float32 rounds to 6e-8; in so few steps it grows little
ROUNDING = 2e-6
#: what a fault must show at least: the bound of the scenario, far above rounding
VISIBLE = 1e-3

Curves = list[dict[str, float]]


def cell(strategy: str, sizes: dict[str, int], **changed: Any) -> Cell:
    settings = {
        "model": "bert-mini",
        "strategy": strategy,
        "sizes": sizes,
        "batch": 4,
        "seq_len": 32,
        "engine": "distributed",
        "learning": {"steps": STEPS, "learning_rate": 5e-3, "warmup": 2, "deviation": 0.08},
    }
    return Cell.model_validate(settings | changed)


def curves(pool: RankPool, asked: Cell, cls: type[Strategy] | None = None) -> Curves:
    by_rank: list[Curves] = pool.run(asked.sizes.by_axis, losses_of_rank, asked, cls)
    assert all(found == by_rank[0] for found in by_rank)
    return by_rank[0]


@pytest.fixture(scope="module")
def alone(pool: RankPool) -> Curves:
    return curves(pool, cell("single", {}))


def largest(ours: Curves, theirs: Curves) -> float:
    return max(max(deviations(ours, theirs, loss)) for loss in ("mlm", "order"))


@pytest.mark.parametrize(
    ("strategy", "sizes", "micro_batches"),
    [
        ("ring_self_attention", {"sp": 2, "pp": 2}, 2),
        slow("tensor_parallel", {"tp": 4}, 1),
        slow("ring_self_attention", {"sp": 4}, 1),
        slow("tensor_parallel", {"tp": 2, "dp": 2}, 1),
    ],
)
def test_curves_are_those_of_one_device(
    pool: RankPool, alone: Curves, strategy: str, sizes: dict[str, int], micro_batches: int
) -> None:
    found = curves(pool, cell(strategy, sizes, training={"micro_batches": micro_batches}))
    assert [at["step"] for at in found] == list(range(1, STEPS + 1))
    assert largest(found, alone) < ROUNDING
    # it learns, or else equal curves would show nothing
    assert found[-1]["mlm"] < found[0]["mlm"] - 0.1


@pytest.mark.parametrize("fault", [OneNthGradients, slow(BiasesNotSynchronized), slow(OrderLossOnEveryRank)])
def test_a_fault_shows(pool: RankPool, alone: Curves, fault: type[Strategy]) -> None:
    assert largest(curves(pool, cell("ring_self_attention", {"sp": 4}), fault), alone) > VISIBLE


def test_learning_rate_rises_and_falls() -> None:
    asked = Learning(steps=5, learning_rate=1.0, warmup=2)
    assert [learning_rate(asked, step) for step in range(1, 6)] == [0.5, 1, 0.75, 0.5, 0.25]
    assert learning_rate(Learning(steps=2, learning_rate=3.0), 1) == 3.0


def test_what_cannot_learn() -> None:
    with pytest.raises(Unsupported, match="virtual computes no losses"):
        run_cell(cell("single", {}, engine="virtual"))


def test_keys_of_other_cells_are_as_before() -> None:
    asked = cell("single", {})
    plain = asked.model_copy(update={"learning": None})
    assert "learning" not in plain.model_dump(exclude_defaults=True)
    assert plain.key != asked.key


# -- the text ---------------------------------------------------------------------------------------------


def batch_of(step: int, seed: int = 1, batch: int = 64) -> dict[str, torch.Tensor]:
    batches = model_preset("bert-mini").batches(batch, 64, seed)
    for _ in range(step):
        next(batches)
    return next(batches)


def test_batches_follow_from_seed_and_step() -> None:
    first, again, later, other = batch_of(0), batch_of(0), batch_of(1), batch_of(0, seed=2)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["tokens"], later["tokens"])
    assert not torch.equal(first["tokens"], other["tokens"])
    made_up = model_preset("bert-mini").inputs(64, 64, None)
    assert {n: (x.shape, x.dtype) for n, x in first.items()} == {
        n: (x.shape, x.dtype) for n, x in made_up.items()
    }


def test_masking_is_berts() -> None:
    batch = batch_of(0, batch=512)
    chosen, words = batch["loss_weights"] > 0, batch["labels"] >= len(SPECIAL)
    assert float(batch["loss_weights"].sum()) == pytest.approx(1)
    assert not (chosen & ~words).any()
    assert float(chosen.sum() / words.sum()) == pytest.approx(CHOSEN, abs=0.01)
    seen, labels = batch["tokens"][chosen], batch["labels"][chosen]
    assert float((seen == MASK).float().mean()) == pytest.approx(0.8, abs=0.03)
    assert float((seen == labels).float().mean()) == pytest.approx(0.1, abs=0.03)
    assert torch.equal(batch["tokens"][~chosen], batch["labels"][~chosen])


def test_pairs_are_sentences_of_one_document_in_order_or_not() -> None:
    batch, text = batch_of(0), corpus(1024)
    assert {0, 1} == set(batch["order_labels"].tolist())
    runs = [[token for sentence in _of(text, number) for token in sentence] for number in set(text.documents)]
    joined = ["," + ",".join(map(str, run)) + "," for run in runs]
    kept = 0
    for tokens, types, swapped in zip(
        batch["labels"], batch["token_types"], batch["order_labels"], strict=True
    ):
        whole = tokens[tokens != PAD]
        assert whole[0] == CLS
        assert [int(token) for token in whole].count(SEP) == 2
        second = whole[types[: len(whole)] == 1][:-1].tolist()
        first = whole[1 : len(whole) - len(second) - 2].tolist()
        before, after = (second, first) if swapped else (first, second)
        places = [run for run in joined if _text(before) in run and _text(after) in run]
        assert places
        kept += any(run.find(_text(before)) < run.rfind(_text(after)) for run in places)
    assert kept == len(batch["labels"])


def _of(text: Any, number: int) -> list[list[int]]:
    return [s for s, document in zip(text.sentences, text.documents, strict=True) if document == number]


def _text(tokens: list[int]) -> str:
    return "," + ",".join(map(str, tokens)) + ","


def test_pieces() -> None:
    pieces = WordPieces(["the lines the lines ==== a"], 40)
    known = pieces.tokens
    assert [known[i] for i in pieces.encode("The line")] == ["the", "l", "##i", "##n", "##e"]
    assert [known[i] for i in pieces.encode("==== qa")] == ["====", "[UNK]"]
    with pytest.raises(ValueError, match="use at least"):
        WordPieces(["the lines"], 10)


# -- the scenario -----------------------------------------------------------------------------------------


def test_comparison_states_deviations() -> None:
    scenario = load_scenario("rsa_convergence")
    cells = Narrowing().declared(scenario)
    rows: dict[str, Row] = {}
    for asked in cells:
        off = {"tensor_parallel": 1e-7, "ring_self_attention": 0.5}.get(asked.strategy, 0.0)
        losses = [{"step": step, "mlm": 2.0 + off * (step == 2), "order": 1.0} for step in (1, 2)]
        rows[asked.key] = as_row(asked, Outcome("ok", measurement={"losses": losses}))
    found = {entry.claim: entry for entry in compare(scenario, cells, rows)}
    small = found["tensor parallelism: largest deviation, mlm"]
    assert small.reproduced == pytest.approx(5e-8)
    assert (small.status_reproduced, small.role) == ("", "curve")
    assert small.note == "at step 2; 0.0e+00 at step 1"
    large = found["ring self-attention: largest deviation, mlm"]
    assert large.reproduced == pytest.approx(0.25)
    assert large.status_reproduced == "numerics"
    assert "above its bound" in large.note
    assert found["ring self-attention: final loss, mlm"].reproduced == pytest.approx(2.25)
    rows.popitem()
    entries = compare(scenario, cells, rows)
    assert [e.note for e in entries if e.reproduced is None] == ["cell was not run"]


@pytest.mark.slow
def test_whole_scenario() -> None:
    cells = Narrowing().declared(load_scenario("rsa_convergence"))
    losses = {(c.strategy, c.precision): run_cell(c).losses for c in cells}
    reference = losses.pop(("single", "fp32"))
    assert final(reference, "mlm") < reference[0]["mlm"] - 1.4
    for found in losses.values():
        assert max(deviations(found, reference, "mlm")) < 1e-3
        assert deviations(found, reference, "mlm")[0] < 1e-6


def test_a_loss_that_is_not_finite_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    curve = [{"step": 1.0, "mlm": 9.5}, {"step": 2.0, "mlm": float("nan")}]
    monkeypatch.setattr(distributed, "launch", lambda asked, work: {0: curve})
    outcome = run_cell(cell("single", {}))
    assert (outcome.status, outcome.reason) == ("numerics", "a loss at step 2.0 is not finite")
    assert outcome.losses == curve
    del curve[1]
    assert run_cell(cell("single", {})).status == "ok"


def test_a_seed_is_what_torch_takes() -> None:
    for seed in (-(2**63), 2**63 - 1):
        torch.Generator().manual_seed(Learning(steps=1, seed=seed).seed)
    for seed in (-(2**63) - 1, 2**63):
        with pytest.raises(ValidationError, match="seed"):
            Learning(steps=1, seed=seed)
