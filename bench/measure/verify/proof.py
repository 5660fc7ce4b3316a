"""Whether cells may be measured: code whose gradients are not proven right gets no speed.

A proof holds for one version of the code. This package's strategies and backends are proven if :data:`PROVEN`
has the digest of the package's code: `spbench verify` was green on its strategies, and the tests verify its
backends. All others (users' code, code that calls other packages, and all of a changed package) are verified
before their first row, with a small model on a few Gloo ranks of this machine. The cache keeps green
verdicts, so that each is verified once.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import cache
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any

from spbench import impls
from spbench.bench.cell import OWN_STEP, Cell
from spbench.bench.files import DiskCache, cache_folder
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.processes.rank_pool import RankPool, Ranks
from spbench.bench.measure.verify.cases import LARGEST_HIDDEN, PlannedCase, size_of, verify_case
from spbench.bench.measure.verify.verified_run import Case
from spbench.bench.measured_code import digest_of_files, strategy_files
from spbench.bench.measurement import Outcome
from spbench.bench.verdicts import verified_code

#: the file in this folder with the digest of the package's code on which verification was green
PROVEN = "proven.json"
#: the most ranks along an axis: of a strategy with one axis, and of one with several
MOST, MOST_OF_EACH = 4, 2
#: the size in bytes of the cache of green verdicts, whose entries have one byte
_CACHE_BYTES = 2**20

#: a function that shows a line on what is verified
Say = Callable[[str], None]


def unproven(
    cells: Iterable[Cell], pool: Ranks | None = None, say: Say = lambda text: None
) -> dict[str, Outcome]:
    """The outcome of cells that may not be measured, by key: "mismatch" if the strategy or the backend is
    wrong, "unsupported" if nothing could be verified. A cell that its strategy refuses is left out.

    Args:
        pool: the ranks to verify on; None: a pool is started if there is something to verify.
        say: called before the first case with a line on which strategies are verified.
    """
    asked, named = dict[str, str](), dict[str, str]()
    unknown = dict[str, list[PlannedCase]]()
    for cell in cells:
        if cases := _cases(cell):
            asked[cell.key] = key = _key(cases)
            if key not in _verdicts and not _kept(key):
                unknown[key] = cases
                named[key] = cell.strategy if impls.nesting(cell.strategy).axes else cell.training.backend
    if unknown:
        say(f"verifying {', '.join(dict.fromkeys(named.values()))}: not verified yet as its code is now")
    with ExitStack() as stack:
        for key, cases in unknown.items():
            if pool is None:
                most = max(size_of(each.mesh) for some in unknown.values() for each in some)
                pool = stack.enter_context(RankPool(most))
            _verdicts[key] = _verdict(pool, cases)
            if _verdicts[key] is None:
                _keep(key)
    verdicts = {cell: _verdicts.get(key) for cell, key in asked.items()}
    return {cell: verdict for cell, verdict in verdicts.items() if verdict is not None}


#: the outcomes of this process's verifications, by :func:`_key`; None: proven
_verdicts: dict[str, Outcome | None] = {}


def _cases(cell: Cell) -> list[PlannedCase]:
    """The small cases to verify before the cell is measured; none where it is proven or refused. Later cases
    have the strategy on fewer ranks, and at last no options of the backend, for when earlier cases are
    unsupported. A backend of a strategy without axes is verified with the package's strategies. A user's step
    is not verified, because `spbench verify` needs another batch than its measurement."""
    if cell.strategy == OWN_STEP:
        return []
    cls, backend = impls.nesting(cell.strategy), cell.training.backend
    of_strategy = bool(cls.axes) and not _is_proven(*cls.classes)
    of_backend = cell.sizes.world > 1 and not _is_proven(impls.backend_class(backend))
    if not (of_strategy or of_backend) or _refused(cell):
        return []
    along = {axis: max(2, cell.mesh_sizes[axis]) for axis in cls.axes}
    most = min(MOST_OF_EACH if len(along) > 1 else MOST, max(along.values(), default=1))
    tried = [(cls, {axis: min(n, fewer) for axis, n in along.items()}) for fewer in range(most, 0, -1)]
    if not cls.axes:
        own = (
            impls.nesting(name)
            for name, each in impls.all_strategies().items()
            if each.axes and impls.is_packaged(each)
        )
        tried = [(each, dict.fromkeys(each.axes, 2)) for each in own]
    how: dict[str, Any] = {"options": cell.strategy_options} if cls.axes else {}
    chosen = [how]
    if of_backend:  # whose options may be for more replicas than a small case has
        chosen = [
            {**how, "backend": backend, "backend_options": each}
            for each in (cell.training.backend_options, {})
        ]
    # kernels of other packages may have no float64
    precision = cell.precision if cls.requires else "fp64"
    return [
        PlannedCase(Case(of, model, [*model.parts()][-1], precision, **settings), on, name)
        for settings in chosen
        for of, on in tried
        for name, model in _small(cell).items()
    ]


def _key(cases: Sequence[PlannedCase]) -> str:
    """A digest of the cases, their code and packages: if one changes, the cases are verified again."""
    packages = impls.versions(["torch", *cases[0].case.strategy.requires])
    return _digest([tuple(each) for each in cases], packages, verified_code())


def _verdict(pool: Ranks, cases: Sequence[PlannedCase]) -> Outcome | None:
    """The outcome of the cells of these cases; None: proven, as a case is green and none is red."""
    for _, of_size in groupby(cases, key=lambda e: (e.case.strategy.name, e.mesh, e.case.backend_options)):
        rows = [verify_case(pool, *each) for each in of_size]
        if red := next((row for row in rows if row.status == "RED"), None):
            # of a traceback the last line
            why = red.verdict.partition("; wrong too: ")[0] or red.reason.strip().splitlines()[-1]
            where = f"{red.model} on {red.mesh} Gloo ranks in {red.dtype}; spbench verify shows more"
            return Outcome("mismatch", f"not measured, as verification is red: {why} ({where})")
        if any(row.status != "unsupported" for row in rows):
            return None
    return Outcome("unsupported", f"not measured, as nothing could be verified: {rows[-1].reason}")


def _small(cell: Cell) -> dict[str, impls.Model]:
    """The cell's model by name, with default options and in sizes for verification."""
    own = impls.model_preset(cell.model, config=cell.model_config_json).shrunk()
    if getattr(own, "hidden", 0) <= LARGEST_HIDDEN:
        return {cell.model: own}
    return {
        name: each for name, each in impls.all_models().items() if type(each) is type(own) and "-tiny" in name
    }


