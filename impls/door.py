"""The door of a package: the names that other packages import from it, each loaded at its first use.

The package's ``__init__.pyi``, which type checkers read too, has a line for each name:
``from MODULE import NAME as NAME``.
"""

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> Callable[[str], Any]:
    """The ``__getattr__`` (PEP 562) of the package whose ``__init__.py`` is ``file``. The returned function
    raises AttributeError for a name that is not in the file's ``.pyi``."""

    @cache
    def homes() -> dict[str, str]:
        stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
        lines = (node for node in stub.body if isinstance(node, ast.ImportFrom))
        return {each.name: line.module or "" for line in lines for each in line.names}

    def get(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(__import__(homes()[name], fromlist=[name]), name)  # works for submodules too

    return get
