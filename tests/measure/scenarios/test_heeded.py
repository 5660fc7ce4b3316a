"""Settings beside engines: each is heeded, or refused with its place in the file."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.engine import engines
from spbench.bench.measure.scenarios.expand import _PROBLEMS, ignored
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.scenarios.select import Narrowing, narrowed_cells

#: a value of each setting that is not its default
VALUES: dict[str, Any] = {
    "rank": 1,
    "timing": {"samples": 2},
    "meters": ["flops"],
    "training.schedule": "gpipe",
    "training.stage_layers": [1],
    "training.moments": "later",
    "training.steps": 2,
    "training.batch_on_device": "whole",
    "training.alloc_retries": False,
}
STEP = {"meters", "training.moments", "training.steps", "training.batch_on_device"}
#: by engine, what one of two ranks without pipeline stages heeds of these
HEEDED = {
    "virtual": STEP | {"training.alloc_retries"},
    "distributed": STEP | {"timing"},
    "emulated": STEP | {"timing", "rank", "training.alloc_retries"},
    "lockstep": set[str](),
}
CELL: dict[str, Any] = {
    "model": "bert-tiny",
    "strategy": "tensor_parallel",
    "sizes": {"tp": 2},
    "batch": 4,
    "seq_len": 64,
}


def scenario(folder: Path, *groups: dict[str, Any], **further: Any) -> str:
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump({"title": "t", "groups": list(groups), **further}))
    return str(path)


def with_setting(setting: str, value: Any, cell: dict[str, Any]) -> dict[str, Any]:
    section, _, own = setting.partition(".")
    return {**cell, section: {**cell.get(section, {}), own: value} if own else value}


def test_every_setting_and_every_engine_is_here() -> None:
    assert {".".join(path) for path in _PROBLEMS} == {*VALUES}
    assert {*engines()} >= {*HEEDED}


@pytest.mark.parametrize("engine", HEEDED)
@pytest.mark.parametrize("setting", VALUES)
def test_a_setting_is_heeded_or_refused(tmp_path: Path, engine: str, setting: str) -> None:
    group = with_setting(setting, VALUES[setting], {**CELL, "engine": engine})
    if setting == "meters":  # all meters beside memory and communication are plug-ins
        found = [path for path, _ in ignored([Cell.model_validate(group)])]
        assert found == ([] if setting in HEEDED[engine] else [("meters",)])
        return
    path = scenario(tmp_path, group)
    if setting in HEEDED[engine]:
        (cell,) = load_scenario(path).cells[""]
        assert cell.engine == engine
        return
    reason = "pipeline stages" if setting in ("training.schedule", "training.stage_layers") else engine
    with pytest.raises(UserError, match=rf"groups\[0\]\.{setting}: .*{reason}.*; leave it out"):
        load_scenario(path)


STAGES = {**CELL, "strategy": "single", "sizes": {"pp": 2}}
INFERENCE = {**CELL, "training": {"step": "inference"}}
LEARNING = {**CELL, "engine": "distributed", "learning": {"steps": 2}}


@pytest.mark.parametrize(
    ("setting", "cell", "problem"),
    [
        ("training.schedule", STAGES, ""),
        ("training.schedule", {**STAGES, "sizes": {"pp": [1, 2]}}, ""),  # a sweep from one stage on
        ("training.moments", INFERENCE, "an inference step has no optimizer"),
        ("training.moments", LEARNING, ""),
        ("timing", LEARNING, "a training run gives losses alone"),
        ("timing", {**CELL, "engine": ["virtual", "distributed"]}, ""),
    ],
)
def test_steps_that_heed_it(tmp_path: Path, setting: str, cell: dict[str, Any], problem: str) -> None:
    path = scenario(tmp_path, with_setting(setting, VALUES[setting], cell))
    if problem:
        with pytest.raises(UserError, match=problem):
            load_scenario(path)
    else:
        load_scenario(path)


def test_what_all_groups_have_may_be_for_some(tmp_path: Path) -> None:
    real = {**CELL, "engine": "distributed"}
    timing = {"timing": {"samples": 2}}
    load_scenario(scenario(tmp_path, CELL, real, defaults=timing))
    with pytest.raises(UserError, match=r"defaults\.timing: the engine virtual does not heed it"):
        load_scenario(scenario(tmp_path, CELL, defaults=timing))


def test_a_rank_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no rank 5: give one from 0 to 1"):
        load_scenario(scenario(tmp_path, {**CELL, "engine": "emulated", "rank": 5}))


def test_a_device_is_said_by_its_option(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"groups\[0\]\.device: unknown key; .* --device"):
        load_scenario(scenario(tmp_path, {**CELL, "device": "cuda"}))


def test_changes_by_the_command_line(tmp_path: Path) -> None:
    loaded = load_scenario(scenario(tmp_path, CELL))
    for change, problem in (
        (("training.schedule", "gpipe"), "--set training.schedule: there are no pipeline stages"),
        (("rank", "1"), "--set rank: the engine virtual does not heed it"),
    ):
        with pytest.raises(UserError, match=problem):
            narrowed_cells(loaded, Narrowing(changes=[change]))
