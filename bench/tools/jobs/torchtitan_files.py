"""What the files of torchtitan hold: its TOML, and its configurations in Python, read from their syntax:
nothing is run.

A function of a registry returns a ``Trainer.Config(...)``, or changes what another function of the file
returns, an attribute at a time.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from spbench.bench.files import read_file
from spbench.bench.tools.jobs.job_files import JobFile, mapping_in, path_and_part
from spbench.bench.tools.jobs.python_calls import chosen, tree_of

#: of which a TOML file of torchtitan has some
_SECTIONS = {"model", "training", "parallelism", "activation_checkpoint", "experimental"}


def content_of(file: JobFile) -> Mapping[str, Any] | None:
    """The sections of a file; None where it is no TOML with some of them and no Python that makes a
    configuration. UserError if it is damaged, or has something else than plain values."""
    if file.path.suffix == ".py":
        return of_python(file)
    content = mapping_in(file) if file.path.suffix == ".toml" else None
    if content is None:
        return None
    sections = {name for name, section in content.items() if isinstance(section, dict)}
    return content if len(_SECTIONS & sections) >= 2 else None


def has_configurations(word: str) -> bool:
    """Whether a word is FILE.py or FILE.py:NAME of a file that makes configurations, and so no model."""
    path, _ = path_and_part(word)
    return path.suffix == ".py" and path.is_file() and CONFIGURATION.encode() in read_file(path)


#: what a function returns that makes a configuration
CONFIGURATION = "Trainer.Config"
#: the models of torchtitan, with which the names of functions begin
MODELS = ("llama3", "llama4", "qwen3", "deepseek_v3", "gpt_oss")
#: sections of the configurations in Python, and those of TOML that they were
_RENAMED = {"profiler": "profiling", "validator": "validation", "dataloader": "training.dataloader"}
#: sections on which nothing depends, whose values may be any expression
_IDLE = ("dataloader", "metrics", "profiler", "checkpoint", "validator", "lr_scheduler", "tokenizer")
#: classes that say a mode of activation_checkpoint
_MODES: Mapping[str, Mapping[str, str]] = {
    "SelectiveAC": {"mode": "selective", "selective_ac_option": "op"},
    "FullAC": {"mode": "full"},
    "MemoryBudgetAC": {"mode": "memory_budget"},
}
#: chunks of the loss of ChunkedLossWrapper
_CHUNKS = 8
#: statements that set no value of a configuration
_SILENT = (ast.Assert, ast.Import, ast.ImportFrom, ast.Pass, ast.FunctionDef)

#: the keywords of a configuration
_Fields = dict[str, ast.expr]


def of_python(file: JobFile) -> Mapping[str, Any] | None:
    """The sections of the configuration that a file makes, of several the one that is named; None where it
    makes none.

    Raises:
        UserError: it is no Python, makes several, or what it has is neither a plain value nor set plainly.
    """
    module = tree_of(file)
    made = {f.name: f for f in module.body if isinstance(f, ast.FunctionDef) and _makes(f)}
    if not made:
        return None
    name = chosen(file, made)
    return _sections(file, name, _Registry(file, made).fields(name, ()))


def _makes(function: ast.FunctionDef) -> bool:
    last = function.body[-1]
    returned = ast.unparse(last.value.func) if _is_return_of_call(last) else ""  # type: ignore[attr-defined]
    annotated = function.returns is not None and ast.unparse(function.returns) == CONFIGURATION
    return returned == CONFIGURATION or (annotated and isinstance(last, ast.Return))


def _is_return_of_call(statement: ast.stmt) -> bool:
    return isinstance(statement, ast.Return) and isinstance(statement.value, ast.Call)


class _Registry:
    """The functions of a file that make configurations, by name."""

    def __init__(self, file: JobFile, made: Mapping[str, ast.FunctionDef]):
        self.file, self.made = file, made

    def fields(self, name: str, above: Sequence[str]) -> _Fields:
        """The keywords of what a function returns; ``above``: functions that call it."""
        if name in above:
            raise self.file.wrong(f"{name} calls itself")
        values: dict[str, ast.expr] = {}
        configurations: dict[str, _Fields] = {}
        for statement in self.made[name].body:
            if isinstance(statement, ast.Return):
                return self._returned(statement, values, configurations, (*above, name))
            if isinstance(statement, _SILENT) or self._is_text(statement):
                continue
            if not isinstance(statement, ast.Assign) or len(statement.targets) != 1:
                raise self._unread(statement)
            target, value = statement.targets[0], _Filled(values).visit(statement.value)
            if isinstance(target, ast.Name) and (called := self._called(value)):
                configurations[target.id] = self.fields(called, (*above, name))
            elif isinstance(target, ast.Name):
                values[target.id] = value
            else:
                self._set(configurations, target, value)
        raise self.file.wrong(f"{name} returns nothing")

    def _returned(
        self,
        statement: ast.Return,
        values: Mapping[str, ast.expr],
        configurations: Mapping[str, _Fields],
        above: Sequence[str],
    ) -> _Fields:
        value = statement.value
        if isinstance(value, ast.Name) and value.id in configurations:
            return configurations[value.id]
        if value is not None and (called := self._called(value)):
            return self.fields(called, above)
        if isinstance(value, ast.Name) and value.id in values:
            value = values[value.id]
        if not isinstance(value, ast.Call) or ast.unparse(value.func) != CONFIGURATION:
            raise self._unread(statement)
        filled = _Filled(values).visit(value)
        return keywords(self.file, filled)

    def _called(self, value: ast.expr) -> str:
        """The function of this file that an expression calls without arguments; "" for another."""
        plain = isinstance(value, ast.Call) and not value.args and not value.keywords
        name = value.func.id if plain and isinstance(value.func, ast.Name) else ""  # type: ignore[attr-defined]
        return name if name in self.made else ""

    def _set(self, configurations: Mapping[str, _Fields], target: ast.expr, value: ast.expr) -> None:
        """Set a keyword, or one of a section's."""
        path: list[str] = []
        root = target
        while isinstance(root, ast.Attribute):
            path.insert(0, root.attr)
            root = root.value
        if not isinstance(root, ast.Name) or root.id not in configurations or len(path) > 2:
            raise self._unread(target)
        fields = configurations[root.id]
        if len(path) == 1:
            fields[path[0]] = value
            return
        section, key = path
        before = fields.get(section)
        kept = [each for each in before.keywords if each.arg != key] if isinstance(before, ast.Call) else []
        func = before.func if isinstance(before, ast.Call) else ast.Name(section)
        place = {"lineno": target.lineno, "col_offset": 0}
        fields[section] = ast.Call(func, [], [*kept, ast.keyword(key, value, **place)], **place)

    def _unread(self, node: ast.stmt | ast.expr) -> Exception:
        text = ast.unparse(node).splitlines()[0][:40]
        return self.file.wrong(f"line {node.lineno}: {text!r} sets no value plainly; write the value out")

    @staticmethod
    def _is_text(statement: ast.stmt) -> bool:
        return isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant)


