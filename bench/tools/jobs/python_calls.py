"""What a training script in Python says in plain values, without running it: the arguments of its calls of
TrainingArguments, of TRL's configurations and of ParallelismConfig, and the model that it loads.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from spbench.bench.errors import suggestion
from spbench.bench.tools.jobs.job import MOST_NAMED
from spbench.bench.tools.jobs.job_files import JobFile

_TRAINER = ("TrainingArguments", "Seq2SeqTrainingArguments")
_PARALLEL, _HANDLER = "ParallelismConfig", "DeepSpeedSequenceParallelConfig"
_LOADS = "from_pretrained"
#: of TRL, that are no configuration of a trainer
_NO_TRAINER = ("ModelConfig", "DatasetMixtureConfig", "DatasetConfig")


def training_script(file: JobFile) -> dict[str, dict[str, Any]]:
    """The content of a script as files of accelerate ("accelerate") and of the Trainer ("trainer"), and the
    configurations of TRL that it names ("classes"). What only a run could tell of an argument is ``$(...)``.

    Raises:
        UserError: it is no Python.
    """
    tree = tree_of(file)
    names = dict(constants(tree))
    classes = dict.fromkeys(_of_trl(tree), True)
    trainer: dict[str, Any] = {}
    parallel, loaded = dict[str, Any](), dict[str, Any]()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = _last_name(call.func)
        said = {keyword.arg or "**": value_of(keyword.value, names) for keyword in call.keywords}
        if called in _TRAINER or called in classes:
            trainer |= said
        elif called in (_PARALLEL, _HANDLER):
            parallel |= {f"parallelism_config_{name}": value for name, value in said.items()}
        elif called == _LOADS and "Model" in ast.unparse(call.func) and call.args:
            trainer.setdefault("model_name_or_path", value_of(call.args[0], names))
            loaded |= said
        elif called.endswith("Trainer") and isinstance(said.get("model"), str):
            trainer.setdefault("model_name_or_path", said["model"])
    if (length := parallel.get("parallelism_config_sp_seq_length")) and "max_length" not in trainer:
        trainer["max_length"] = length
    if loaded and isinstance(own := trainer.get("model_init_kwargs") or {}, dict):
        trainer["model_init_kwargs"] = loaded | own
    contents = {"trainer": trainer, "accelerate": {"parallelism_config": parallel} if parallel else {}}
    return {kind: content for kind, content in (contents | {"classes": classes}).items() if content}


def tree_of(file: JobFile) -> ast.Module:
    """The syntax of a file; UserError where it is no Python."""
    try:
        return ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise file.wrong(f"no Python: {' '.join(str(error).split())[:150]}") from error


def chosen(file: JobFile, functions: Collection[str]) -> str:
    """The function of a file that is to make a configuration: the one that is named, or the only one."""
    names = [name for name in functions if not name.startswith("_")] or [*functions]
    if file.part and file.part not in functions:
        raise file.wrong(f"no function {file.part!r} makes a configuration{suggestion(file.part, names)}")
    if not file.part and len(names) != 1:
        shown = f"{', '.join(names[:MOST_NAMED])}{', ...' * (len(names) > MOST_NAMED)}"
        example = f" ({shown}); name one, as {file.path}:{names[0]}" if names else ""
        raise file.wrong(f"{len(names)} functions make a configuration{example}")
    return file.part or names[0]


def _of_trl(tree: ast.Module) -> Iterator[str]:
    """The configurations of TRL's trainers that a script imports, or names as ``trl.DPOConfig``."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "trl":
            named = [each.name for each in node.names]
        elif isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "trl":
            named = [node.attr]
        else:
            continue
        yield from (name for name in named if name.endswith("Config") and name not in _NO_TRAINER)


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Names that the script gives to plain values, once each."""
    assigned: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign):
            for target in node.targets:
                if isinstance(target, ast.Name):
                    assigned.setdefault(target.id, []).append(node.value)
    for name, values in assigned.items():
        if len(values) == 1 and isinstance(values[0], ast.Constant):
            yield name, values[0].value


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """A plain value, that of a name that has one, or a type of torch by its name; ``$(...)`` where only a run
    could tell."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
        return dict(zip(keys, (value_of(each, names) for each in node.values), strict=True))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict" and not node.args:
        return {each.arg or "**": value_of(each.value, names) for each in node.keywords}
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "torch":
        return ast.unparse(node)
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return f"$({ast.unparse(node)})"
