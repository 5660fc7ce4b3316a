"""Where rows come from: the commit, and whether the code is the commit's."""

import subprocess
from pathlib import Path

import pytest

from spbench.bench.sweep.provenance import _commit


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository with a file of code, one that is made from rows, a text, and published numbers."""
    for name in ("code.py", "results/reproduction/a.csv", "README.md", "results/papers/b.csv"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("1")
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    for command in (["init", "-q"], ["add", "."], [*identity, "commit", "-qm", "first"]):
        subprocess.run(["git", "-C", str(tmp_path), *command], check=True)
    return tmp_path


def test_what_is_made_from_rows_does_not_make_the_code_dirty(checkout: Path) -> None:
    """So that `spbench reproduce rsa --write` does not keep `spbench reproduce lasp --write` from writing."""
    clean = _commit(checkout)
    assert clean is not None
    assert len(clean) == 12
    (checkout / "results/reproduction/a.csv").write_text("2")
    (checkout / "README.md").write_text("2")
    (checkout / "untracked").write_text("2")
    assert _commit(checkout) == clean


@pytest.mark.parametrize("name", ["code.py", "results/papers/b.csv"])
def test_changed_code_is_dirty(checkout: Path, name: str) -> None:
    clean = _commit(checkout)
    (checkout / name).write_text("2")
    assert _commit(checkout) == f"{clean}-dirty"


def test_no_checkout(tmp_path: Path) -> None:
    assert _commit(tmp_path) is None
