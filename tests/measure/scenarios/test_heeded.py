"""Settings beside engines: each is heeded, or refused with its place in the file.

Scenarios whose model is a config.json: where it is looked for, and what its changes do to rows.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.engine import engine_classes
from spbench.bench.measure.engines.traces import trace_key
from spbench.bench.measure.scenarios.expand import _PARTLY_HEEDED, expand, ignored
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.scenarios.select import Narrowing
from spbench.bench.measure.sweep.sweep import as_row, changed_parts
from spbench.bench.measurement import Outcome
from spbench.impls.registries import model_preset
from tests.grid import data

VALUES: dict[str, Any] = data(__file__)["VALUES"]
STEP = {"meters", "training.moments", "training.steps", "training.batch_on_device"}
#: by engine, what one of two ranks without pipeline stages heeds of these
HEEDED = {
    "virtual": STEP | {"training.alloc_retries", "training.cuda_graph"},
    "distributed": STEP | {"timing"},
    "emulated": STEP | {"timing", "rank", "training.alloc_retries"},
    "lockstep": set[str](),
}
CELL: dict[str, Any] = data(__file__)["CELL"]


def scenario(folder: Path, *groups: dict[str, Any], **further: Any) -> str:
    path = folder / "s.yaml"
    path.write_text(yaml.safe_dump({"title": "t", "groups": list(groups), **further}))
    return str(path)


def with_setting(setting: str, value: Any, cell: dict[str, Any]) -> dict[str, Any]:
    section, _, own = setting.partition(".")
    return {**cell, section: {**cell.get(section, {}), own: value} if own else value}


def test_every_setting_and_every_engine_is_here() -> None:
    assert {*_PARTLY_HEEDED} == {*VALUES}
    assert {*engine_classes()} >= {*HEEDED}


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


def test_what_all_groups_have_may_be_for_some(tmp_path: Path) -> None:
    real = {**CELL, "engine": "distributed"}
    timing = {"timing": {"samples": 2}}
    load_scenario(scenario(tmp_path, CELL, real, defaults=timing))
    with pytest.raises(UserError, match=r"defaults\.timing: the engine virtual does not heed it"):
        load_scenario(scenario(tmp_path, CELL, defaults=timing))


def test_steps_that_heed_it(tmp_path: Path) -> None:
    stages = {**CELL, "strategy": "single", "sizes": {"pp": 2}, "training": {"schedule": "gpipe"}}
    learning = {**CELL, "engine": "distributed", "learning": {"steps": 2}}
    for group in (
        stages,
        {**stages, "sizes": {"pp": [1, 2]}},  # a sweep from one stage on
        {**learning, "training": {"moments": "later"}},
        {**CELL, "engine": ["virtual", "distributed"], "timing": {"samples": 2}},
    ):
        load_scenario(scenario(tmp_path, group))


TINY = data(__file__)["TINY"]


def write(folder: Path, **changed: Any) -> Path:
    (folder / "mine").mkdir(exist_ok=True)
    (folder / "mine" / "config.json").write_text(json.dumps(TINY | changed))
    path = folder / "scenario.yaml"
    path.write_text(
        "title: a model of ours\n"
        "groups:\n"
        "  - {model: mine/config.json, strategy: ulysses, sizes: {sp: 2}, batch: 1, seq_len: 24,\n"
        "     model_options: {layers: 1}}\n"
    )
    return path


def only_cell(path: Path) -> Cell:
    (cell,) = Narrowing().cells(load_scenario(path))
    return cell


def test_a_path_starts_from_the_scenario_and_options_apply_on_top(tmp_path: Path) -> None:
    cell = only_cell(write(tmp_path))
    assert cell.model == "mine/config.json"
    assert cell.key.startswith("mine/config.json/ulysses/sp2/")
    model: Any = model_preset(*cell.model_arguments)
    assert (model.hidden, model.kv_heads, model.layers) == (48, 4, 1)
    # a row holds all that its cell needs
    assert Cell.model_validate(json.loads(cell.model_dump_json())) == cell


def test_a_folder_stands_for_its_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path)
    monkeypatch.chdir(tmp_path)
    whole, file = (Cell(model=path, strategy="single") for path in ("./mine", "mine/config.json"))
    assert whole.model_config_json == file.model_config_json


def test_a_changed_file_makes_rows_stale_and_traces_anew_under_the_same_key(tmp_path: Path) -> None:
    before = only_cell(write(tmp_path))
    row = as_row(before, Outcome("ok"))
    same = only_cell(write(tmp_path, torch_dtype="float16"))
    assert changed_parts(same, row) == []
    after = only_cell(write(tmp_path, intermediate_size=192))
    assert after.key == before.key
    assert changed_parts(after, row) == ["model"]
    assert trace_key(after, 0, True) != trace_key(before, 0, True) == trace_key(same, 0, True)


def test_models_of_the_scenario_can_be_chosen(tmp_path: Path) -> None:
    scenario = load_scenario(write(tmp_path))
    assert len(Narrowing(models=["mine/config.json"]).cells(scenario)) == 1
    with pytest.raises(UserError, match=r"unknown model 'mine/other.json'; did you mean 'mine/config.json'"):
        Narrowing(models=["mine/other.json"]).cells(scenario)


def test_a_config_takes_the_place_of_the_models_of_a_scenario(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    cell = "{model: bert-tiny, strategy: single, batch: 1, seq_len: 8}"
    (tmp_path / "s.yaml").write_text(f"title: t\ngroups:\n  - {cell}\n", encoding="utf-8")
    scenario = load_scenario(tmp_path / "s.yaml")
    name = str(tmp_path / "config.json")
    (made,) = Narrowing(models=[name]).cells(scenario)
    assert (made.model, made.model_config_json is not None) == (name, True)
    with pytest.raises(UserError, match=r"download its config\.json and give the path of that"):
        Narrowing(models=["meta-llama/Llama-3-8B"]).cells(scenario)


def test_a_name_on_hugging_face_needs_no_file_and_a_file_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    group = {"model": "Qwen/Qwen3-0.6B", "strategy": "single", "batch": 1, "seq_len": 8}
    (known,) = expand({}, [group], {}, "", Path())
    assert (known.model_config_json or {})["num_hidden_layers"] == 28
    path = tmp_path / "Qwen" / "Qwen3-0.6B"
    path.mkdir(parents=True)
    (path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    (read,) = expand({}, [group], {}, "", Path())
    assert (read.model_config_json or {})["num_hidden_layers"] == TINY["num_hidden_layers"]
