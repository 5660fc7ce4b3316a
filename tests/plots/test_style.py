"""What all figures share: the looks of strategies, and the panel of claims."""

from itertools import combinations

import pytest

from spbench.impls.strategies.registry import strategies
from spbench.plots.claims import claims_of, claims_panel
from spbench.plots.grid import PanelGrid
from spbench.plots.style import looks, strategy_name
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
    assert strategy_name("ring_self_attention") == "ring self attention"
