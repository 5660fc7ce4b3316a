"""A release: its metadata agree, its distributions pass twine, and a wheel runs from an empty folder.
Every text file is read and written in UTF-8, whatever the locale: Python's default is the locale's."""

import ast
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.api.distributions import ROOT, environment, pip, succeed
from tests.grid import data

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: what version 1.2.0 of the Citation File Format demands, and what is ours beyond that, with its kinds
CITATION = data(__file__)["CITATION"]
CITATION["properties"] |= {name: {"const": PROJECT[name]} for name in ("version", "license")}


def test_the_citation_is_one_of_this_version() -> None:
    jsonschema.validate(yaml.safe_load((ROOT / "CITATION.cff").read_text()), CITATION)


def test_the_first_version_of_the_changelog_is_this_one() -> None:
    text = (ROOT / "CHANGELOG.md").read_text()
    versions = re.findall(r"^## \[(.+?)\] - (Unreleased|\d{4}-\d\d-\d\d)$", text, re.MULTILINE)
    assert versions[0][0] == PROJECT["version"]
    assert len(versions) == len(re.findall("^## ", text, re.MULTILINE))


def test_every_dependency_has_its_version_in_the_constraints() -> None:
    extras = PROJECT["optional-dependencies"].values()
    names = {
        re.match(r"[\w.-]+", line)[0].lower().replace("_", "-")  # type: ignore[index]
        for line in [*PROJECT["dependencies"], *(line for extra in extras for line in extra)]
    }
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    constrained = {line.split("==")[0].lower().replace("_", "-") for line in lines if "==" in line}
    assert names - constrained - {"spbench"} == set()


def test_the_constraints_name_the_triton_of_torch() -> None:
    """torch's builds for CUDA ask for one release of Triton; with another pip refuses README's command."""
    asked = [each for each in metadata.requires("torch") or () if re.match(r"triton\s*==", each)]
    if not asked:
        pytest.skip("a build of torch without CUDA asks for no Triton")
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    (constraint,) = (line for line in lines if line.startswith("triton=="))
    assert {re.sub(r"[\s;].*", "", each.replace(" ", "")) for each in asked} == {constraint}


#: files over 500 kB: the baselines of whole papers
LARGE = {f"results/baseline/{name}/cells.jsonl" for name in ("dsp_throughput", "lasp_scalability")}


def test_no_other_file_is_larger_than_500_kb() -> None:
    """As the hook of .pre-commit-config.yaml holds: a history keeps each version of a large file."""
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    files = [name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file()]
    if not files:
        pytest.skip("this is no checkout")
    large = {name for name in files if (ROOT / name).stat().st_size > 500 * 1024}
    assert large == LARGE


def test_a_wheel_has_every_table_of_a_room() -> None:
    """A table that package-data does not name is found in a checkout, and missing after an install."""
    named = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    lacking = []
    for file in (
        path for room in ("bench", "impls", "plots", "scenarios") for path in (ROOT / room).rglob("*")
    ):
        if file.is_dir() or file.suffix in (".py", ".pyc"):
            continue
        package = next(folder for folder in file.parents if (folder / "__init__.py").exists())
        name = ".".join(("spbench", *package.relative_to(ROOT).parts))
        if not any(file.relative_to(package).match(each) for each in (*named["*"], *named.get(name, ()))):
            lacking.append(file.relative_to(ROOT))
    assert lacking == []


release = pytest.mark.skipif(
    any(not [*metadata.distributions(name=name)] for name in ("build", "twine", "setuptools", "pip")),
    reason="needs the extra release, pip and setuptools, as nothing is downloaded",
)


@pytest.mark.slow
@release
@pytest.mark.xdist_group("installation")
def test_build_makes_distributions_that_twine_accepts(checkout: Path, tmp_path: Path) -> None:
    succeed(sys.executable, "-m", "build", "--no-isolation", "--outdir", tmp_path, checkout, cwd=tmp_path)
    made = sorted(tmp_path.iterdir())
    assert [path.suffix for path in made] == [".whl", ".gz"]
    checked = succeed(sys.executable, "-m", "twine", "check", "--strict", *made, cwd=tmp_path)
    assert checked.count("PASSED") == 2


