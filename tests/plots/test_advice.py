"""The map of `spbench advise`."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
from matplotlib.patches import Rectangle

from spbench.plots.advice import advice_map, draw_advice
from tests.plots.drawn import assert_nothing_overlaps, legend

LONGEST = "tensor_parallel+ulysses+ring_attention"
MESHES = {"single": "dp8", "ulysses": "dp16xsp8", LONGEST: "dp2xpp4xcp4xtp8xsp8"}


def points(gpus: list[int], lengths: list[int]) -> list[dict[str, Any]]:
    """A winner for each pair, of the three in turn; nothing fits at the longest on the fewest GPUs."""
    found = []
    for at, (n, length) in enumerate(itertools.product(gpus, lengths)):
        strategy = "" if (n, length) == (gpus[0], lengths[-1]) else [*MESHES][at % 3]
        found.append(
            {
                "model": "llama3-8b",
                "cluster": "dgx-h100",
                "figures": "",
                "gpus": n,
                "seq_len": length,
                "strategy": strategy,
                "mesh": MESHES.get(strategy, ""),
                "tie": at % 4 == 0,
            }
        )
    return found


@pytest.mark.parametrize("lengths", [[8192, 131072], [2**k for k in range(13, 23)], [1000]])
def test_each_pair_has_a_field_that_can_be_read(lengths: list[int]) -> None:
    asked = points([8, 64, 512], lengths)
    figure = advice_map(asked)
    assert_nothing_overlaps(figure)
    (ax,) = figure.axes
    fields = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    assert len(fields) == len(asked)
    assert [bool(field.get_hatch()) for field in fields] == [point["tie"] for point in asked]
    texts = [text.get_text() for text in ax.texts]
    assert texts.count("-") == 1
    assert "dp2xpp4\ncp4xtp8\nsp8" in texts
    named = {point["strategy"] for point in asked} - {""}
    assert {*legend(figure)} == named | {"tie with another strategy", "nothing fits"}
    colors = {(point["strategy"], field.get_facecolor()) for point, field in zip(asked, fields, strict=True)}
    assert len(colors) == len(named) + 1
    assert ax.get_xticklabels()[0].get_text() in ("8K", "1000")


def test_the_file_is_of_the_type_that_its_name_says(tmp_path: Path) -> None:
    asked = points([8], [8192])
    asked[0].update(strategy="single", mesh="dp8")
    assert draw_advice(asked, tmp_path / "new.svg").read_text().startswith("<?xml")
    with pytest.raises(ValueError, match="gif"):
        draw_advice(asked, tmp_path / "new.gif")
