"""Starting processes that do not run the user's script again."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType


@contextmanager
def main_module_hidden() -> Iterator[None]:
    """A process that multiprocessing spawns inside does not import the main module of this one.

    What the process needs must be in other modules. A script may then call for processes without a guard
    ``if __name__ == "__main__"``, and is not run once more for each of them. The bare main module has neither
    a spec nor a file, by which multiprocessing would find it, as in an interactive session.
    """
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