class _Filled(ast.NodeTransformer):
    """Names are replaced by the values that were set before."""

    def __init__(self, values: Mapping[str, ast.expr]):
        self.values = values

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return self.values.get(node.id, node)


def _sections(file: JobFile, function: str, fields: _Fields) -> dict[str, Any]:
    name = next((model for model in MODELS if function.startswith(model)), None)
    content: dict[str, Any] = {"model": {} if name is None else {"name": name}}
    for key, value in fields.items():
        if key == "model_spec" and isinstance(value, ast.Call) and len(value.args) == 1:
            content["model"] |= dict(_of_model(file, value))
        elif key == "hf_assets_path":
            content["model"][key] = plain(file, value)
        elif key == "activation_checkpoint" and _is_none(value):
            content[key] = {"mode": "none"}
        elif isinstance(value, ast.Call):
            _add_section(file, content, key, value)
        else:
            content[key] = plain(file, value)
    return content


def _of_model(file: JobFile, call: ast.Call) -> Iterator[tuple[str, Any]]:
    yield "flavor", plain(file, call.args[0])
    for key, node in keywords(file, ast.Call(call.func, [], call.keywords, lineno=call.lineno)).items():
        if key == "converters" and isinstance(node, ast.List):
            yield key, [ast.unparse(each).partition(".")[0] for each in node.elts]
        else:
            yield key, plain(file, node)


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _add_section(file: JobFile, content: dict[str, Any], name: str, call: ast.Call) -> None:
    kind, given = ast.unparse(call.func).partition(".")[0], keywords(file, call)
    above, _, inner = _RENAMED.get(name, name).partition(".")
    section: dict[str, Any] = {}
    if name == "loss":
        section = {"num_chunks": _CHUNKS} if kind == "ChunkedLossWrapper" else {}
        given = {key: node for key, node in given.items() if not key.startswith(("loss_fn", "global_"))}
    for key, node in given.items():
        if name not in _IDLE or _is_plain(node):
            section[key] = plain(file, node)
    if inner and "dataset" in section:
        content.setdefault(above, {})["dataset"] = section.pop("dataset")
    place = content.setdefault(above, {})
    (place.setdefault(inner, {}) if inner else place).update({**_MODES.get(kind, {}), **section})


def keywords(file: JobFile, call: ast.Call) -> _Fields:
    """The keywords of a call; UserError where it has other arguments."""
    found: _Fields = {}
    for keyword in call.keywords:
        if keyword.arg is None or keyword.arg in found:
            raise file.wrong(f"line {keyword.value.lineno}: keywords that are written out are needed")
        found[keyword.arg] = keyword.value
    if call.args:
        raise file.wrong(f"line {call.lineno}: {ast.unparse(call.func)} has arguments without a keyword")
    return found


def _is_plain(node: ast.expr) -> bool:
    try:
        ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError):
        return False
    return True


def plain(file: JobFile, node: ast.expr) -> Any:
    """The value that a node writes out, or whole numbers multiplied."""
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
        factors = plain(file, node.left), plain(file, node.right)
        if all(type(factor) is int and factor < 2**63 for factor in factors):
            return factors[0] * factors[1]
    try:
        return ast.literal_eval(node)
    except (ValueError, TypeError, RecursionError, MemoryError) as error:
        text = ast.unparse(node)
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        raise file.wrong(f"line {node.lineno}: {shown} is no plain value; write it out") from error