@pytest.mark.slow
@release
@pytest.mark.xdist_group("installation")
def test_a_wheel_runs_from_an_empty_folder(wheel: Path, tmp_path: Path) -> None:
    """Scenarios, clusters, published numbers and figures are those that it has in itself."""
    python = environment(tmp_path / "venv")
    pip(python, "install", wheel, cwd=tmp_path)
    (folder := tmp_path / "empty").mkdir()
    command = str(python.parent / "spbench")
    version = succeed(command, "--version", cwd=folder)
    assert re.fullmatch(rf"spbench {PROJECT['version']}, code [0-9a-f]{{16}}, torch .+\n", version), version
    assert "piz-daint-p100" in succeed(command, "list", "clusters", cwd=folder)
    options = ("--where", "model_options.layers=1,engine=virtual", "--world-size", "2,4")
    printed = succeed(command, "run", "--scenario", "communication", *options, cwd=folder)
    assert printed.count("| ok ") == 4
    rows = folder / "results/runs/communication"
    assert {path.name for path in rows.iterdir()} >= {"cells.jsonl", "communication.png"}
    searched = ("--strategy", "tensor_parallel", "--model", "bert-base", "--world-size", "4")
    printed = succeed(command, "run", "--scenario", "max_seqlen", *searched, cwd=folder)
    assert re.search(r"\| bert-base \| tensor_parallel \| +4 \| +656 \|", printed), printed
    assert (folder / "results/runs/max_seqlen/max_seqlen.svg").stat().st_size


ROOMS = ("bench", "impls", "plots", "scripts")
#: whose ``open`` makes no text of a file
_OTHERS = ("os", "Image", "gzip", "webbrowser")


def without_encoding(source: str) -> Iterator[int]:
    """The lines of calls that read or write a text and name no encoding."""
    for call in ast.walk(ast.parse(source)):
        if not isinstance(call, ast.Call) or any(word.arg == "encoding" for word in call.keywords):
            continue
        owner = getattr(getattr(call.func, "value", None), "id", "")
        name = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if name in ("read_text", "write_text") and (owner or isinstance(call.func, ast.Attribute)):
            yield call.lineno
        elif name == "open" and owner not in _OTHERS:
            words = [*call.args, *(word.value for word in call.keywords if word.arg == "mode")]
            modes = [word.value for word in words if isinstance(word, ast.Constant)]
            if not any(isinstance(mode, str) and {*mode} <= {*"rwxab+"} and "b" in mode for mode in modes):
                yield call.lineno


def test_what_is_found() -> None:
    assert [*without_encoding("p.read_text()\np.open('w')\nopen(x)\nf(y).write_text(z)\n")] == [1, 2, 3, 4]
    named = "p.read_text(encoding='utf-8')\np.open('rb')\nos.open(x, 1)\nread_text(p)\n"
    assert [*without_encoding(named)] == []


@pytest.mark.parametrize("room", ROOMS)
def test_no_text_is_in_the_encoding_of_the_locale(room: str) -> None:
    files = sorted((ROOT / room).rglob("*.py"))
    assert files
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in files
        for line in without_encoding(path.read_text(encoding="utf-8"))
    ]
    assert found == []


@pytest.mark.slow
def test_a_command_in_the_plainest_locale(tmp_path: Path) -> None:
    """Its files have characters beyond ASCII, and so has what it prints."""
    locale = {"LC_ALL": "POSIX", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    scenario = tmp_path / "s.yaml"
    cell = "{model: bert-tiny, strategy: single, batch: 1, seq_len: 8}"
    scenario.write_text(f"title: größer ±3\ngroups:\n  - {cell}\n", encoding="utf-8")
    done = subprocess.run(
        [sys.executable, "-m", "spbench", "run", str(scenario), "--dry-run", "--output", str(tmp_path)],
        env={**os.environ, **locale},
        capture_output=True,
        timeout=120,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"gr\\xf6\\xdfer \\xb13 (1 cells)" in done.stdout
