"""What Python says in plain values, without running it: in a training script, the arguments of its calls of
TrainingArguments, of TRL's configurations and of ParallelismConfig, and the model that it loads; in
recipes of Megatron-Bridge, the attributes of a configuration that functions set. What the functions set that
these begin with is here by name.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping
from typing import Any

from spbench.bench.errors import suggestion
from spbench.bench.files import read_file
from spbench.bench.tools.jobs.argument_tables import argument_table
from spbench.bench.tools.jobs.job import MOST_NAMED
from spbench.bench.tools.jobs.job_files import JobFile, path_and_part

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


#: of a recipe's function
_RETURNS = "ConfigContainer"
#: functions that make a recipe of precision
_PRECISIONS = ("bf16_mixed", "fp16_mixed")
_MOST_CALLS = 10


def has_recipes(file: JobFile) -> bool:
    """Whether a file is Python with a function that makes a configuration of Megatron-Bridge."""
    return file.path.suffix == ".py" and f"-> {_RETURNS}" in file.text and "cfg.model" in file.text


def holds_recipes(word: str) -> bool:
    """Whether a word is FILE.py or FILE.py:NAME of a file with recipes, and so no model."""
    path, _ = path_and_part(word)
    return path.suffix == ".py" and path.is_file() and has_recipes(JobFile(path, read_file(path)))


def recipe_of(file: JobFile) -> tuple[dict[str, Any], str, list[str]]:
    """The keys that the recipe of a file sets, the name of its model on Hugging Face ("": none), and what is
    no plain value, one a line.

    Raises:
        UserError: the file is no Python, has several recipes of which none is named, or not the named one.
    """
    tree = tree_of(file)
    functions = {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.returns and _RETURNS in ast.unparse(node.returns)
    }
    recipe = _Recipe(functions, dict(constants(tree)))
    recipe.read(chosen(file, functions))
    return recipe.keys, recipe.model, recipe.unclear


class _Recipe:
    """What a function sets, and those that it begins with."""

    def __init__(self, functions: Mapping[str, ast.FunctionDef], constants: Mapping[str, Any]):
        self.functions, self.constants = functions, constants
        self.keys: dict[str, Any] = {}
        self.model = ""
        self.unclear: list[str] = []
        self.calls = 0

    def read(self, name: str) -> None:
        self.calls += 1
        begun_with = argument_table("bridge").content["begun_with"]
        if name in begun_with:
            self.keys |= begun_with[name]
        elif name not in self.functions or self.calls > _MOST_CALLS:
            self.unclear.append(f"{name}() is not in the file")
        else:
            for statement in self.functions[name].body:
                self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = ast.unparse(node.targets[0])
            if target == "cfg" and isinstance(node.value, ast.Call):
                self.read(ast.unparse(node.value.func))
            elif target == "cfg.model":
                self._name_model(node.value)
            elif target.startswith("cfg."):
                self._set(target.removeprefix("cfg."), node.value)
        elif isinstance(node, ast.If | ast.For | ast.While | ast.With | ast.Try) and "cfg." in ast.unparse(
            node
        ):
            self.unclear.append(f"line {node.lineno}: what a branch or loop sets is not known")

    def _name_model(self, node: ast.expr) -> None:
        for call in ast.walk(node):
            if (
                isinstance(call, ast.Call)
                and ast.unparse(call.func).endswith("from_hf_pretrained")
                and call.args
            ):
                value = value_of(call.args[0], self.constants)
                self.model = value if isinstance(value, str) and not value.startswith("$(") else ""
        if not self.model:
            self.unclear.append(f"line {node.lineno}: the model is no name on Hugging Face")

    def _set(self, key: str, node: ast.expr) -> None:
        if isinstance(node, ast.Call) and ast.unparse(node.func) in _PRECISIONS:
            self.keys[key] = ast.unparse(node.func)
            return
        if key.startswith("mixed_precision."):
            key = key.replace("mixed_precision.", "ddp.")  # what the recipe of precision sets of it
            if key != "ddp.grad_reduce_in_fp32":
                self.unclear.append(
                    f"line {node.lineno}: {key.replace('ddp.', 'mixed_precision.')} is not read"
                )
                return
        value = value_of(node, self.constants)
        if not (isinstance(value, str) and value.startswith("$(")):
            self.keys[key] = value
        elif key == "peft":
            self.keys[key] = ast.unparse(node)
        elif not key.endswith("env_vars"):
            self.unclear.append(f"line {node.lineno}: {key} is no plain value")
