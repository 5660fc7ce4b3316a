"""`spbench verify`: every strategy against the single-device model, on real ranks.

For each case :mod:`measure.verify.oracle` compares outputs, input gradients and every parameter
gradient on all ranks, and of whole models the bytes sent with the closed forms; this module chooses the
cases, runs them on a pool of ranks and judges them.

Limits. In float64 a fixed 1e-10: reordered sums in tiny models make errors of 1e-14, a wrong term makes
far more than 1e-6. In lower precisions no fixed number is honest, for the error that one device makes
differs by tensor. So that error, against the same float64 oracle, is measured for each tensor, and the
strategy may make NOISE_FACTOR times as much. A parallel run adds up the same terms in another order and
rounds up to N more partial sums to the dtype, where one device keeps them in its accumulator; so its error is
a sample from a somewhat wider distribution, and the largest of a few hundred tensors is judged. Over 48 runs
a dtype (two strategies, two models, 3 and 4 ranks, three seeds) the largest ratio seen was 2.9. A tensor
whose noise is small by luck (a scalar, a bias of two numbers) is given the median noise of the case's
tensors, and none is given less than the dtype's eps. The noise is that of torch's own kernels, so a bad
kernel cannot widen its own limit.
"""

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

from spbench import impls
from spbench.bench.measure.processes.rank_pool import Ranks
from spbench.bench.measure.processes.stacks import RankError
from spbench.bench.measure.processes.staged_group import STAGED
from spbench.bench.measure.processes.torchrun import ranks_for, shared_backend
from spbench.bench.measure.verify.explanation import explain_failure, explain_values
from spbench.bench.measure.verify.judged import (
    Finding,
    how_departs,
    how_wrong,
    judged,
    unequal_bytes,
    worst_of,
)
from spbench.bench.measure.verify.oracle import check_rank
from spbench.bench.measure.verify.verified_run import Case
from spbench.bench.setting_values import names_a_file, read_model_file
from spbench.bench.verdicts import VerifyRow

#: seconds after which a case has failed whose ranks only wait for each other
IDLE_S = 6.0


def verify_cases(
    strategies: Sequence[str] | None = None,
    models: Sequence[str] | None = None,
    world_sizes: Sequence[int] = (1, 2, 3, 4),
    dtypes: Sequence[str] = ("fp64",),
    parts: Sequence[str] | None = None,
    *,
    model_options: Mapping[str, Any] | None = None,
    options: Mapping[str, Any] | None = None,
    backend: str = impls.DEFAULT_BACKEND,
    backend_options: Mapping[str, Any] | None = None,
    device: str = "cpu",
    batch: int = 3,
    seq_len: int = 24,
    pool: Ranks | None = None,
    expect: Callable[[int], None] = lambda cases: None,
    explain: int = 0,
) -> Iterator[VerifyRow]:
    """Verify strategies; yields a row as soon as its case is done.

    Every part of every model is verified with default options, and the largest chosen part also with each
    variant of the model's options, and of the options of a strategy that is not nested.

    Args:
        strategies: names of strategies or of nested ones ("megatron_sp+ulysses"); None: each registered one.
        models: names, or paths of config.json files; these and large models are verified
            :meth:`Model.shrunk`; None: the registered presets with "-tiny" in their name.
        world_sizes: numbers of ranks. Nested strategies get each split of the ranks into more than one along
            each axis: 6 ranks as 2 x 3 and 3 x 2.
        dtypes: keys of :data:`PRECISIONS`.
        parts: names of parts of the models; None: all. A model without such a part is passed over.
        model_options: options of every model; if there are any, the models' variants are left out.
        options: options of every strategy; if there are any, the strategies' variants are left out.
        backend, backend_options: the name of a backend, and its options.
        device: the type of the devices of the ranks' tensors, as "cuda".
        batch: the number of samples; odd, so that an even split hides no fault.
        seq_len: the number of positions; 24 is divisible by 1 to 4.
        pool: the ranks to use; None: a pool that is closed when the iterator ends.
        expect: called with the number of cases before the first is run.
        explain: how many RED rows of each strategy get an :attr:`VerifyRow.explanation`.

    Raises:
        KeyError: an unknown strategy, model, dtype or backend.
        UserError: a config.json cannot be read, or has something that no model here has.
        ValueError: strategies cannot be nested in this way.
    """
    named = impls.all_strategies() if strategies is None else strategies
    nestings = [impls.nesting(name) for name in named]
    tried = [name for name in impls.all_models() if "-tiny" in name] if models is None else models
    of_models = dict(model_options or {})
    presets = {name: impls.set_options(_model(name), of_models, f"model {name}") for name in tried}
    _check_known(dtypes, backend)
    settings = {"batch": batch, "seq_len": seq_len, "backend": backend, "options": dict(options or {})}
    settings["backend_options"] = dict(backend_options or {})
    cases = [*_cases(nestings, presets, world_sizes, dtypes, parts, of_models, settings)]
    if pool is None and not world_sizes:
        return
    with ranks_for(max(world_sizes)) if pool is None else nullcontext(pool) as ranks:
        expect(len(cases))
        yield from _rows(ranks, cases, device, explain)


