"""Scenarios whose model is a config.json: where it is looked for, and what its changes do to rows."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from spbench.bench.cell import Cell
from spbench.bench.errors import UserError
from spbench.bench.measure.engines.traces import trace_key
from spbench.bench.measure.scenarios.expand import expand
from spbench.bench.measure.scenarios.scenario import load_scenario
from spbench.bench.measure.scenarios.select import Narrowing, narrowed_cells
from spbench.bench.measure.sweep.sweep import as_row, changed_parts
from spbench.bench.measurement import Outcome
from spbench.impls.models.model import model_preset

TINY = {
    "model_type": "llama",
    "hidden_size": 48,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "vocab_size": 96,
    "torch_dtype": "bfloat16",
}


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
    (cell,) = narrowed_cells(load_scenario(path), Narrowing())
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
    assert len(narrowed_cells(scenario, Narrowing(models=["mine/config.json"]))) == 1
    with pytest.raises(UserError, match=r"unknown model 'mine/other.json'; did you mean 'mine/config.json'"):
        narrowed_cells(scenario, Narrowing(models=["mine/other.json"]))


def test_a_field_that_is_not_covered_is_an_error_of_the_scenario(tmp_path: Path) -> None:
    message = r"scenario.yaml: groups\[0\].model: .*mine/config.json: field num_experts = 8 is not covered"
    with pytest.raises(UserError, match=message):
        load_scenario(write(tmp_path, num_experts=8))


def test_what_is_no_config_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path)
    for text, message in (("{", "malformed JSON"), ("[]", "must hold an object")):
        (tmp_path / "mine" / "config.json").write_text(text)
        with pytest.raises(UserError, match=message):
            load_scenario(path)
    (tmp_path / "mine" / "config.json").unlink()
    with pytest.raises(UserError, match=r"groups\[0\].model: cannot read .*mine/config.json: No such file"):
        load_scenario(path)


@pytest.mark.parametrize(
    ("given", "wrong", "message"),
    [
        ("layers: 1", "layer: 1", r"model_options.layer: unknown option; did you mean 'layers'"),
        ("seq_len: 24,", "seq_len: 24, model_config_json: {},", r"the path of the config\.json as the model"),
    ],
)
def test_what_a_group_says_of_the_model_is_checked(
    tmp_path: Path, given: str, wrong: str, message: str
) -> None:
    path = write(tmp_path)
    path.write_text(path.read_text().replace(given, wrong))
    with pytest.raises(UserError, match=message):
        load_scenario(path)


def test_a_config_takes_the_place_of_the_models_of_a_scenario(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY), encoding="utf-8")
    cell = "{model: bert-tiny, strategy: single, batch: 1, seq_len: 8}"
    (tmp_path / "s.yaml").write_text(f"title: t\ngroups:\n  - {cell}\n", encoding="utf-8")
    scenario = load_scenario(tmp_path / "s.yaml")
    name = str(tmp_path / "config.json")
    (made,) = narrowed_cells(scenario, Narrowing(models=[name]))
    assert (made.model, made.model_config_json is not None) == (name, True)
    with pytest.raises(UserError, match=r"download its config\.json and give the path of that"):
        narrowed_cells(scenario, Narrowing(models=["meta-llama/Llama-3-8B"]))


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
