"""Whether cells may be measured: no speed is shown of code whose gradients are not proven right.

A strategy and a backend are proven for their code. Those of this package are, if :data:`PROVEN` names the
package's code, because `spbench verify` was green on all of it. All others (of users, those that call other
packages, and all of a package that was changed since) are verified in small before their first row: with the
tiny presets of the cell's model, on a few Gloo ranks of this machine. The cache keeps what was green, so that
each is verified once.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.resources import files
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.files import DiskCache, cache_folder
from spbench.bench.measure.engines.plan import plan
from spbench.bench.measure.processes.rank_pool import RankPool, Ranks
from spbench.bench.measure.verify.cases import LARGEST_HIDDEN, VerifyRow, verify_case
from spbench.bench.measure.verify.verdicts import verified_code
from spbench.bench.measure.verify.verified_run import Case
from spbench.bench.measured_code import digest_of_files
from spbench.bench.measurement import Outcome
from spbench.impls.layout import Unsupported
from spbench.impls.loose_files import is_packaged
from spbench.impls.models.model import Model, model_preset, models
from spbench.impls.registries import DEFAULT_BACKEND, backend_class, strategies, versions
from spbench.impls.strategies.nesting import nesting

#: beside this module: the digest of the package's code on which verification was green
PROVEN = "proven.json"
#: ranks along an axis, at most: of one axis, and of each of several
MOST, MOST_OF_EACH = 4, 2
#: seconds after which a case has failed that takes less than one on idle cores
_LIMIT_S = 60.0
#: bytes of the cache of what was green, whose entries have one
_CACHE_BYTES = 2**20

#: is told in a line what is verified
Say = Callable[[str], None]


def unproven(
    cells: Iterable[Cell], pool: Ranks | None = None, say: Say = lambda text: None
) -> dict[str, Outcome]:
    """By key of the cells that may not be measured, what they end as: a mismatch where the strategy or the
    backend is wrong, unsupported where nothing could be verified. A cell that its strategy refuses may be
    measured: it ends as unsupported.

    Args:
        pool: of as many ranks as are verified; None: started if there is something to verify.
        say: told before the first case which strategies are verified.
    """
    questions = {cell.key: question for cell in cells if (question := _question(cell)) is not None}
    unknown = {q.key: q for q in questions.values() if q.key not in _verdicts}
    if unknown:
        names = ", ".join(dict.fromkeys(str(each) for each in unknown.values()))
        say(f"verifying {names}: not verified yet as its code is now")
    with ExitStack() as stack:
        for key, question in unknown.items():
            pool = pool or stack.enter_context(RankPool(max(each.ranks for each in unknown.values())))
            _verdicts[key] = question.verdict(pool)
            if _verdicts[key] is None:
                _keep(key)
    verdicts = ((key, _verdicts[question.key]) for key, question in questions.items())
    return {key: verdict for key, verdict in verdicts if verdict is not None}


#: what this process has verified, by the key of the question; None: it is proven
_verdicts: dict[str, Outcome | None] = {}


@dataclass(frozen=True)
class _Question:
    """What the verdict on a cell follows from.

    Attributes:
        strategy: the cell's; "" where only its backend is to be verified and it has no axes of its own.
        backend: the cell's where that is to be verified.
        small: the cell's model in small, by its name; of one that cannot be shrunk the tiny presets.
        sizes: ranks along the axes of the strategy, as many as the cell has but for a limit, and two where it
            has one.
    """

    strategy: str
    options: Mapping[str, Any]
    backend: str
    backend_options: Mapping[str, Any]
    small: Mapping[str, Model]
    precision: str
    sizes: Mapping[str, int]

    def __str__(self) -> str:
        names = [self.strategy] if self.strategy else []
        return " with ".join([*names, *([] if self.backend == DEFAULT_BACKEND and names else [self.backend])])

    @property
    def ranks(self) -> int:
        """That are needed to verify it."""
        return math.prod(self.sizes.values()) if self.strategy else MOST

    @cached_property
    def key(self) -> str:
        """Names the question, and the code that it is asked of."""
        packages = versions(["torch", *(nesting(self.strategy).requires if self.strategy else ())])
        small = [*self.small.values()]
        asked = (self.strategy, self.options, self.backend, self.backend_options, self.precision, self.sizes)
        return _digest(*asked, small, packages, verified_code())

    def verdict(self, pool: Ranks) -> Outcome | None:
        """What cells end as that ask it; None: it is proven, on the most ranks that can run the model."""
        rows: list[VerifyRow] = []
        for strategy, sizes in self._tried():
            rows += [self._row(pool, strategy, sizes, *preset) for preset in self.small.items()]
            if any(row.status != "unsupported" for row in rows):
                break
        for row in rows:
            if row.status == "RED":
                # of a traceback the last line
                why = row.verdict.partition("; wrong too: ")[0] or row.reason.strip().splitlines()[-1]
                where = f"{row.model} on {row.mesh} Gloo ranks in {row.dtype}; spbench verify shows more"
                return Outcome("mismatch", f"not measured, as verification is red: {why} ({where})")
        if all(row.status == "unsupported" for row in rows):
            return Outcome("unsupported", f"not measured, as nothing could be verified: {rows[-1].reason}")
        return None

    def _tried(self) -> Iterator[tuple[str, Mapping[str, int]]]:
        """Strategies and their sizes, until one can run the model: the cell's strategy on ever fewer ranks;
        for a backend alone each of the package's."""
        if not self.strategy:
            for name, cls in strategies().items():
                if cls.axes and is_packaged(cls):
                    yield name, dict.fromkeys(nesting(name).axes, 2)
            return
        for fewer in range(max(self.sizes.values(), default=1)):
            yield self.strategy, {axis: max(1, ranks - fewer) for axis, ranks in self.sizes.items()}

    def _row(
        self, pool: Ranks, strategy: str, sizes: Mapping[str, int], name: str, preset: Model
    ) -> VerifyRow:
        case = Case(
            nesting(strategy),
            preset,
            [*preset.parts()][-1],
            self.precision,
            options=self.options,
            backend=self.backend,
            backend_options=self.backend_options,
        )
        return verify_case(pool, case, sizes, model_name=name, timeout_s=_LIMIT_S)


