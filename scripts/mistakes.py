"""Small mistakes that a programmer could make in a file of Python: a change of an expression, a lost line."""

import ast
import copy
import difflib
from collections.abc import Iterator
from dataclasses import dataclass

#: by operator, the operator with which a mistake replaces it
OPERATORS: dict[type[ast.AST], type[ast.AST]] = dict(
    pair
    for one, other in (
        *((ast.Add, ast.Sub), (ast.BitOr, ast.BitAnd), (ast.And, ast.Or), (ast.Mult, ast.FloorDiv)),
        *(
            (ast.Lt, ast.LtE),
            (ast.Gt, ast.GtE),
            (ast.Eq, ast.NotEq),
            (ast.Is, ast.IsNot),
            (ast.In, ast.NotIn),
        ),
    )
    for pair in ((one, other), (other, one))
) | {ast.Div: ast.Mult, ast.Mod: ast.FloorDiv}


@dataclass(frozen=True)
class Mutation:
    """A mistake in one place of a file: ``text`` replaces the characters from ``start`` to ``end``."""

    path: str
    line: int
    kind: str
    start: int
    end: int
    text: str

    def applied(self, source: str) -> str:
        return source[: self.start] + self.text + source[self.end :]

    def diff(self, source: str) -> str:
        before, after = source.splitlines(), self.applied(source).splitlines()
        lines = difflib.unified_diff(before, after, self.path, f"{self.path} ({self.kind})", "", "", 1, "")
        return "\n".join(lines)


def mutations(path: str, source: str) -> Iterator[Mutation]:
    """All mutations of a file, in the file's order, except of type hints, messages of errors, and strings."""
    starts = [0]
    for line in source.splitlines(keepends=True):
        starts.append(starts[-1] + len(line.encode()))
    encoded = source.encode()

    def at(line: int, column: int) -> int:
        return len(encoded[: starts[line - 1] + column].decode())

    for node, kind, replacement in _changes(ast.parse(source)):
        text = "pass" if replacement is None else ast.unparse(replacement)
        if isinstance(replacement, ast.expr) and kind != "constant":
            text = f"({text})"
        start, end = at(node.lineno, node.col_offset), at(node.end_lineno or 0, node.end_col_offset or 0)
        yield Mutation(path, node.lineno, kind, start, end, text)


def _changes(node: ast.AST) -> Iterator[tuple[ast.expr | ast.stmt, str, ast.AST | None]]:
    """The mistakes as (node, kind of mistake, the node that replaces it); None: the statement is deleted."""
    if isinstance(node, ast.BinOp | ast.BoolOp | ast.AugAssign) and type(node.op) in OPERATORS:
        yield node, "operator", _with(node, op=OPERATORS[type(node.op)]())
    elif isinstance(node, ast.Compare):
        for i, op in enumerate(node.ops):
            kind = "boundary" if isinstance(op, ast.Lt | ast.LtE | ast.Gt | ast.GtE) else "operator"
            yield node, kind, _with(node, ops=[*node.ops[:i], OPERATORS[type(op)](), *node.ops[i + 1 :]])
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node, "condition", node.operand
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float):
        yield (
            node,
            "constant",
            ast.Constant(not node.value if isinstance(node.value, bool) else node.value + 1),
        )
    elif isinstance(node, ast.If | ast.IfExp | ast.While):
        yield node.test, "condition", ast.UnaryOp(ast.Not(), node.test)
    elif isinstance(node, ast.Call):
        for i in range(len(node.keywords)):
            yield node, "dropped argument", _with(node, keywords=node.keywords[:i] + node.keywords[i + 1 :])
        if len(node.args) > 1 and not node.keywords:
            yield node, "dropped argument", _with(node, args=node.args[:-1])
    value = node.value if isinstance(node, ast.Expr) else None
    targets = node.targets if isinstance(node, ast.Assign) else [ast.Name("")]
    if isinstance(node, ast.AugAssign) or isinstance(value, ast.Call) or not isinstance(targets[0], ast.Name):
        assert isinstance(node, ast.stmt)
        yield node, "deleted line", None
    for child in _inside(node):
        yield from _changes(child)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    typing = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    if typing or isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert):
        return
    for name, value in ast.iter_fields(node):
        if name not in ("annotation", "returns", "decorator_list", "bases"):
            yield from (
                each for each in (value if isinstance(value, list) else [value]) if isinstance(each, ast.AST)
            )


def _with(node: ast.AST, **changed: object) -> ast.AST:
    changed_node = copy.copy(node)
    vars(changed_node).update(changed)
    return changed_node
