"""What verification says of the peers that are installed: which are right, and in which precision.

Skipped where a package is missing; ``pip install -e '.[peers]'`` brings all.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from spbench.bench.cell import Cell
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.engines.virtual import merged
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import VerifyRow, verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.models.model import model_preset
from spbench.impls.registries import INSTALL, absent, peers
from spbench.impls.strategies.nesting import nesting

RINGS = ("ring_flash_attention", "yunchang_ring")
PLACEMENTS = ("contiguous", "zigzag", "striped")
#: peer, an option, and the precisions in which its gradients are those of one device
RIGHT = [
    *((ring, f"placement={placement}", {"bf16"}) for ring in RINGS for placement in PLACEMENTS),
    *(("yunchang_usp", f"placement={placement}", {"bf16"}) for placement in PLACEMENTS),
    ("yunchang_ulysses", "", {"bf16", "fp32", "fp64"}),
    ("deepspeed_ulysses", "", {"bf16", "fp32", "fp64"}),
    *(
        ("torch_context_parallel", option, {"bf16", "fp32"})
        for option in ("placement=contiguous", "placement=zigzag", "rotate=alltoall")
    ),
]
IDS = [f"{name} {option}".strip() for name, option, _ in RIGHT]


@pytest.fixture(scope="module")
def ranks() -> Iterator[RankPool]:
    """Ranks of their own, as some peers find a module ``flash_attn`` there that other tests must not."""
    with RankPool(4) as pool:
        yield pool


def options_of(name: str, option: str) -> dict[str, str]:
    if missing := absent(peers()[name].requires):
        pytest.skip(f"{' and '.join(missing)} is not installed; {INSTALL}")
    return dict([option.split("=")]) if option else {}


def verified(ranks: RankPool, name: str, options: dict[str, str], dtype: str) -> VerifyRow:
    case = Case(nesting(name), model_preset("causal-transformer-tiny"), "attention", dtype, options=options)
    return verify_case(ranks, case, {"sp": 2, "cp": 2} if name == "yunchang_usp" else {"sp": 4})


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option", "right"), RIGHT, ids=IDS)
def test_in_which_precisions_a_peer_is_right(
    ranks: RankPool, name: str, option: str, right: set[str]
) -> None:
    options = options_of(name, option)
    rows = {dtype: verified(ranks, name, options, dtype) for dtype in ("bf16", "fp32", "fp64")}
    assert {dtype for dtype, row in rows.items() if row.status == "green"} == right, rows
    for row in rows.values():
        # no factor, and a crash of a rank is told as one
        assert row.status == "green" or "not a scale" in row.verdict or "killed by SIGABRT" in row.reason


@pytest.mark.slow
@pytest.mark.parametrize(("name", "option", "_"), RIGHT, ids=IDS)
def test_it_sends_what_its_algorithm_says(name: str, option: str, _: set[str]) -> None:
    sizes = {"sp": 2, "cp": 2} if name == "yunchang_usp" else {"sp": 4}
    cell = Cell.model_validate(
        {
            "model": "causal-transformer-tiny",
            "strategy": name,
            "strategy_options": options_of(name, option),
            "sizes": sizes,
            "batch": 2,
            "seq_len": 48,
            "precision": "fp32",
        }
    )
    plan(cell)
    found = merged(cell, [trace(cell, rank).measurement(None) for rank in range(4)])
    assert (found.status, found.reason) == ("ok", "")
