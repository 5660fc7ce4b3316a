"""Texts that commands print, as files beside the tests, each of which was read once: a change is a diff."""

import os
from pathlib import Path


def hold(path: Path, text: str) -> None:
    """Hold a text to the one in a file; with SPBENCH_WRITE_TEXTS=1 in the environment, write that anew."""
    if "SPBENCH_WRITE_TEXTS" in os.environ:
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert path.read_text() == text