def _refused(cell: Cell) -> bool:
    if cell.search is not None:  # a search finds out which sizes are refused
        return False
    try:
        with impls.exits_refused():
            plan(cell)
    except KeyboardInterrupt:
        raise
    except BaseException:  # the row of the cell tells what users' code raises
        return True
    return False


# -- proofs
# ---------------------------------------------------------------------------------------------------


def _is_proven(*classes: type) -> bool:
    """Whether all classes are this package's, call no other package, and verification was green on the
    package's code as it is now."""
    own = all(impls.is_packaged(cls) and not getattr(cls, "requires", ()) for cls in classes)
    return own and _package_is_proven()


@cache
def package_code() -> str:
    """The digest of the strategies, models and backends of this package, without plug-ins."""
    root = Path(__file__).resolve().parents[3]
    return digest_of_files(root, strategy_files(root))


@cache
def _package_is_proven() -> bool:
    proven = json.loads(files(__package__).joinpath(PROVEN).read_text(encoding="utf-8"))
    return proven["code"] == package_code() or _kept(_digest("package", package_code()))


def keep_package_proof() -> None:
    """Note in the cache that verification was green on the package's code as it is now."""
    _keep(_digest("package", package_code()))


def _digest(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(parts, sort_keys=True, default=repr).encode()).hexdigest()


def _cache() -> DiskCache | None:
    folder = cache_folder()
    return None if folder is None else DiskCache(folder / "proven", _CACHE_BYTES)


def _kept(key: str) -> bool:
    kept = _cache()
    return kept is not None and kept.read(key) is not None


def _keep(key: str) -> None:
    if (kept := _cache()) is not None:
        kept.write(key, b"1")
