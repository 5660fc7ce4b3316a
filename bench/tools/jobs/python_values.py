"""Configurations that Python files write in plain values, read without running the files. A training script
calls TrainingArguments, TRL's configurations and ParallelismConfig, and loads a model; a function in a recipe
of Megatron-Bridge, or in a registry of torchtitan, makes a configuration.

A torchtitan function returns a ``Trainer.Config(...)``, or sets attributes of the configuration that another
function returns. The file bridge.yaml has what the functions set with which recipes begin, by name.
"""

import ast
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from spbench.bench.errors import suggestion
from spbench.bench.files import read_file
from spbench.bench.tools.jobs.argument_tables import table_content
from spbench.bench.tools.jobs.job import MOST_NAMED
from spbench.bench.tools.jobs.job_files import JobFile, path_and_part

_TRAINER = ("TrainingArguments", "Seq2SeqTrainingArguments")
_PARALLEL = ("ParallelismConfig", "DeepSpeedSequenceParallelConfig")
_LOADS = "from_pretrained"
#: configurations of TRL that do not belong to a trainer
_NO_TRAINER = ("ModelConfig", "DatasetMixtureConfig", "DatasetConfig")
#: the configurations that functions of torchtitan and of Megatron-Bridge make
CONFIGURATION, _RECIPE = "Trainer.Config", "ConfigContainer"
#: functions of Megatron-Bridge that make a configuration of the precision
_PRECISIONS = ("bf16_mixed", "fp16_mixed")
#: a variable of the environment that a script asks for, and functions of its text
_VARIABLE = re.compile(r"os\.(?:environ(?:\.get)?|getenv)[(\[]'(\w+)'")
_CASTS: Mapping[str, Callable[[Any], Any]] = {"int": int, "float": float, "str": str}
#: statements that set no value of a configuration
_SILENT = (ast.Assert, ast.Import, ast.ImportFrom, ast.Pass, ast.FunctionDef)
_BRANCHES = (ast.If, ast.For, ast.While, ast.With, ast.Try)


def makes_configurations(word: str) -> bool:
    """Whether a word is FILE.py or FILE.py:NAME, and functions of the file make configurations of torchtitan
    or Megatron-Bridge."""
    path, _ = path_and_part(word)
    if path.suffix != ".py" or not path.is_file():
        return False
    file = JobFile(path, read_file(path))
    return CONFIGURATION.encode() in file.content or has_recipes(file)


def has_recipes(file: JobFile) -> bool:
    """Whether a file is Python with a function that makes a configuration of Megatron-Bridge."""
    return file.path.suffix == ".py" and f"-> {_RECIPE}" in file.text and "cfg.model" in file.text


