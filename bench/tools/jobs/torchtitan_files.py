"""What the files of torchtitan hold: its TOML, and its configurations in Python of plain values."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from spbench.bench.errors import suggestion
from spbench.bench.files import read_file
from spbench.bench.tools.jobs.job import MOST_NAMED
from spbench.bench.tools.jobs.job_files import JobFile, mapping_in, path_and_part

#: of which a TOML file of torchtitan has some
_SECTIONS = {"model", "training", "parallelism", "activation_checkpoint", "experimental"}
#: sections of the configurations in Python, and those of TOML that they were
_RENAMED = {"profiler": "profiling", "validator": "validation", "dataloader": "training.dataloader"}
#: what a function returns that makes a configuration
_CONFIGURATION = "Trainer.Config"
#: classes that say a mode of activation_checkpoint
_MODES: Mapping[str, Mapping[str, str]] = {
    "SelectiveAC": {"mode": "selective", "selective_ac_option": "op"},
    "FullAC": {"mode": "full"},
}


def content_of(file: JobFile) -> Mapping[str, Any] | None:
    """The sections of a file; None where it is no TOML with some of them and no Python that makes a
    configuration. UserError if it is damaged, or has something else than plain values."""
    if file.path.suffix == ".py":
        return _of_python(file)
    content = mapping_in(file) if file.path.suffix == ".toml" else None
    if content is None:
        return None
    sections = {name for name, section in content.items() if isinstance(section, dict)}
    return content if len(_SECTIONS & sections) >= 2 else None


def has_configurations(word: str) -> bool:
    """Whether a word is FILE.py or FILE.py:NAME of a file that makes configurations, and so no model."""
    path, _ = path_and_part(word)
    return path.suffix == ".py" and path.is_file() and _CONFIGURATION.encode() in read_file(path)


def _of_python(file: JobFile) -> Mapping[str, Any] | None:
    """What the only function that returns ``Trainer.Config(...)`` has in it; nothing is run."""
    try:
        module = ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise file.wrong(f"no Python: {' '.join(str(error).split())[:150]}") from error
    calls = {}
    for function in module.body:
        if isinstance(function, ast.FunctionDef) and isinstance(function.body[-1], ast.Return):
            call = function.body[-1].value
            if isinstance(call, ast.Call) and ast.unparse(call.func) == _CONFIGURATION:
                calls[function.name] = call
    if not calls:
        return None
    if file.part and file.part not in calls:
        raise file.wrong(f"no function {file.part!r} makes a configuration{suggestion(file.part, calls)}")
    if len(calls) > 1 and not file.part:
        names = [*calls]
        more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
        raise file.wrong(
            f"{len(names)} functions make a configuration ({', '.join(names[:MOST_NAMED])}{more}); name one, "
            f"as {file.path}:{names[0]}"
        )
    return _sections(file, calls[file.part or next(iter(calls))])


def _sections(file: JobFile, call: ast.Call) -> dict[str, Any]:
    content: dict[str, Any] = {"model": {}}
    for name, value in _keywords(file, call).items():
        if name == "model_spec" and isinstance(value, ast.Call) and len(value.args) == 1:
            of_model = _keywords(file, ast.Call(value.func, [], value.keywords, lineno=value.lineno))
            content["model"] |= {key: _plain(file, node) for key, node in of_model.items()}
            content["model"]["flavor"] = _plain(file, value.args[0])
        elif name == "hf_assets_path":
            content["model"][name] = _plain(file, value)
        elif isinstance(value, ast.Call):
            section = {key: _plain(file, node) for key, node in _keywords(file, value).items()}
            mode = _MODES.get(ast.unparse(value.func).partition(".")[0], {})
            above, _, inner = _RENAMED.get(name, name).partition(".")
            if inner and "dataset" in section:
                content.setdefault(above, {})["dataset"] = section.pop("dataset")
            place = content.setdefault(above, {})
            (place.setdefault(inner, {}) if inner else place).update({**mode, **section})
        else:
            content[name] = _plain(file, value)
    return content


def _keywords(file: JobFile, call: ast.Call) -> dict[str, ast.expr]:
    keywords: dict[str, ast.expr] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in keywords:
            raise file.wrong(f"line {keyword.value.lineno}: keywords that are written out are needed")
        keywords[keyword.arg] = keyword.value
    if call.args:
        raise file.wrong(f"line {call.lineno}: {ast.unparse(call.func)} has arguments without a keyword")
    return keywords


def _plain(file: JobFile, node: ast.expr) -> Any:
    """The value that a node writes out, or a product of such."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = _plain(file, node.left), _plain(file, node.right)
        if all(type(factor) is int and factor < 2**63 for factor in factors):
            return factors[0] * factors[1]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        text = ast.unparse(node)
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        raise file.wrong(f"line {node.lineno}: {shown} is no plain value; write it out") from error
