"""What holds of peers whether or not their packages are installed. What verification says of the peers that
are installed: which are right, and in which precision. Skipped where a package is missing; ``pip install -e
'.[peers]'`` brings all."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import spbench.impls.peers
from spbench.bench.measure.engines.class_traces import merged
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.engines.tracing import trace
from spbench.bench.measure.processes.rank_pool import RankPool
from spbench.bench.measure.scenarios.choices import strategy_problem
from spbench.bench.measure.verify.cases import VerifyRow, verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.impls import discovery, registries
from spbench.impls.discovery import INSTALL, absent
from spbench.impls.layout import Unsupported
from spbench.impls.peers import flash_attn_stand_in as stand_in
from spbench.impls.place import Place
from spbench.impls.registries import all_peers, all_strategies, model_preset
from spbench.impls.strategies.nesting import nesting
from tests.cells import make_cell
from tests.grid import tabled

ROOM = Path(spbench.impls.peers.__path__[0])
LINE = "install the extra peers: pip install -c constraints.txt -e '.[peers]'"


@pytest.fixture
def nothing_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "installed_version", lambda name: None)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "installed_version", lambda name: "1")


def test_a_peer_is_found_by_being_there_and_is_no_strategy_of_ours() -> None:
    assert {*registries.all_peers()} >= {"ring_flash_attention", "yunchang_usp", "torch_context_parallel"}
    assert not {*registries.all_peers()} & {*all_strategies()}
    assert nesting("yunchang_ring").classes == (registries.all_peers()["yunchang_ring"],)


def test_every_peer_says_what_it_requires() -> None:
    assert all(cls.requires for cls in registries.all_peers().values())
    assert not any(cls.requires for cls in all_strategies().values())


def imported_at_once(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield str(node.module)


@pytest.mark.parametrize("path", sorted(ROOM.glob("*.py")), ids=lambda path: path.name)
def test_its_module_is_imported_without_its_package(path: Path) -> None:
    packages = {name.split(".")[0] for name in imported_at_once(path)}
    assert packages - sys.stdlib_module_names <= {"spbench", "torch"}


@pytest.mark.usefixtures("nothing_installed")
@pytest.mark.parametrize("name", registries.all_peers())
def test_one_that_is_missing_is_named_with_how_to_install_it(name: str) -> None:
    missing = " and ".join(registries.all_peers()[name].requires)
    assert strategy_problem(name) == f"strategy {name} needs {missing}; {LINE}"
    plan = registries.all_peers()[name].planned(2)
    with pytest.raises(Unsupported, match=f"^{name} needs {missing}; install the extra peers"):
        plan.check(model_preset("causal-transformer-tiny").sites(2, 24))


@pytest.mark.usefixtures("all_installed")
@tabled(__file__, "its_closed_form_is_that_of_the_same_algorithm")
def test_its_closed_form_is_that_of_the_same_algorithm(peer: str, ours: str, sizes: dict[str, int]) -> None:
    assert strategy_problem(peer) == ""
    sites = model_preset("causal-transformer-tiny-gqa").sites(2, 24)
    theirs, own = (nesting(name).configured(Place(sizes)) for name in (peer, ours))
    theirs.check(sites)
    assert list(theirs.traffic(sites, 4)) == list(own.traffic(sites, 4)) != []


@pytest.mark.parametrize("placement", ["contiguous", "zigzag", "striped"])
def test_usp_has_the_positions_of_ulysses_around_a_ring(placement: str) -> None:
    sizes = {"cp": 3, "sp": 2}
    held = []
    for rank in range(6):
        at = Place.of_rank(sizes, rank)
        theirs, own = (
            nesting(name).configured(at, {"placement": placement}).shard(torch.arange(24), 0)
            for name in ("yunchang_usp", "ulysses+ring_attention")
        )
        assert theirs.tolist() == own.tolist()
        held += theirs.tolist()
    assert sorted(held) == list(range(24))


@pytest.mark.usefixtures("all_installed")
@tabled(__file__, "sizes_that_a_peer_has_not_are_refused")
def test_sizes_that_a_peer_has_not_are_refused(
    name: str, sizes: dict[str, int], options: dict[str, bool], reason: str
) -> None:
    plan = nesting(name).configured(Place(sizes), options)
    with pytest.raises(Unsupported, match=reason):
        plan.check(model_preset("causal-transformer-tiny-gqa").sites(2, 24))


@pytest.mark.skipif(torch.cuda.is_available(), reason="its kernels may run here")
@pytest.mark.usefixtures("all_installed")
def test_fla_says_that_it_needs_a_gpu() -> None:
    plan = registries.all_peers()["fla_context_parallel"].planned(2)
    with pytest.raises(Unsupported, match=r"Triton kernels only for NVIDIA GPUs.*use lasp"):
        plan.check(model_preset("tnl-tiny").sites(2, 24))


@pytest.mark.parametrize("kv_heads", [4, 2])
@pytest.mark.parametrize("causal", [True, False])
def test_the_stand_in_for_flash_attention_is_torchs_attention(kv_heads: int, causal: bool) -> None:
    generator = torch.Generator().manual_seed(0)

    def drawn(heads: int) -> torch.Tensor:
        return torch.randn(2, 12, heads, 8, generator=generator, dtype=torch.float64)

    q, k, v, d_o = (drawn(heads).requires_grad_() for heads in (4, kv_heads, kv_heads, 4))
    heads_first = [x.transpose(1, 2) for x in (q, k, v)]
    o = F.scaled_dot_product_attention(*heads_first, is_causal=causal, scale=0.3, enable_gqa=True)
    expected = o.transpose(1, 2), *torch.autograd.grad(o.transpose(1, 2), (q, k, v), d_o)

    whole = stand_in._whole(q, k, v, softmax_scale=0.3, causal=causal)
    found, lse, *_ = stand_in._forward(q, k, v, 0.0, 0.3, causal)
    gradients = [torch.empty_like(x) for x in (q, k, v)]
    stand_in._backward(d_o, q, k, v, found, lse, *gradients, 0.0, 0.3, causal)
    for got in ((whole, *torch.autograd.grad(whole, (q, k, v), d_o)), (found, *gradients)):
        for x, reference in zip(got, expected, strict=True):
            torch.testing.assert_close(x, reference)


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
    if missing := absent(all_peers()[name].requires):
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
    cell = make_cell(
        "causal-transformer-tiny", name, sizes, 2, 48, "fp32", strategy_options=options_of(name, option)
    )
    plan(cell)
    found = merged(cell, [trace(cell, rank).measurement(None) for rank in range(4)], plan(cell))
    assert (found.status, found.reason) == ("ok", "")