def syntax_of(file: JobFile) -> ast.Module:
    """The syntax tree of a file; UserError if the file is no Python."""
    try:
        return ast.parse(file.text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise file.wrong(f"no Python: {' '.join(str(error).split())[:150]}") from error


def training_script(file: JobFile, environment: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The settings in a training script, as the files of accelerate ("accelerate") and of the Trainer
    ("trainer") have them, and the configurations of TRL that the script names ("classes"). A value that only
    a run could tell becomes a text ``$(...)``; ``environment`` has variables that the script may ask for.
    UserError if the script is no Python."""
    tree = syntax_of(file)
    names = constants(tree, environment)
    classes = dict.fromkeys(_of_trl(tree), True)
    trainer: dict[str, Any] = {}
    parallel, loaded = dict[str, Any](), dict[str, Any]()
    for call in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        said = {keyword.arg or "**": value_of(keyword.value, names) for keyword in call.keywords}
        if called in _TRAINER or called in classes:
            trainer |= said
        elif called in _PARALLEL:
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


def assigned_once(tree: ast.Module) -> dict[str, ast.expr]:
    """The expressions of the names to which a script assigns one expression and nothing else."""
    nodes: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        for target in node.targets if isinstance(node, ast.Assign) else ():
            if isinstance(target, ast.Name):
                nodes.setdefault(target.id, []).append(node.value)  # type: ignore[attr-defined]
    return {name: values[0] for name, values in nodes.items() if len(values) == 1}


def constants(tree: ast.Module, environment: Mapping[str, str] | None = None) -> dict[str, Any]:
    """The values of the names to which a script assigns one plain value and nothing else; and the values of
    variables of the ``environment``, whose names have a ``$`` before them."""
    names: dict[str, Any] = {f"${name}": text for name, text in (environment or {}).items()}
    for name, node in assigned_once(tree).items():
        if not isinstance(value := value_of(node, names), dict | list) and not is_unknown(value):
            names[name] = value
    return names


def value_of(node: ast.expr, names: Mapping[str, Any]) -> Any:
    """The value of an expression: a literal, whole numbers multiplied or divided, the value of a name or
    variable in ``names``, or a type of torch by its name; ``$(...)`` if only a run could tell the value."""
    if isinstance(node, ast.Name) and node.id in names:
        return names[node.id]
    if isinstance(node, ast.Call | ast.Subscript) and (asked := _VARIABLE.match(ast.unparse(node))):
        if f"${asked[1]}" in names:
            return names[f"${asked[1]}"]
        return (
            value_of(node.args[1], names)
            if isinstance(node, ast.Call) and node.args[1:]
            else f"$({asked[1]})"
        )
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") in _CASTS and len(node.args) == 1:
        inner = value_of(node.args[0], names)
        with suppress(ValueError, TypeError):
            return inner if is_unknown(inner) else _CASTS[getattr(node.func, "id", "")](inner)
    if isinstance(node, ast.Dict) and all(isinstance(key, ast.Constant) for key in node.keys):
        keys = [str(key.value) for key in node.keys if isinstance(key, ast.Constant)]
        return dict(zip(keys, (value_of(each, names) for each in node.values), strict=True))
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "dict" and not node.args:
        return {each.arg or "**": value_of(each.value, names) for each in node.keywords}
    if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "torch":
        return ast.unparse(node)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult | ast.FloorDiv):
        one, other = value_of(node.left, names), value_of(node.right, names)
        if all(type(each) is int and 0 < each < 2**63 for each in (one, other)):
            return one * other if isinstance(node.op, ast.Mult) else one // other
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return f"$({ast.unparse(node)})"


def is_unknown(value: Any) -> bool:
    """Whether a value is the text ``$(...)`` of :func:`value_of`, so that only a run could tell it."""
    return isinstance(value, str) and value.startswith("$(")


def chosen_function(file: JobFile, functions: Collection[str]) -> str:
    """The name of the function that makes a job's configuration: the file's ``part``, or the only function.
    UserError if there is no such function, or if there are several and the user named none."""
    names = [name for name in functions if not name.startswith("_")] or [*functions]
    if file.part and file.part not in functions:
        raise file.wrong(f"no function {file.part!r} makes a configuration{suggestion(file.part, names)}")
    if not file.part and len(names) != 1:
        shown = f"{', '.join(names[:MOST_NAMED])}{', ...' * (len(names) > MOST_NAMED)}"
        example = f" ({shown}); name one, as {file.path}:{names[0]}" if names else ""
        raise file.wrong(f"{len(names)} functions make a configuration{example}")
    return file.part or names[0]


@dataclass
class MakingFunctions:
    """The functions of a file that make configurations, read statement by statement.

    Attributes:
        begun_with: the keys that functions of other files set, by function; None: all functions are in this
            file, and a statement that sets no plain value is refused.
        unclear: problems of statements that set no plain value, if these are not refused, one line each.
    """

    file: JobFile
    functions: Mapping[str, ast.FunctionDef]
    begun_with: Mapping[str, Mapping[str, Any]] | None = None
    unclear: list[str] = field(default_factory=list)

    def keys(self, name: str, above: Sequence[str] = ()) -> dict[str, Any]:
        """The keys that a function sets, with dots between nested names, each with a plain value or a node of
        the syntax tree; ``above``: the functions that call this one, none of which it may call."""
        if name in (self.begun_with or ()):
            return dict((self.begun_with or {})[name])
        if name in above:
            raise self.file.wrong(f"{name} calls itself")
        if name not in self.functions:
            self.unclear.append(f"{name}() is not in the file")
            return {}
        values, configurations = dict[str, ast.expr](), dict[str, dict[str, Any]]()
        for statement in self.functions[name].body:
            if isinstance(statement, ast.Return):
                return self._returned(statement, values, configurations, (*above, name))
            target = statement.targets[0] if isinstance(statement, ast.Assign) else None
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1 or target is None:
                self._pass_over(statement)
                continue
            value = _Filled(values).visit(statement.value)
            if isinstance(target, ast.Name) and (called := self._called(target.id, value)):
                configurations[target.id] = self.keys(called, (*above, name))
            elif isinstance(target, ast.Name):
                values[target.id] = value
            else:
                self._set(configurations, target, value)
        if self.begun_with is None:
            raise self.file.wrong(f"{name} returns nothing")
        return configurations.get("cfg", {})

    def _returned(
        self,
        statement: ast.Return,
        values: Mapping[str, ast.expr],
        configurations: Mapping[str, dict[str, Any]],
        above: Sequence[str],
    ) -> dict[str, Any]:
        value = statement.value
        if isinstance(value, ast.Name) and value.id in configurations:
            return configurations[value.id]
        if self.begun_with is not None:
            return configurations.get("cfg", {})
        if value is not None and (called := self._called("", value)):
            return self.keys(called, above)
        if isinstance(value, ast.Name) and value.id in values:
            value = values[value.id]
        if not isinstance(value, ast.Call) or ast.unparse(value.func) != CONFIGURATION:
            raise self._unread(statement)
        return dict(keywords(self.file, _Filled(values).visit(value)))

    def _called(self, target: str, value: ast.expr) -> str:
        """The function that an expression calls for its configuration, if the result is assigned to
        ``target``; "" for any other expression."""
        if not isinstance(value, ast.Call):
            return ""
        if self.begun_with is not None:
            return ast.unparse(value.func) if target == "cfg" else ""
        name = getattr(value.func, "id", "")
        return name if name in self.functions and not value.args and not value.keywords else ""

    def _set(self, configurations: Mapping[str, dict[str, Any]], target: ast.expr, value: ast.expr) -> None:
        """Set a key of a configuration, or a key in one of its sections, to a node."""
        root, _, path = ast.unparse(target).partition(".")
        if self.begun_with is not None:
            configurations.get(root, {})[path] = value
            return
        if root not in configurations or path.count(".") > 1 or not path.replace(".", "").isidentifier():
            raise self._unread(target)
        keys = configurations[root]
        for name in [each for each in keys if each.startswith(f"{path}.")]:
            del keys[name]
        keys[path] = value

    def _pass_over(self, statement: ast.stmt) -> None:
        """Refuse, or note as unclear, a statement that may set a value but is no plain assignment."""
        if self.begun_with is not None:
            if isinstance(statement, _BRANCHES) and "cfg." in ast.unparse(statement):
                self.unclear.append(f"line {statement.lineno}: what a branch or loop sets is not known")
            return
        is_text = isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)
        if not is_text and not isinstance(statement, _SILENT):
            raise self._unread(statement)

    def _unread(self, node: ast.stmt | ast.expr) -> Exception:
        text = ast.unparse(node).splitlines()[0][:40]
        return self.file.wrong(f"line {node.lineno}: {text!r} sets no value plainly; write the value out")


class _Filled(ast.NodeTransformer):
    """Replaces names in an expression by the nodes that were assigned to them before."""

    def __init__(self, values: Mapping[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)


def recipe_of(file: JobFile) -> tuple[dict[str, Any], str, list[str]]:
    """The keys that a file's recipe sets, the name of its model on Hugging Face ("": none), and problems with
    keys that have no plain value, one line each.

    Raises:
        UserError: the file is no Python, lacks the recipe of that name, or has several and no name is given.
    """
    tree = syntax_of(file)
    defined = [node for node in tree.body if isinstance(node, ast.FunctionDef) and node.returns]
    functions = {f.name: f for f in defined if f.returns and _RECIPE in ast.unparse(f.returns)}
    read = MakingFunctions(file, functions, table_content("bridge")["begun_with"])
    names, model, keys = constants(tree), "", dict[str, Any]()
    for key, node in read.keys(chosen_function(file, functions)).items():
        line = f"line {node.lineno}: " if isinstance(node, ast.expr) else ""
        # the configuration of the precision sets keys of DDP
        own = key.replace("mixed_precision.", "ddp.") if key.startswith("mixed_precision.") else key
        value = value_of(node, names) if isinstance(node, ast.expr) else node
        if not isinstance(node, ast.expr):
            keys[key] = node
        elif key == "model":
            model = _model_of(node, names)
            read.unclear += [] if model else [f"{line}the model is no name on Hugging Face"]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in _PRECISIONS:
            keys[key] = ast.unparse(node.func)
        elif own != key and own != "ddp.grad_reduce_in_fp32":
            read.unclear.append(f"{line}{key} is not read")
        elif not is_unknown(value):
            keys[own] = value
        elif key == "peft":
            keys[key] = ast.unparse(node)
        elif not key.endswith("env_vars"):
            read.unclear.append(f"{line}{own} is no plain value")
    return keys, model, read.unclear


def _model_of(node: ast.expr, names: Mapping[str, Any]) -> str:
    """The name on Hugging Face of the model that an expression makes; "" if there is no such name."""
    for call in (each for each in ast.walk(node) if isinstance(each, ast.Call) and each.args):
        if ast.unparse(call.func).endswith("from_hf_pretrained"):
            value = value_of(call.args[0], names)
            return value if isinstance(value, str) and not is_unknown(value) else ""
    return ""


def keywords(file: JobFile, call: ast.Call) -> dict[str, ast.expr]:
    """The nodes of a call's keyword arguments, by keyword; UserError if the call has other arguments."""
    keywords: dict[str, ast.expr] = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in keywords:
            raise file.wrong(f"line {keyword.value.lineno}: keywords that are written out are needed")
        keywords[keyword.arg] = keyword.value
    if call.args:
        raise file.wrong(f"line {call.lineno}: {ast.unparse(call.func)} has arguments without a keyword")
    return keywords
