"""Write the JSON schemas of docs/schemas: of scenarios, and of the JSON of `spbench fit` and `spbench
advise`.
Run the script after a change of one of these: python scripts/schemas.py.

The schema of scenarios follows from the pydantic models that check scenarios. The schemas of answers name the
fields on which programs can rely; an answer may have more fields.
"""

import json
from pathlib import Path
from typing import Any

from spbench.bench.cell import Cell
from spbench.bench.measure.scenarios.scenario import Document

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "schemas"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
#: settings of a group that may be lists, whose combinations are cells
_SWEPT = ("model", "strategy", "batch", "seq_len", "precision", "cluster", "engine")
#: the schema of sizes as people write them: 128K
_SIZE = {"anyOf": [{"type": "integer"}, {"type": "string", "pattern": r"^[0-9._]+[kKmMgG]?$"}]}
_BYTES, _SECONDS, _TEXT, _SWITCH = (
    {"type": ["integer", "null"]},
    {"type": ["number", "null"]},
    {"type": "string"},
    {"type": "boolean"},
)


def _without_titles(schema: Any) -> Any:
    """A schema without pydantic's titles, which repeat the names, and without the prose of docstrings."""
    if isinstance(schema, dict):
        return {
            key: _without_titles(value)
            for key, value in schema.items()
            if not (key in ("title", "description") and isinstance(value, str))
        }
    return [_without_titles(each) for each in schema] if isinstance(schema, list) else schema


def _group(cell: dict[str, Any]) -> dict[str, Any]:
    """The schema of a group, from a cell's schema: a part of the settings, some of which may be lists."""
    settings = {}
    for name, schema in cell["properties"].items():
        if name in ("batch", "seq_len"):
            schema = {"anyOf": [_SIZE, {"type": "null"}]}
        several = {"type": "array", "items": schema}
        settings[name] = {"anyOf": [schema, several]} if name in _SWEPT else schema
    # ranks along an axis may be lists too, and strategies bring axes
    ranks = {"anyOf": [{"type": "integer"}, {"type": "array", "items": {"type": "integer"}}]}
    settings["sizes"] = {"type": "object", "additionalProperties": ranks}
    axes = {"type": "array", "items": _TEXT}
    settings["step"] = {"anyOf": [_TEXT, axes]}
    settings["mesh"] = {"anyOf": [axes, {"type": "array", "items": axes}, {"type": "null"}]}
    for section in ("training", "search", "learning", "timing"):
        settings[section] = {"type": ["object", "null"]}
    return {"type": "object", "properties": settings, "additionalProperties": False}


def scenario() -> dict[str, Any]:
    """The schema of a scenario file; a list under any other key is a section of answers."""
    document, cell = (_without_titles(each.model_json_schema()) for each in (Document, Cell))
    group = _group(cell)
    properties = {
        **document["properties"],
        "title": {"type": "string"},
        "defaults": {"$ref": "#/$defs/Group"},
        "groups": {"type": "array", "items": {"$ref": "#/$defs/Group"}, "minItems": 1},
        "variants": {"type": "object", "additionalProperties": {"$ref": "#/$defs/Group"}},
    }
    return {
        "$schema": _DIALECT,
        "title": "A scenario of spbench",
        **document,
        "properties": properties,
        "additionalProperties": {"type": "array"},
        "$defs": {**document.get("$defs", {}), "Group": group},
    }


def _object(**properties: Any) -> dict[str, Any]:
    """The schema of an object with at least these fields."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def _several(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


def _or_null(schema: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": [schema, {"type": "null"}]}


_MEMORY = {"total_bytes": _BYTES, "card_bytes": _BYTES, "spare_bytes": _BYTES}
_CHANGE = _object(set=_TEXT, what=_TEXT, flags=_TEXT, fits=_SWITCH, step_time_s=_SECONDS, **_MEMORY)


def fit() -> dict[str, Any]:
    """The schema of the output of `spbench fit --format json`."""
    cell = {"type": "object", "properties": {"cell": _TEXT, **_MEMORY}, "required": ["cell", "fits"]}
    taken = {"type": "object", "additionalProperties": _object(what=_TEXT, value={}, flag=_TEXT)}
    part = _object(kind=_TEXT, module=_TEXT, bytes=_BYTES, tensors={"type": "integer"})
    suggestions = _object(
        found=_several(_CHANGE), tried={"type": "integer"}, pairs_tried={"type": "integer"}, advise=_TEXT
    )
    budget = _object(budget_bytes=_BYTES, chosen=_or_null(_CHANGE), alone=_several(_CHANGE))
    return {
        "$schema": _DIALECT,
        "title": "What spbench fit prints",
        **_object(
            fits=_SWITCH,
            cells=_several(cell),
            detail=_object(cell=_TEXT, held={"type": "object"}, parts=_several(part)),
            suggestions=_or_null(suggestions),
            budget=_or_null(budget),
            taken=taken,
            tokens_of_rank={"type": "integer"},
            largest=_or_null({"type": "object"}),
            remarks=_several(_TEXT),
            not_modelled=_several(_TEXT),
        ),
    }


def advise() -> dict[str, Any]:
    """The schema of the output of `spbench advise --format json`: an answer for each question."""
    answer = _object(
        question={"type": "object"},
        layouts=_several({"type": "object"}),
        own=_or_null({"type": "object"}),
        why=_TEXT,
        counts={"type": "object"},
        refused={"type": "object"},
        seconds=_SECONDS,
    )
    return {"$schema": _DIALECT, "title": "What spbench advise prints", **_several(answer)}


SCHEMAS = {"scenario.json": scenario, "fit.json": fit, "advise.json": advise}


def text_of(name: str) -> str:
    """The text of the file ``name`` of docs/schemas."""
    return json.dumps(SCHEMAS[name](), indent=1) + "\n"


if __name__ == "__main__":
    for each in SCHEMAS:
        (FOLDER / each).write_text(text_of(each), encoding="utf-8")