class PlannedCase(NamedTuple):
    """A case to run, its mesh (or number of ranks), the name of its model, and all options as text."""

    case: Case
    mesh: Mapping[str, int] | int
    model: str
    variant: str = ""


def size_of(mesh: Mapping[str, int] | int) -> int:
    """The number of ranks of a mesh, or the number itself."""
    return mesh if isinstance(mesh, int) else math.prod(mesh.values())


def _cases(
    nestings: Sequence[impls.Nesting],
    presets: Mapping[str, impls.Model],
    world_sizes: Sequence[int],
    dtypes: Sequence[str],
    parts: Sequence[str] | None,
    of_models: Mapping[str, Any],
    settings: Mapping[str, Any],
) -> Iterator[PlannedCase]:
    """The cases of :func:`verify_cases`; ``of_models``: options of all models; ``settings``: of each case."""
    of_all = {**settings["options"], **settings["backend_options"]}
    for strategy, (name, preset) in itertools.product(nestings, presets.items()):
        ways = () if settings["options"] or len(strategy.classes) > 1 else strategy.options_type().variants()
        tried = _tried(preset, parts, () if of_models else preset.variants(), ways)
        meshes: Iterable[Mapping[str, int] | int] = world_sizes
        if len(strategy.axes) > 1:
            meshes = itertools.chain.from_iterable(map(strategy.meshes, world_sizes))
        for mesh in meshes:
            for dtype, (part, varying, way) in itertools.product(dtypes, tried):
                if way and size_of(mesh) == 1:
                    continue
                model = impls.set_options(preset, varying, f"model {name}")
                set_options = {**of_models, **varying, **of_all, **way}.items()
                variant = " ".join(f"{option}={value}" for option, value in set_options)
                options = {**settings["options"], **way}
                case = Case(strategy, model, part, dtype, **{**settings, "options": options})
                folds = _foldings(case, size_of(mesh))
                every = not varying and not way and case.model.parts()[part].build == case.model.build
                for folded in folds if every else folds[-1:]:
                    yield PlannedCase(replace(case, folds=folded), mesh, name, variant)


def _rows(ranks: Ranks, cases: Sequence[PlannedCase], device: str, explain: int) -> Iterator[VerifyRow]:
    """The row of each case, as soon as the case is done."""
    failures: defaultdict[str, list[VerifyRow]] = defaultdict(list)  # the RED rows, by strategy
    for planned in cases:
        reds = failures[planned.case.strategy.name]
        row = verify_case(ranks, *planned, device=device, explain=len(reds) < explain)
        reds += [row] if row.status == "RED" else []
        yield row


def _check_known(dtypes: Sequence[str], backend: str) -> None:
    """Raise a KeyError for an unknown dtype or backend before any rank starts."""
    for dtype in dtypes:
        if dtype not in impls.PRECISIONS:
            raise KeyError(f"unknown dtype {dtype!r}; choices: {', '.join(impls.PRECISIONS)}")
    impls.backend_class(backend)


#: the most features of a position; wider models are shrunk, because float64 needs much memory
LARGEST_HIDDEN = 512


def _model(name: str) -> impls.Model:
    """The model of that name or config.json; a large model, or one from a file, is shrunk."""
    model = impls.model_preset(name, config=read_model_file(name) if names_a_file(name) else None)
    return model.shrunk() if names_a_file(name) or getattr(model, "hidden", 0) > LARGEST_HIDDEN else model


def _tried(
    preset: impls.Model,
    parts: Sequence[str] | None,
    of_model: Sequence[Mapping[str, Any]],
    of_strategy: Iterable[Mapping[str, Any]],
) -> list[tuple[str, Mapping[str, Any], Mapping[str, Any]]]:
    """The chosen parts of a model, with the changed options of model and strategy: each part with none, then
    the largest with each variant of the model, and with each of the strategy, also on packed documents."""
    chosen = [part for part in preset.parts() if parts is None or part in parts]
    packed = [each for each in of_model if "documents" in each]
    varied = [*itertools.product(of_model, [{}]), *itertools.product([{}, *packed], of_strategy)]
    return [*((part, {}, {}) for part in chosen), *((part, *each) for part in chosen[-1:] for each in varied)]


