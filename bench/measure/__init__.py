"""The instrument: from a cell to its row. This is its door, through which ``tools`` and ``command_line`` go.

The names at the door stand in ``__init__.pyi``, each with its module. A name is imported when it is first
asked for, so that a command loads what it uses alone.
"""

from __future__ import annotations

import ast
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any


@cache
def _homes() -> dict[str, str]:
    """The module of each name of the door, by name."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {alias.name: node.module or "" for node in imports for alias in node.names}


def __getattr__(name: str) -> Any:
    """A name of the door, from its module as that is now (PEP 562)."""
    if name not in _homes():
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_homes()[name]), name)
