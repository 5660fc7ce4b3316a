"""The code that is measured: a digest of its meaning, because rows of other code are out of date; and the
comparison with the checkout of spbench around a folder, whose code may differ.

`spbench` measures the files that Python imports. After `pip install .` these files are a copy, so that a
change of the checkout is neither run nor judged; an editable install imports the checkout itself.
"""

import ast
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from itertools import chain
from pathlib import Path

from spbench.bench.errors import UserError
from spbench.bench.files import cache_folder, write_whole
from spbench.impls import plugin_files

#: the rooms and modules of bench whose code no measurement runs; a new room counts until this set has it
NOT_MEASURING = frozenset(
    {
        *("command_line", "tools", "measure/scenarios", "measure/sweep", "measure/trust", "measure/verify"),
        *("errors.py", "git.py", "measured_code.py", "row.py", "units.py", "verdicts.py"),
    }
)

#: the number of hexadecimal digits of a digest
DIGEST_LENGTH = 16

#: the cache's file of [stamp, digest of the meaning] by path; without it parsing all files takes 0.6 s
_FILE = "code.json"
#: a file changed less than this long ago may change again under the same stamp, so its digest is not kept
_SETTLED_NS = 2 * 10**9


@cache
def code_digest() -> str:
    """The digest of the Python files that can change a measurement, as they are at the first call: all of
    impls/, bench/ without :data:`NOT_MEASURING`, and plug-ins."""
    root = Path(__file__).resolve().parents[1]
    return digest_of_files(root, [*measuring_files(root), *plugin_files()])


def measuring_files(root: Path) -> Iterator[Path]:
    """The Python files that a measurement may run, and their tables, below ``root``, which has the folders
    impls and bench."""
    yield from strategy_files(root)
    yield from (root / "impls").glob("*.pyi")  # the door: it says from which module a name comes
    for path in chain((root / "bench").rglob("*.py"), (root / "bench" / "measure").rglob("*.yaml")):
        within = path.relative_to(root / "bench")
        if not NOT_MEASURING.intersection(each.as_posix() for each in (within, *within.parents)):
            yield path


def strategy_files(root: Path) -> Iterator[Path]:
    """The Python files and tables of strategies and models: all of impls/ below ``root``."""
    return chain.from_iterable((root / "impls").rglob(pattern) for pattern in ("*.py", "*.yaml"))


def digest_of_files(root: Path, paths: Iterable[Path]) -> str:
    """A digest of the files' names below ``root`` and of their content, for Python without docstrings."""
    content = hashlib.sha256()
    for name, digest in _digests(root, paths):
        content.update(f"{name} {digest}\n".encode())
    return content.hexdigest()[:DIGEST_LENGTH]


def _digests(root: Path, paths: Iterable[Path]) -> Iterator[tuple[str, str]]:
    """Each file's name below ``root``, and the digest of its content, for Python without docstrings."""
    with _kept_digests() as kept:
        for path in sorted(paths):
            name = path.relative_to(root) if path.is_relative_to(root) else path.name
            yield str(name), _digest(path, kept)


def _digest(path: Path, kept: dict[str, list[str]]) -> str:
    status, place = path.stat(), os.path.realpath(path)
    stamp = f"{status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"
    if kept.get(place, [""])[0] == stamp:
        return kept[place][1]
    digest = hashlib.sha256(_meaning(path.read_bytes())).hexdigest()
    if time.time_ns() - status.st_ctime_ns > _SETTLED_NS:
        kept[place] = [stamp, digest]
    return digest


def _meaning(source: bytes) -> bytes:
    """The syntax tree of a Python file without docstrings, as bytes that are the same in all releases of
    Python; ``source`` itself if it cannot be parsed."""
    parts: list[str] = []
    try:
        _write(ast.parse(source), parts)
    except (SyntaxError, ValueError, RecursionError):
        return source
    return "\n".join(parts).encode()


def _write(node: ast.AST, parts: list[str]) -> None:
    parts.append(type(node).__name__)
    for name in node._fields:
        value = getattr(node, name, None)
        if isinstance(value, list):
            values = value[1:] if _begins_with_docstring(node, name) else value
        else:
            values = [] if value is None else [value]
        if values:  # fields that newer releases add are mostly empty
            parts.append(f"{name} {len(values)}")
        for each in values:
            if isinstance(each, ast.AST):
                _write(each, parts)
            else:
                parts.append(repr(each))


