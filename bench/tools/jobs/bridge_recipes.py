"""Recipes of Megatron-Bridge in Python: functions that set attributes of a configuration to plain values,
read without running them. What the functions that they begin with have set is here by name."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any

from spbench.bench.files import read_file
from spbench.bench.tools.jobs.job_files import JobFile, path_and_part
from spbench.bench.tools.jobs.python_calls import chosen, constants, tree_of, value_of

#: of a recipe's function
_RETURNS = "ConfigContainer"
#: by the function: what it sets beside the defaults of the configuration (recipes/common.py, 067f987d)
_PRETRAIN: Mapping[str, Any] = {
    "train.global_batch_size": 32,
    "train.micro_batch_size": 2,
    "ddp.grad_reduce_in_fp32": True,
    "ddp.overlap_grad_reduce": True,
    "ddp.overlap_param_gather": True,
    "ddp.use_distributed_optimizer": True,
    "dataset.seq_length": 4096,
    "mixed_precision": "bf16_mixed",
}
_TUNE: Mapping[str, Any] = {
    "train.global_batch_size": 128,
    "train.micro_batch_size": 1,
    "ddp.grad_reduce_in_fp32": True,
    "dataset.seq_length": 2048,
    "mixed_precision": "bf16_mixed",
}
_BEGUN_WITH = {"_pretrain_common": _PRETRAIN, "_sft_common": _TUNE, "_peft_common": _TUNE}
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
        if name in _BEGUN_WITH:
            self.keys |= _BEGUN_WITH[name]
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