def verify_case(
    pool: Ranks,
    case: Case,
    mesh: Mapping[str, int] | int,
    model: str = "",
    variant: str = "",
    *,
    device: str = "cpu",
    explain: bool = False,
) -> VerifyRow:
    """Run one case on a mesh of the pool's ranks, or on a number of ranks along one axis, and judge it.

    Args:
        model, variant: the model's name and all options, for the row.
        explain: run a RED case once more, to say where its step goes wrong first.
    """
    row = VerifyRow(
        strategy=case.strategy.name,
        model=model,
        variant=variant,
        part=case.part,
        size=size_of(mesh),
        mesh=_mesh({}, case.folds),
        dtype=case.dtype,
        batch=case.batch,
        seq_len=case.seq_len,
        status="green",
    )
    try:
        sizes = case.strategy.sizes_for(mesh) if isinstance(mesh, int) else mesh
        row = replace(row, mesh=_mesh(sizes, case.folds))
        plan = case.strategy.configured(impls.Place({**sizes, **case.folds}), case.options)
        plan.check(case.model.sites(case.batch, case.seq_len, plan.vocabulary_parts))
        backend = shared_backend(row.size, device)
        if backend != STAGED and case.model.parts()[case.part].build == case.model.build:
            row = replace(row, bytes=VerifyRow.EQUAL)
        findings = pool.run(sizes, check_rank, case, idle_s=IDLE_S, device=device, backend=backend)
    except impls.Unsupported as unsupported:
        return replace(row, status="unsupported", reason=str(unsupported))
    except RankError as failed:
        red = failed_row(row, failed)
        why = partial(explain_failure, pool, case, sizes, device, backend)
    else:
        red = judged_row(row, case.strategy, findings)
        why = partial(explain_values, pool, case, sizes, device, backend)
    return replace(red, explanation=why()) if explain and red.status == "RED" else red


def failed_row(row: VerifyRow, failed: RankError) -> VerifyRow:
    """The row of a case in which a rank has refused, raised, died or not answered."""
    if failed.status == "unsupported":
        return replace(row, status="unsupported", reason=failed.reason)
    red = replace(row, status="RED", error=float("inf"), rank=failed.rank, bytes="")
    return replace(red, reason=failed.reason, traceback=str(failed))


def judged_row(
    row: VerifyRow,
    strategy: type[impls.Strategy] | impls.Nesting | None,
    findings: Sequence[Sequence[Finding]],
) -> VerifyRow:
    """The row with the worst of the findings, which are listed for ranks 0, 1, ...; ``strategy`` may be None
    if no finding is of a published baseline."""
    every = judged(impls.PRECISIONS[row.dtype].parameters, findings)
    own = [each for each in every if each.finding.apart is None]
    wrong = [each for each in own if each.excess > 1]
    worst = worst_of(own, wrong)
    row = replace(
        row,
        error=worst.finding.discrepancy.error,
        limit=worst.limit,
        tensor=worst.finding.tensor,
        rank=worst.rank,
        bytes="; ".join(unequal_bytes(wrong)) or row.bytes,
    )
    if not wrong:
        departing = [each for each in every if each.finding.apart is not None and each.excess > 1]
        said = how_departs(strategy, departing) if departing and strategy is not None else ""
        return replace(row, status="as published", verdict=said) if said else row
    return replace(row, status="RED", factor=worst.factor, verdict=how_wrong(worst, wrong))


def _mesh(sizes: Mapping[str, int], folds: Mapping[str, int]) -> str:
    """A mesh as text: every axis of the strategy, then the folded axes that have several ranks."""
    folded = impls.spelled(impls.given_folds(folds)).removeprefix("1")
    return "x".join(f"{axis}{n}" for axis, n in sizes.items()) + folded


def _foldings(case: Case, ranks: int) -> list[Mapping[str, int]]:
    """The sizes of the folded axes ep and etp with which a model's experts are verified on ``ranks`` ranks,
    the largest ep last; for a model without experts one empty mapping."""
    sites = case.model.sites(case.batch, case.seq_len)
    experts = [site.dims["E"] for site in sites if site.kind == "experts"]
    sizes: list[Mapping[str, int]] = [
        {"ep": ep, "etp": etp}
        for ep, etp in itertools.product(range(1, ranks + 1), (1, 2))
        if experts and ranks % (ep * etp) == 0 and all(n % ep == 0 for n in experts)
    ]
    return sizes or [{}]
