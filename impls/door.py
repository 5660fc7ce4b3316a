"""The door of a package: names that others take from it, each imported when it is first asked for.

The names stand in the package's ``__init__.pyi``, which type checkers read too: a line for each, as
``from MODULE import NAME as NAME``.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> Callable[[str], Any]:
    """The ``__getattr__`` (PEP 562) of the package whose ``__init__.py`` is ``file``; it raises
    AttributeError for a name that does not stand in the file's ``.pyi``."""

    @cache
    def homes() -> dict[str, str]:
        stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
        lines = (node for node in stub.body if isinstance(node, ast.ImportFrom))
        return {each.name: line.module or "" for line in lines for each in line.names}

    def get(name: str) -> Any:
        if name not in homes():
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(__import__(homes()[name], fromlist=[name]), name)  # a module of a package too

    return get
