"""Which layouts a search looks at, and why others cannot be."""

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from spbench.bench.errors import UserError
from spbench.bench.tools.choose import layouts as module
from spbench.bench.tools.choose.asked import Asked
from spbench.bench.tools.choose.candidates import Bar, promising, undominated
from spbench.bench.tools.choose.layouts import (
    Layout,
    Refused,
    Way,
    backend_settings,
    divisors,
    layouts,
    searched_strategies,
    strategy_settings,
    unequal_stages,
    ways,
)
from spbench.bench.tools.choose.possible import absence
from spbench.bench.tools.choose.question import Question, question
from spbench.bench.tools.choose.ranking import SearchResult
from spbench.bench.tools.choose.references import savings_of
from spbench.impls import registries
from spbench.impls.backends.backend import Backend
from spbench.impls.backends.ddp import DistributedDataParallel
from spbench.impls.options import Options
from spbench.impls.strategies.placed_chunks import DocumentPlacementOptions
from tests.grid import tabled
from tests.plugins.examples.gathered_attention import GatheredAttention
from tests.tools.choose.questions import asked
from tests.tools.jobs.job_inputs import INPUTS

LAYERS = 8


def every(question: Question, layers: int = LAYERS) -> tuple[list[Layout], Refused]:
    refused = Refused()
    found = [each for way in ways(question) for each in layouts(question, way, layers, refused)]
    return found, refused


