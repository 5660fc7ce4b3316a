"""`import spbench` imports nothing else, and has the same names at run time and for type checkers."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path

import pytest

import spbench

HERE = Path(spbench.__file__).parent
#: what takes longer to import than everything else
HEAVY = ("torch", "numpy", "pandas", "pydantic", "yaml", "click", "rich", "matplotlib")


def imported_for_type_checkers() -> dict[str, str]:
    """The names of spbench under ``if TYPE_CHECKING``, each with its module."""
    tree = ast.parse((HERE / "__init__.py").read_text())
    (block,) = (n for n in tree.body if isinstance(n, ast.If))
    imports = [n for n in block.body if isinstance(n, ast.ImportFrom)]
    modules = {alias.name: node.module or "" for node in imports for alias in node.names}
    return {name: module for name, module in modules.items() if module != "typing"}


def test_importing_imports_nothing_else() -> None:
    code = f"import sys, spbench; print([m for m in {HEAVY} if m in sys.modules])"
    code += (
        "; print([m for m in sys.modules if m.startswith('spbench.')], {*spbench.__all__} <= {*dir(spbench)})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parent)
    assert done.stdout.splitlines() == ["[]", "[] True"], done.stderr


def test_a_name_imports_what_it_needs_and_no_more() -> None:
    code = (
        "import sys, spbench; spbench.UserError; print('torch' in sys.modules, 'UserError' in vars(spbench))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=HERE.parent)
    assert done.stdout == "False True\n", done.stderr


def test_type_checkers_see_the_names_there_are() -> None:
    seen = imported_for_type_checkers()
    assert sorted(seen) == sorted(spbench.__all__)
    for name, module in seen.items():
        assert getattr(spbench, name) is getattr(sys.modules[module], name)


@pytest.mark.parametrize("name", spbench.__all__)
def test_a_public_name_is_documented(name: str) -> None:
    value = getattr(spbench, name)
    if name != "ONE_STAGE":
        assert inspect.getdoc(value), name


def test_an_unknown_name() -> None:
    with pytest.raises(AttributeError, match="module 'spbench' has no attribute 'Strategie'"):
        spbench.Strategie  # type: ignore[attr-defined]  # noqa: B018
