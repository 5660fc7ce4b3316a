"""Notebooks of the documentation print what their committed outputs say, when they are run from the start."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode

from tests.docs.blocks import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))


def texts(notebook: NotebookNode) -> Iterator[str]:
    """What the cells of a notebook print or show as text; of figures, only that there is one."""
    for cell in notebook.cells:
        for output in cell.get("outputs", ()):
            yield output.text if output.output_type == "stream" else output.data["text/plain"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_valid_and_has_its_outputs(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    kinds = {output.output_type for cell in notebook.cells for output in cell.get("outputs", ())}
    assert kinds <= {"stream", "execute_result", "display_data"}
    assert len(list(texts(notebook))) > 2


@pytest.mark.slow
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_prints_what_is_committed(
    path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "src"))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    notebook = nbformat.read(path, as_version=4)
    committed = list(texts(notebook))
    runner = client.NotebookClient(
        notebook,
        timeout=1500,
        kernel_name="python3",
        coalesce_streams=True,  # a command's output comes in pieces
        resources={"metadata": {"path": str(tmp_path)}},
    )
    runner.execute()
    assert list(texts(notebook)) == committed
