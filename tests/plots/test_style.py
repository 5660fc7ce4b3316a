"""What all figures share: the looks of strategies, and the panel of claims."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from matplotlib.figure import Figure

from spbench.impls.registries import strategies
from spbench.plots.axes import logarithmic_axis
from spbench.plots.claims import claims_of, claims_panel
from spbench.plots.grid import PanelGrid
from spbench.plots.style import contrast, looks, method_color, strategy_name
from tests.plots.drawn import assert_nothing_overlaps
from tests.plots.rows import compared, table


def test_a_strategy_looks_the_same_whichever_others_are_drawn() -> None:
    names = [*strategies(), "a_plug_in", "another"]
    everywhere = looks(names)
    assert list(looks(reversed(names))) == list(everywhere)
    for one, other in combinations(names, 2):
        pair = looks([one, other])
        assert pair == {name: everywhere[name] for name in pair}
        assert pair[one].color != pair[other].color


@pytest.mark.parametrize(
    ("published", "ours", "error"),
    [(1e9, 1e9, "+0.0%"), (1e9, 1e9 + 4, "+4e-07%"), (1.0, 0.9996, "-4e-02%"), (2.0, 2.1, "+5.0%")],
)
def test_a_claim_that_is_nearly_met_does_not_read_as_met(published: float, ours: float, error: str) -> None:
    # ten digits in both columns must not lie on each other either
    claims = claims_of(table(compared("near", published, ours, "a row")))
    figure = PanelGrid("Claims").add(claims_panel(claims)).draw()
    assert_nothing_overlaps(figure)
    (ax,) = figure.axes
    assert error in [text.get_text() for text in ax.texts]


def test_strategies_around_each_other_have_the_hatch_of_the_inner_and_the_marker_of_the_outer_one() -> None:
    found = looks(["megatron_sp+ring_self_attention", "ring_self_attention", "megatron_sp"])
    composed = found["megatron_sp+ring_self_attention"]
    assert composed.color not in (found["ring_self_attention"].color, found["megatron_sp"].color)
    assert (composed.marker, composed.hatch) == (
        found["megatron_sp"].marker,
        found["ring_self_attention"].hatch,
    )
    assert looks(["megatron_sp+ring_self_attention"]) == {"megatron_sp+ring_self_attention": composed}
    assert strategy_name("megatron_sp+ring_self_attention") == "Megatron-SP + RSA"
    assert strategy_name("ring_self_attention") == "Ring Self-Attention"


#: how linear RGB is seen by normal eyes, and without green, red and blue cones: Machado, Oliveira and
#: Fernandes, A Physiologically-based Model for Simulation of Color Vision Deficiency, 2009, severity 1
SEEN = {
    "normal": "1 0 0 0 1 0 0 0 1",
    "deuteranopia": "0.367322 0.860646 -0.227968 0.280085 0.672501 0.047413 -0.01182 0.04294 0.968881",
    "protanopia": "0.152286 1.052583 -0.204868 0.114503 0.786281 0.099216 -0.003882 -0.048116 1.051998",
    "tritanopia": "1.255528 -0.076749 -0.178779 -0.078411 0.930809 0.147602 0.004733 0.691367 0.3039",
}


def lab(color: str, seen: str = "normal") -> Any:
    """A colour in CIELAB (D65), as it is seen."""
    srgb = np.array([int(color[at : at + 2], 16) / 255 for at in (1, 3, 5)])
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    by = np.array(SEEN[seen].split(), dtype=float).reshape(3, 3)
    to_xyz = [[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]]
    x, y, z = np.cbrt(to_xyz @ np.clip(by @ linear, 0, 1) / np.array([0.9505, 1, 1.089]))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize("seen", SEEN)
def test_methods_are_told_apart_with_any_eyes_and_in_grey(seen: str) -> None:
    known = looks(strategies())
    for (one, a), (other, b) in combinations(known.items(), 2):
        distance = np.linalg.norm(lab(a.color, seen) - lab(b.color, seen))
        assert distance > 15, f"{one} and {other} look alike"
        assert a.marker != b.marker
        assert a.hatch != b.hatch
    assert min(contrast(look.color) for look in known.values()) >= 3


def test_what_is_not_in_the_table_has_a_colour_of_its_own() -> None:
    known = {method_color(name) for name in strategies()}
    others = [f"{one}+{other}" for one in strategies() for other in strategies()]
    others += [f"plug_in_{n}" for n in range(200)]
    found = {name: method_color(name) for name in others}
    assert len(set(found.values())) == len(others)
    for color in found.values():
        assert color not in known
        assert contrast(color) >= 3
        assert min(np.linalg.norm(lab(color) - lab(other)) for other in known) > 8
    # the same in every session and beside any others
    assert method_color("ulysses+ring_attention") == "#531cf6"


@pytest.mark.parametrize(("values", "ticks"), [((10**1.08, 13.0), [10.0]), ((50.0, 10**1.92), [100.0])])
def test_a_tick_on_the_edge_of_a_logarithmic_axis_is_there(
    values: tuple[float, float], ticks: list[float]
) -> None:
    ax = Figure().subplots()
    logarithmic_axis(ax, values, marks=False)
    assert {*ticks} <= {*ax.get_yticks()}