def _begins_with_docstring(node: ast.AST, field: str) -> bool:
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
        return field == "body" and ast.get_docstring(node, clean=False) is not None
    return False


@contextmanager
def _kept_digests() -> Iterator[dict[str, list[str]]]:
    """A context with the digests in :data:`_FILE` by path; changed digests are written back at the end. A
    file that cannot be read or written is ignored."""
    folder = cache_folder()
    kept: dict[str, list[str]] = {}
    with suppress(OSError, ValueError, AttributeError, TypeError):  # the file may be missing or damaged
        content = json.loads((folder / _FILE).read_bytes()) if folder else {}
        kept = {path: each for path, each in content.items() if [*map(type, each)] == [str, str]}
    before = dict(kept)
    yield kept
    if folder and kept != before:
        with suppress(OSError, UserError):
            write_whole(folder / _FILE, json.dumps({p: each for p, each in kept.items() if Path(p).exists()}))


#: the folder of baselines in a checkout; each baseline is in a folder of its scenario's name
BASELINES = Path("results", "baseline")

#: the folders, and patterns of their files, that rows and comparisons with published numbers depend on
_MEASURED = (
    *((room, kind) for room in ("impls", "bench") for kind in ("*.py", "*.pyi")),
    *(("bench", "*.yaml"), ("bench", "*.json")),
    ("scenarios", "*.yaml"),
    *(("results/papers", "*.csv"), ("results/measured", "*.csv"), ("results/field", "*.csv")),
)
#: a folder with all of these is a checkout of spbench
_MARKS = ("pyproject.toml", "bench/cell.py", "impls/registries.py", "scenarios")


def imported_tree() -> Path:
    """The folder with the imported rooms (bench, impls, ...): a checkout, or ``site-packages/spbench``."""
    return Path(__file__).resolve().parents[1]


def checkout_of(folder: Path) -> Path | None:
    """The root of the checkout of spbench in which a folder lies; None if it lies in no checkout."""
    here = folder.resolve()
    return next((at for at in (here, *here.parents) if all((at / mark).exists() for mark in _MARKS)), None)


def differing_files(tree: Path, other: Path) -> list[str]:
    """The names, below either tree, of the files of :data:`_MEASURED` whose meaning differs, or that only one
    tree has."""
    a, b = (dict(_digests(root, _measured_files(root))) for root in (tree, other))
    return sorted(name for name in {*a, *b} if a.get(name) != b.get(name))


def _measured_files(root: Path) -> set[Path]:
    return {path for folder, pattern in _MEASURED for path in (root / folder).rglob(pattern)}


@cache
def unmeasured_checkout(folder: Path) -> str:
    """A message if ``folder`` lies in a checkout of spbench whose files differ from the measured files; "" if
    the files mean the same, or the folder lies in no checkout."""
    checkout, tree = checkout_of(folder), imported_tree()
    if checkout is None or checkout == tree or not (names := differing_files(tree, checkout)):
        return ""
    more = f" and {len(names) - 1} more files" if len(names) > 1 else ""
    shown = os.path.relpath(tree, checkout) if tree.is_relative_to(checkout) else tree
    return f"measured: {shown}, which differs from this checkout, {checkout}, in {names[0]}{more}"


def refuse_unmeasured_checkout(folder: Path, gate: str) -> None:
    """Refuse a verdict on the checkout around a folder, if other code than the checkout's is measured.

    Args:
        gate: the subject of the message, such as "the gate".

    Raises:
        UserError: the checkout's files differ from the measured files.
    """
    if said := unmeasured_checkout(folder):
        raise UserError(
            f"{gate} would be of other code than this checkout's ({said}); run  pip install -e .  "
            "in the checkout, so that its own files are measured"
        )


def has_baseline(scenario: str, folder: Path) -> bool:
    """Whether the checkout of spbench around a folder has a committed baseline of a scenario."""
    checkout = checkout_of(folder)
    return checkout is not None and (checkout / BASELINES / scenario).is_dir()


def is_baseline(path: Path, folder: Path) -> bool:
    """Whether a path lies among the committed baselines of the checkout of spbench around a folder."""
    checkout = checkout_of(folder)
    return checkout is not None and path.resolve().is_relative_to(checkout / BASELINES)
