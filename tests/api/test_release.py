"""A release: its metadata agree, its distributions pass twine, and a wheel runs from an empty folder."""

import importlib.util
import re
import sys
import tomllib
from pathlib import Path

import jsonschema
import pytest
import yaml

from tests.api.distributions import ROOT, environment, pip, succeed

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
#: what version 1.2.0 of the Citation File Format demands, and what is ours beyond that, with its kinds
CITATION = {
    "type": "object",
    "required": ["cff-version", "message", "title", "authors", "version", "license"],
    "properties": {
        "cff-version": {"const": "1.2.0"},
        "type": {"enum": ["software", "dataset"]},
        "version": {"const": PROJECT["version"]},
        "license": {"const": PROJECT["license"]},
        "authors": {"type": "array", "minItems": 1, "items": {"$ref": "#/$defs/author"}},
        "keywords": {"type": "array", "minItems": 1, "uniqueItems": True, "items": {"type": "string"}},
        "references": {
            "type": "array",
            "items": {"type": "object", "required": ["authors", "title", "type"]},
        },
    },
    "$defs": {
        "author": {"type": "object", "anyOf": [{"required": ["name"]}, {"required": ["family-names"]}]}
    },
}


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


release = pytest.mark.skipif(
    any(importlib.util.find_spec(name) is None for name in ("build", "twine", "setuptools", "pip")),
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
    assert succeed(command, "--version", cwd=folder) == f"spbench {PROJECT['version']}\n"
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
