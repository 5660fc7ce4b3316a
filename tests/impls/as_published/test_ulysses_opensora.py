"""Open-Sora's sequence parallelism: right for what its code computes, another function than the model's, and
no method that anything lists."""

from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.verify.cases import verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls.as_published.ulysses_opensora import JoinedFrames, OpenSoraUlysses
from spbench.impls.collectives import scatter_to_group
from spbench.impls.registries import all_as_published, all_strategies, model_preset
from spbench.impls.strategies.base import Strategy
from spbench.impls.strategies.grid import attend_along, whole_attention
from spbench.impls.strategies.nesting import all_pairs
from spbench.impls.strategies.ulysses import Ulysses
from tests.cells import make_cell
from tests.measure.verify.assertions import assert_green, assert_red

TINY = model_preset("st-dit-tiny", {"layers": 1})


class TextGradientsOnEveryRank(OpenSoraUlysses):
    """The gradients of the text that all ranks gather are summed over them too."""

    name = "text_gradients_on_every_rank"

    def _of_own_heads(self, text: Tensor) -> Tensor:
        return scatter_to_group(text, 3, self.group)


class HeadsOfTheNextRank(OpenSoraUlysses):
    name = "heads_of_the_next_rank"

    def _swap(self, tensors: Sequence[Tensor], split_dim: int, gather_dim: int) -> Sequence[Tensor]:
        return super()._swap([x.roll(1, split_dim) for x in tensors], split_dim, gather_dim)


class PlacesOfOneFrame(OpenSoraUlysses):
    """Spatial attention as the model has it: right, and not what Open-Sora's code computes."""

    name = "places_of_one_frame"

    def grid_attention(self, q: Tensor, k: Tensor, v: Tensor, dim: int) -> Tensor:
        return (
            super().grid_attention(q, k, v, dim) if dim == 0 else attend_along(whole_attention, q, k, v, dim)
        )


@pytest.mark.parametrize("size", [2, 4])
def test_it_is_as_published_and_departs_from_the_model(pool: RankPool, size: int) -> None:
    row = verify_case(pool, Case(OpenSoraUlysses, TINY, "model"), size)
    assert row.status == "as published", row
    assert row.error < 1e-12
    assert OpenSoraUlysses.departs in row.verdict
    # all places of all frames
    assert "output predicted differs by" in row.verdict
    assert f"at 24 of 24 positions on {size} ranks" in row.verdict


def test_on_one_rank_it_is_the_model(pool: RankPool) -> None:
    assert_green(pool, Case(OpenSoraUlysses, TINY, "model"), 1)


@pytest.mark.parametrize("fault", [TextGradientsOnEveryRank, HeadsOfTheNextRank, PlacesOfOneFrame])
def test_planted_faults_are_red(pool: RankPool, fault: type[Strategy]) -> None:
    assert_red(pool, Case(fault, TINY, "model"), 4, "output", "gradient of")


def test_a_frame_attends_to_those_that_other_ranks_have_at_its_place_among_theirs() -> None:
    """Frames 0 and 2 of four are joined on two ranks, 1 and 3 too; on one device none."""
    q, k = torch.zeros(2, 1, 4, 3, 1, 1)
    v = torch.arange(4.0).view(1, 4, 1, 1, 1).expand(1, 4, 3, 1, 1)
    of_two = JoinedFrames(2).grid_attention(q, k, v, 1)
    assert of_two[0, :, 0, 0, 0].tolist() == [1, 2, 1, 2]  # means of 0 and 2, of 1 and 3
    assert torch.equal(JoinedFrames(1).grid_attention(q, k, v, 1), v)


def test_a_block_sends_ten_times_what_a_rank_holds_and_ulysses_four() -> None:
    options = {"layers": 1}
    cell = make_cell("st-dit-tiny", "ulysses_opensora", {"sp": 4}, 1, 24, "fp32", model_options=options)
    whole = TINY.hidden * 24 * 4  # bytes of B T S H
    (planned,) = plan(cell).traffic
    forward: Counter[str] = Counter()
    for entry in planned:
        if entry.phase == "forward":
            forward[entry.collective] += entry.count * entry.payload_bytes
    assert forward == {"all_to_all": 10 * whole // 4}
    (planned,) = plan(cell.model_copy(update={"strategy": "ulysses"})).traffic
    assert sum(e.count * e.payload_bytes for e in planned if e.phase == "forward") == 4 * whole // 4


def test_nothing_lists_it_as_a_method() -> None:
    assert "ulysses_opensora" in all_as_published()
    assert not all_as_published().keys() & all_strategies().keys()
    assert not any(issubclass(cls, OpenSoraUlysses) for pair in all_pairs() for cls in pair.classes)
    assert Ulysses.name in all_strategies()