def test_every_division_of_eight_ranks_is_there_once() -> None:
    found, _ = every(asked(8))
    assert len(set(map(str, found))) == len(found)
    for layout in found:
        assert math.prod(layout.sizes.values()) == 8
        assert 16 % (layout.dp * layout.micro_batch) == 0
        assert layout.virtual_stages == 1 or layout.pp > 1
    meshes = {(each.way.strategy, each.dp, each.pp, *each.way.axes.values()) for each in found}
    for ranks in divisors(8)[1:]:
        around = {
            (dp, pp) for name, dp, pp, *own in meshes if name == "tensor_parallel" and math.prod(own) == ranks
        }
        assert around == {(8 // ranks // pp, pp) for pp in divisors(8 // ranks)}
    both = {tuple(own) for name, _, _, *own in meshes if name == "tensor_parallel+ring_attention"}
    assert both == {(2, 2), (2, 4), (4, 2)}
    assert {(dp, pp) for name, dp, pp in (m for m in meshes if m[0] == "single")} == {
        (8, 1),
        (4, 2),
        (2, 4),
        (1, 8),
    }


def test_fixed_ranks_hold_in_every_layout() -> None:
    found, _ = every(asked(8, fixed=[("tp", "2"), ("pp", "2"), ("micro_batch", "4")]))
    assert found
    for layout in found:
        assert (layout.way.axes["tp"], layout.pp, layout.micro_batch) == (2, 2, 4)


def test_one_rank_along_an_axis_leaves_it_out() -> None:
    found, _ = every(asked(8, fixed=[("tp", "1")]))
    assert found
    assert not any("tp" in layout.way.axes for layout in found)


def test_seven_ranks_of_eight_give_no_layout() -> None:
    assert every(asked(8, fixed=[("tp", "7")]))[0] == []


@tabled(__file__, "strategies_that_are_asked_for")
def test_strategies_that_are_asked_for(
    words: Mapping[str, Any], expected: list[str], absent: list[str]
) -> None:
    found = {cls.name for cls in searched_strategies(asked(8, **words))}
    assert found >= {*expected}
    assert found.isdisjoint(absent)


def test_backends_that_are_asked_for() -> None:
    def names(**words: Any) -> list[str]:
        return [each["backend"] for each in backend_settings(asked(8, **words))]

    assert set(names(only=["zero3", "ulysses"])) == {"zero3"}
    assert {"ddp", "zero3", "megatron"} <= set(names())
    assert "zero3" not in names(without=["zero3"])
    assert not {"legacy_ddp", "fsdp_flat"} & set(names())  # which are there for comparisons
    assert (Counter(names())["megatron"], Counter(names())["zero3"]) == (3, 3)  # one, and two, on the host


@pytest.mark.parametrize(
    ("layers", "heads", "stages", "expected"),
    [
        (8, 0, 4, ()),
        (6, 0, 4, (1, 2, 2, 1)),
        (61, 1, 8, (7, *[8] * 6, 6)),  # DeepSeek-V3's
        (61, 1, 16, (3, *[4] * 14, 2)),
        (7, 0, 2, (4, 3)),
        (61, 1, 32, None),  # the last stage would have no layer
    ],
)
def test_embedding_and_loss_count_as_layers_of_unequal_stages(
    layers: int, heads: int, stages: int, expected: tuple[int, ...] | None
) -> None:
    about = question(("mla-tiny",), Asked("dgx-h100", 8, None, {"seq_len": 256, "batch": 8}))
    about = replace(about, cell=about.cell.model_copy(update={"model_options": {"mtp_layers": heads}}))
    sizes = unequal_stages(about, layers, stages)
    assert sizes == expected
    assert not sizes or sum(sizes) == layers


def test_why_a_layout_cannot_be() -> None:
    _, refused = every(asked(8, batch=12), layers=6)
    assert refused["single 1 dp8 pp1"] == "12 sequences are no whole number for 8 replicas"
    assert refused["single 1 dp1 pp8"] == "6 layers are no whole number for 8 stages"
    assert "single 1 dp4 pp2" not in refused


def test_the_layouts_of_many_ranks_are_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Counter[str]()
    meshes = module._meshes

    def counted(axes: tuple[str, ...], ranks: int, fixed: Mapping[str, int]) -> Iterator[dict[str, int]]:
        calls["meshes"] += 1
        return meshes(axes, ranks, fixed)

    monkeypatch.setattr(module, "_meshes", counted)
    question = asked(512, batch=512)
    found = [*ways(question)]
    assert len(found) > 500
    # a prefix of a mesh is visited once, and has at most the divisors of the ranks that are left
    assert calls["meshes"] < 4 * len(found)
    assert len({str(way) for way in found}) == len(found)
    of_one = [*layouts(question, next(way for way in found if way.ranks == 8), 32, Refused())]
    assert 0 < len(of_one) <= 6 * len(divisors(64)) * 2


def test_a_plugin_is_searched_as_ours_are(monkeypatch: pytest.MonkeyPatch) -> None:
    own = {**registries.all_strategies(), GatheredAttention.name: GatheredAttention}
    for place in ("spbench.impls", registries.__name__):
        monkeypatch.setattr(f"{place}.all_strategies", lambda: own)
    names = {cls.name for cls in searched_strategies(asked(8))}
    assert {"gathered_attention", "tensor_parallel+gathered_attention"} <= names


@dataclass(frozen=True)
class Several(Options):
    pieces: int = 1

    @classmethod
    def searched(cls, heeded: Collection[str] = ()) -> Iterator[Mapping[str, Any]]:
        for pieces in (4, 2):
            yield {"pieces": pieces}


def test_options_say_themselves_what_is_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    assert strategy_settings("ring_attention")[0] == {"placement": "zigzag"}
    assert {"placement": "striped"} in strategy_settings("ring_attention")
    assert strategy_settings("ulysses") == [{}]
    assert strategy_settings("dynamic_cp") == []
    packed = asked(8, settings={"model_options.documents": [100, 28]})
    assert (packed.heeded, asked(8).heeded) == ({"documents"}, frozenset())
    assert "dynamic_cp" in {cls.name for cls in searched_strategies(packed)}
    of_documents = [each["placement"] for each in strategy_settings("ring_attention", packed.heeded)]
    assert of_documents == ["by_work", "zigzag_by_document", "zigzag", "contiguous"]
    # each is one that the strategy may have
    assert {*of_documents, "striped"} == {*DocumentPlacementOptions.words["placement"]}

    class Pieces(DistributedDataParallel):
        name = "pieces"
        options_type = Several

    class Hidden(DistributedDataParallel):
        name = "hidden"
        searched = False

    found: dict[str, type[Backend]] = {"pieces": Pieces, "hidden": Hidden}
    monkeypatch.setattr("spbench.impls.all_backends", lambda: found)
    question = asked(8)
    assert backend_settings(question) == [
        {"backend": "pieces", "pieces": 4},
        {"backend": "pieces", "pieces": 2},
    ]


def test_a_job_is_read_for_the_number_of_gpus() -> None:
    """Where its file shards over all ranks, it says nothing without their number."""
    made = question((str(INPUTS / "llama3_8b.toml"),), Asked("dgx-h100", 16))
    assert (made.gpus, made.cell.sizes.world, made.cell.strategy) == (16, 1, "single")
    assert made.cell.batch == 16
    with pytest.raises(UserError, match="--gpus"):
        question((str(INPUTS / "llama3_8b.toml"),), Asked("dgx-h100"))


def test_an_option_that_is_fixed_holds_in_every_backend() -> None:
    every = backend_settings(asked(8))
    assert {each.get("optimizer", "device") for each in every} == {"device", "host"}
    for where in ("device", "host"):
        kept = backend_settings(asked(8, fixed=[("training.optimizer", where)]))
        assert kept == [each for each in every if each.get("optimizer", "device") == where]
    # a backend without the option is as the others are by default
    kept = backend_settings(asked(8, fixed=[("training.distributed_optimizer", "false")]))
    assert {"ddp", "zero3"} < {each["backend"] for each in kept}
    assert all("distributed_optimizer" not in each for each in kept)


def test_an_option_of_the_model_that_is_fixed_is_not_searched() -> None:
    text = '"checkpoints": "host"'
    assert any(text in each for each in savings_of(asked(8)))
    kept = savings_of(asked(8, fixed=[("model_options.checkpoints", "device")]))
    assert kept
    assert not any(text in each for each in kept)
    given = asked(8, fixed=[("model_options.recompute", "full"), ("model_options.recompute_layers", "1")])
    assert given.cell.model_options["recompute"] == "full"
    assert not any("recompute" in each for each in savings_of(given))


@tabled(__file__, "options_that_cannot_be_fixed")
def test_options_that_cannot_be_fixed(pair: tuple[str, str], problem: str) -> None:
    with pytest.raises(UserError, match=problem):
        backend_settings(asked(8, fixed=[pair]))


def test_what_takes_longer_and_needs_no_fewer_bytes_is_left_out() -> None:
    times = np.array([[10.0, 10.5, 12.0, 20.0], [10.9, 11.2, 9.0, 30.0]])
    nbytes = np.array([[50.0, 50.0, 50.0, 20.0], [60.0, 60.0, 70.0, 10.0]])
    kept = undominated(times, nbytes, np.ones(times.shape, dtype=bool))
    assert kept.tolist() == [[True, True, False, True], [True, False, True, True]]
    others = undominated(times, nbytes, times > 10.0)  # the fastest is not among them
    assert others.tolist() == [[False, True, False, True], [True, True, False, True]]


def test_none_is_promising_that_is_slower_than_what_surely_fits_of_its_family() -> None:
    times = np.array([[[1.0, 1.2, 0.9], [1.1, 0.5, 0.9]]])
    fitting = np.array([[[True, True, True], [True, False, False]]])
    together = [[False, False, True], [False, True, True]]
    assert promising(times, fitting, np.array([0, 0]))[0].tolist() == together
    assert promising(times, fitting, np.array([0, 1]))[0].tolist() == [together[0], [True] * 3]


def test_what_takes_far_longer_than_five_that_probably_fit_is_no_candidate() -> None:
    bar = Bar()
    for n, seconds in ((1, 9.0), (2, 5.0), (4, 6.0), (8, 7.0)):
        bar.add(Layout(Way("single", {}), n, 1, 1), seconds)
    far = Layout(Way("ulysses", {"sp": 4}), 2, 1, 1)
    assert bar.passes(far, 1000.0)  # there are four
    bar.add(Layout(Way("single", {}), 8, 1, 2), 1.0)  # the same kind, faster
    assert bar.passes(far, 1000.0)
    bar.add(Layout(Way("single", {}), 16, 1, 1), 8.0)
    assert bar.most_s == 1.6 * 9.0
    assert bar.passes(far, 14.4)
    assert not bar.passes(far, 30.0)
    assert not bar.passes(far, 25.0)
    assert [*bar.far.values()] == [25.0]
    (sentence,) = absence(asked(8), SearchResult(), {"sp": 4}, bar=bar)
    assert sentence == "not traced, of those with sp4: 1, by the estimate not faster than 25 s"
