"""A kind of answer is one file: section, checks and comparisons are taken up by its being there."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import spbench.bench.tools.papers.answers
from spbench.bench.measure.scenarios.scenario import Scenario
from spbench.bench.row import Row
from spbench.bench.tools.papers.answer import (
    KINDS_PACKAGE,
    answer_kinds,
    compare,
    document_model,
    load_scenario,
)
from spbench.impls.discovery import _named_classes

#: a plug-in's kind, which is as good a module of the package
KIND = Path(__file__).parents[2] / "plugins" / "examples" / "bounds.py"

#: what remembers the kinds that were found
CACHES = (_named_classes, document_model)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder for a scenario with a section of a new kind, whose only trace is a file in the package."""
    package = tmp_path / "kinds"
    package.mkdir()
    (package / "bounds.py").write_text(KIND.read_text())
    path = [*spbench.bench.tools.papers.answers.__path__, str(package)]
    monkeypatch.setattr(spbench.bench.tools.papers.answers, "__path__", path)
    (tmp_path / "b.csv").write_text("claim,published\nlow,100\nhigh,3000\n")
    for cached in CACHES:
        cached.cache_clear()
    yield tmp_path
    sys.modules.pop(f"{KINDS_PACKAGE}.bounds", None)
    for cached in CACHES:
        cached.cache_clear()


def scenario(folder: Path) -> Scenario:
    low, high = ({"claim": c, "published": {"file": "b.csv"}, "cell": {"world": 2}} for c in ("low", "high"))
    content = {
        "title": "Bounds",
        "defaults": {"model": "bert-tiny", "batch": 4, "seq_len": 512, "strategy": "tensor_parallel"},
        "groups": [{"sizes": {"tp": [1, 2]}}],
        "bounds": [low, high],
        "inferred_from": [{"setting": "layers", "answers": ["high"], "reason": "a test"}],
    }
    (folder / "s.yaml").write_text(yaml.safe_dump(content))
    return load_scenario(str(folder / "s.yaml"))


def test_the_kinds_are_the_modules_of_the_package() -> None:
    assert list(answer_kinds()) == ["curves", "values", "formulas", "tables"]


def test_a_new_kind_is_one_file(folder: Path) -> None:
    loaded = scenario(folder)
    cells = loaded.cells[""]
    rows: dict[str, Row] = {cell.key: {"measurement": {"peak_memory_bytes": 2000}} for cell in cells}
    found = compare(loaded, cells, rows)
    assert [(c.claim, c.published, c.reproduced, c.role, c.note) for c in found] == [
        ("low", 100.0, 2000, "predicted", "exceeded"),
        ("high", 3000.0, 2000, "inferred", "within"),
    ]
