"""The JSON schemas of docs/schemas."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
from jsonschema import Draft202012Validator

from scripts.schemas import FOLDER, SCHEMAS, scenario, text_of
from spbench.bench.measure.scenarios.scenario import PACKAGE
from spbench.bench.yaml_files import packaged, read_yaml

GROUP = {"model": "bert-tiny", "strategy": ["ulysses", "lasp"], "batch": 1, "seq_len": ["4K", 8192]}


@pytest.mark.parametrize("name", SCHEMAS)
def test_the_committed_schema_is_that_of_the_code(name: str) -> None:
    assert (FOLDER / name).read_text() == text_of(name), "python scripts/schemas.py writes it"
    Draft202012Validator.check_schema(json.loads(text_of(name)))


def test_every_packaged_scenario_is_one() -> None:
    validator = Draft202012Validator(scenario())
    wrong = {
        name: [error.message for error in errors]
        for name, path in packaged(PACKAGE).items()
        if (errors := list(validator.iter_errors(read_yaml(Path(path)))))
    }
    assert wrong == {}


def test_what_a_scenario_cannot_have_is_refused() -> None:
    validator = Draft202012Validator(scenario())
    right = {"title": "t", "groups": [{**GROUP, "sizes": {"sp": [2, 4]}, "mesh": ["dp", "sp"]}]}
    assert validator.is_valid(right)
    for path, value in (("batch", True), ("seqlen", 1), ("sizes", {"sp": "two"}), ("precision", "fp8")):
        wrong = copy.deepcopy(right)
        wrong["groups"][0][path] = value  # type: ignore[index]
        assert not validator.is_valid(wrong), path
    assert not validator.is_valid({**right, "group": {}})
    assert not validator.is_valid({"groups": right["groups"]})
