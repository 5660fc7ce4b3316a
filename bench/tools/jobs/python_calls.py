"""What a training script in Python says in plain values, without running it: the arguments of its calls of
TrainingArguments, SFTConfig and ParallelismConfig, and the model that it loads.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Any

from spbench.bench.tools.jobs.job_files import JobFile

_TRAINER = {"TrainingArguments", "SFTConfig", "Seq2SeqTrainingArguments"}
_PARALLEL, _HANDLER = "ParallelismConfig", "DeepSpeedSequenceParallelConfig"
_LOADS = "from_pretrained"


def training_script(file: JobFile) -> dict[str, dict[str, Any]]:
    """The content of a script as files of accelerate ("accelerate") and of the Trainer ("trainer").

    Raises:
        UserError: it is no Python.
    """
    try:
        tree = ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise file.wrong(f"no Python: {str(error)[:150]}") from error
    names = dict(_constants(tree))
    trainer: dict[str, Any] = {}
    parallel: dict[str, Any] = {}
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        said = dict(_plain(call, names))
        if called in _TRAINER:
            trainer |= said
        elif called in (_PARALLEL, _HANDLER):
            parallel |= {f"parallelism_config_{name}": value for name, value in said.items()}
        elif called == _LOADS and "Model" in ast.unparse(call.func) and call.args:
            model = _value(call.args[0], names)
            if isinstance(model, str):
                trainer.setdefault("model_name_or_path", model)
    if (length := parallel.get("parallelism_config_sp_seq_length")) and "max_length" not in trainer:
        trainer["max_length"] = length
    contents = {"trainer": trainer, "accelerate": {"parallelism_config": parallel} if parallel else {}}
    return {kind: content for kind, content in contents.items() if content}


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Names that the script gives to plain values, once each, outside of functions."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
    for name, values in assigned.items():
        if len(values) == 1 and isinstance(values[0], ast.Constant):
            yield name, values[0].value


def _plain(call: ast.Call, names: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for keyword in call.keywords:
        value = _value(keyword.value, names)
        if keyword.arg is not None and value is not None:
            yield keyword.arg, value


def _value(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """A plain value, or that of a name that has one; None where only a run could tell."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None
