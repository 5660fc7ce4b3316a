"""What is installed, from a wheel, an sdist or a checkout: spbench at the top and nothing else."""

import importlib.util
import os
import subprocess
import sys
import tarfile
from importlib import metadata
from pathlib import Path

import pytest

from tests.api.distributions import contents, environment, pip, succeed
from tests.api.user_folder import UserFolder
from tests.grid import data

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("installation"),
    pytest.mark.skipif(
        # find_spec("pip") would make setuptools, and torch's compiler with it, fail later in this process
        any(not [*metadata.distributions(name=name)] for name in ("setuptools", "pip")),
        reason="needs pip and setuptools, as nothing is downloaded",
    ),
]

#: a user's module, and what is wrong in it
TYPED = data(__file__)["TYPED"]


def test_links_survive_a_clone(checkout: Path) -> None:
    for name in ("bench", "impls", "plots", "results", "scenarios"):
        assert os.readlink(checkout / "spbench" / name) == f"../{name}"
    assert os.readlink(checkout / "src" / "spbench") == "../spbench"


def test_the_wheel_has_one_name_and_all_data(wheel: Path, checkout: Path) -> None:
    names = contents(wheel)
    assert {name.split("/")[0] for name in names} == {"spbench"}
    results = [f"results/{folder}/*.csv" for folder in ("papers", "measured", "field")]
    data = ("scenarios/*.yaml", "scenarios/clusters/*.yaml", *results)
    for pattern in (*data, "plots/*.py"):
        files = {f"spbench/{path.relative_to(checkout)}" for path in checkout.glob(pattern)}
        assert files
        assert files <= names
    # stubs, templates and tables beside the code too: without the door's stub no command runs
    for path in (checkout / room for room in ("bench", "impls")):
        files = {f"spbench/{each.relative_to(checkout)}" for each in path.rglob("*") if each.is_file()}
        assert {name for name in files if "__pycache__" not in name} <= names
    assert "spbench/py.typed" in names


def test_the_sdist_makes_the_same_wheel(sdist: Path, wheel: Path, tmp_path: Path) -> None:
    with tarfile.open(sdist) as file:
        file.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    pip(sys.executable, "wheel", "--wheel-dir", tmp_path / "wheel", source, cwd=tmp_path)
    (again,) = (tmp_path / "wheel").iterdir()
    assert contents(again) == contents(wheel)


def names_of(python: Path, cwd: Path) -> list[str]:
    """What can be imported at the top, of our folders, and all modules of spbench."""
    code = (
        "import importlib.util as u, pkgutil, spbench;"
        "print(*[n for n in ('bench', 'impls', 'plots', 'results', 'scenarios', 'tests') if u.find_spec(n)]);"
        "print(*sorted(m.name for m in pkgutil.walk_packages(spbench.__path__, 'spbench.')))"
    )
    return succeed(python, "-I", "-c", code, cwd=cwd).splitlines()


@pytest.mark.parametrize("editable", [False, True], ids=["installed", "editable"])
def test_it_works_among_a_users_files(checkout: Path, wheel: Path, tmp_path: Path, editable: bool) -> None:
    """`pip install .` and `pip install -e .` alike; the command runs a scenario with two jobs."""
    python = environment(tmp_path / "venv")
    pip(python, "install", *(["-e"] if editable else []), checkout, cwd=tmp_path)
    modules = {name for name in contents(wheel) if name.endswith(".py")}
    top, found = names_of(python, tmp_path)
    assert top == ""
    assert len(found.split()) == len(modules) - 1  # but spbench itself
    (tmp_path / "mine").mkdir()
    user = UserFolder(tmp_path / "mine", str(python))
    command = str(python.parent / "spbench")
    listed = succeed(command, "list", "scenarios", cwd=user.folder)
    assert "max_seqlen" in listed
    scenario = ("--scenario", "mine.yaml", "--where", "engine=virtual", "--jobs", "2", "--format", "csv")
    ran = succeed(command, "run", *scenario, cwd=user.folder)
    assert ran.count(",ok,") == 2


@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
@pytest.mark.parametrize("editable", [False, True], ids=["installed", "editable"])
def test_type_checkers_understand_it(checkout: Path, tmp_path: Path, editable: bool) -> None:
    python = environment(tmp_path / "venv")
    pip(python, "install", *(["-e"] if editable else []), checkout, cwd=tmp_path)
    (tmp_path / "typed.py").write_text(TYPED)
    options = ("--strict", "--python-executable", python, "--cache-dir", tmp_path / "cache")
    command = [sys.executable, "-m", "mypy", *map(str, options), "typed.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=500)
    errors = [line for line in done.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, done.stdout + done.stderr
    assert 'typed.py:10: error: Argument 1 to "run" has incompatible type "int"' in errors[0]