def _question(cell: Cell) -> _Question | None:
    """What must be verified before the cell is measured; None: nothing."""
    of_cell, backend = nesting(cell.strategy), cell.training.backend
    of_strategy = bool(of_cell.axes) and not _is_proven(*of_cell.classes)
    of_backend = cell.sizes.world > 1 and not _is_proven(backend_class(backend))
    if not (of_strategy or of_backend) or _refused(cell):
        return None
    along = {axis: cell.mesh_sizes[axis] for axis in of_cell.axes}
    most = MOST_OF_EACH if sum(ranks > 1 for ranks in along.values()) > 1 else MOST
    question = _Question(
        strategy=cell.strategy if of_cell.axes else "",
        options=cell.strategy_options,
        backend=backend if of_backend else DEFAULT_BACKEND,
        backend_options=cell.training.backend_options if of_backend else {},
        small=_small(cell),
        # kernels of other packages may have no float64
        precision=cell.precision if of_cell.requires else "fp64",
        sizes={axis: min(max(2, ranks), most) for axis, ranks in along.items()},
    )
    return None if _kept(question.key) else question


def _small(cell: Cell) -> dict[str, Model]:
    """The cell's model, without its options, in sizes for verification."""
    own = model_preset(cell.model, config=cell.model_config_json).shrunk()
    if getattr(own, "hidden", 0) <= LARGEST_HIDDEN:
        return {cell.model: own}
    return {name: each for name, each in models().items() if type(each) is type(own) and "-tiny" in name}


def _refused(cell: Cell) -> bool:
    if cell.search is not None:  # for some sizes, perhaps, which the search finds out
        return False
    try:
        plan(cell)
    except Unsupported:
        return True
    return False


# -- what is known to be proven ------------------------------------------------------------------------------


def _is_proven(*classes: type) -> bool:
    """Whether these are the package's, on whose code as it is verification was green; what calls other
    packages rests on their code too."""
    own = all(is_packaged(cls) and not getattr(cls, "requires", ()) for cls in classes)
    return own and _package_is_proven()


@cache
def package_code() -> str:
    """The digest of the strategies, models and backends of this package, without plug-ins."""
    root = Path(__file__).resolve().parents[3]
    return digest_of_files(root, (root / "impls").rglob("*.py"))


@cache
def _package_is_proven() -> bool:
    proven = json.loads(files(__package__).joinpath(PROVEN).read_text(encoding="utf-8"))
    return proven["code"] == package_code() or _kept(_digest("package", package_code()))


def keep_package_proof() -> None:
    """Note in the cache that verification was green on all of the package's code as it is."""
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
