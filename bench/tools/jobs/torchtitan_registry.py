"""The configurations of torchtitan's registries in Python, as the sections of its TOML; nothing is run."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from spbench.bench.tools.jobs.argument_tables import table_content
from spbench.bench.tools.jobs.job_files import JobFile
from spbench.bench.tools.jobs.python_values import (
    CONFIGURATION,
    MakingFunctions,
    chosen_function,
    is_unknown,
    keywords,
    plain,
    syntax_of,
    value_of,
)


def registered(file: JobFile) -> dict[str, Any] | None:
    """The sections of the configuration of torchtitan that a file makes, of several the one that is named;
    None where it makes none.

    Raises:
        UserError: it is no Python, makes several, or what it has is neither a plain value nor set plainly.
    """
    functions = {f.name: f for f in syntax_of(file).body if isinstance(f, ast.FunctionDef) and _makes(f)}
    if not functions:
        return None
    function = chosen_function(file, functions)
    name = next((model for model in _registry()["models"] if function.startswith(model)), None)
    content: dict[str, Any] = {"model": {} if name is None else {"name": name}}
    for key, node in MakingFunctions(file, functions).keys(function).items():
        section, dot, inner = key.partition(".")
        if section == "model_spec" and isinstance(node, ast.Call) and len(node.args) == 1:
            content["model"] |= dict(_of_model(file, node))
        elif key == "hf_assets_path":
            content["model"][key] = plain(file, node)
        elif key == "activation_checkpoint" and isinstance(node, ast.Constant) and node.value is None:
            content[key] = {"mode": "none"}
        elif dot:
            _add_section(file, content, section, "", {inner: node})
        elif isinstance(node, ast.Call):
            kind = ast.unparse(node.func).partition(".")[0]
            _add_section(file, content, section, kind, keywords(file, node))
        else:
            content[key] = plain(file, node)
    return content


def _registry() -> Mapping[str, Any]:
    registry: Mapping[str, Any] = table_content("torchtitan")["registry"]
    return registry


def _makes(function: ast.FunctionDef) -> bool:
    """Whether a function returns a configuration of torchtitan."""
    last = function.body[-1]
    value = last.value if isinstance(last, ast.Return) else None
    returned = ast.unparse(value.func) if isinstance(value, ast.Call) else ""
    annotated = function.returns is not None and ast.unparse(function.returns) == CONFIGURATION
    return returned == CONFIGURATION or (annotated and isinstance(last, ast.Return))


def _of_model(file: JobFile, call: ast.Call) -> Iterator[tuple[str, Any]]:
    yield "flavor", plain(file, call.args[0])
    for key, node in keywords(file, ast.Call(call.func, [], call.keywords, lineno=call.lineno)).items():
        if key == "converters" and isinstance(node, ast.List):
            yield key, [ast.unparse(each).partition(".")[0] for each in node.elts]
        else:
            yield key, plain(file, node)


def _add_section(
    file: JobFile, content: dict[str, Any], name: str, kind: str, given: Mapping[str, ast.expr]
) -> None:
    """Add what is given of a section, under its name in TOML; ``kind``: the class that makes it."""
    above, _, inner = _registry()["renamed"].get(name, name).partition(".")
    section: dict[str, Any] = {}
    if name == "loss":
        given = {key: node for key, node in given.items() if not key.startswith(("loss_fn", "global_"))}
    for key, node in given.items():
        if name not in _registry()["idle"] or not is_unknown(value_of(node, {})):
            section[key] = plain(file, node)
    if inner and "dataset" in section:
        content.setdefault(above, {})["dataset"] = section.pop("dataset")
    place = content.setdefault(above, {})
    (place.setdefault(inner, {}) if inner else place).update(
        {**_registry()["classes"].get(kind, {}), **section}
    )
