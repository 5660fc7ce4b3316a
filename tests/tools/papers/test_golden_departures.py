"""Which golden values of Megatron-LM may not be those of their cases' arguments."""

from __future__ import annotations

from spbench.bench.cell import Cell
from spbench.bench.tools.papers.megatron_cases import (
    EXPERT_CASES,
    GoldenCase,
    cases,
    departures,
    varies_by_routing,
)


def by_case() -> dict[str, GoldenCase]:
    return {case.case: case for case in cases(EXPERT_CASES)}


def test_most_cases_with_experts_are_imported_and_vary_by_routing() -> None:
    found = by_case()
    imported = [case for case in found.values() if isinstance(case.cell, Cell)]
    assert len(found) == 66
    assert len(imported) >= 50
    varying = {case.case for case in imported if varies_by_routing(case.cell)}
    assert 40 < len(varying) < len(imported)
    assert not any("hybrid" in case for case in varying)


def test_each_departure_is_one_that_the_values_show() -> None:
    moe = "gpt3_mcore_te_tp2_pp1_"
    found = departures({f"{moe}te_8experts_etp1_ep4"})
    frozen = f"{moe}frozen_resume_torch_dist_te_8experts2parallel_dist_optimizer"
    several = f"{moe}resume_torch_dist_te_8experts2parallel_multi_dist_optimizer_instances"
    assert found[several, "lts_dgx_a100"] == f"as {frozen} lts_dgx_a100"
    assert found[frozen, "lts_dgx_a100"] == "release"
    assert found[several, "dev_dgx_h100_2nd"] == "checkpoint"
    assert found[f"{moe}te_8experts_etp1_ep4", "dev_dgx_h100"] == "routing"
    assert (several, "dev_dgx_h100") not in found
