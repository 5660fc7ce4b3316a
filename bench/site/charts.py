"""What charts share: the colours of methods, and filters by the choices above a chart."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import altair as alt

from spbench.bench.site.page import Selector
from spbench.plots.style import looks, strategy_name

Values = Sequence[dict[str, Any]]


def method_scale(strategies: Iterable[str]) -> alt.Scale:
    """A colour scale of :func:`strategy_name` for these strategies; a method has the colours of the figures."""
    look = looks(strategies)
    return alt.Scale(domain=[strategy_name(name) for name in look], range=[look[name].color for name in look])


def selected(chart: alt.Chart, selectors: Sequence[Selector]) -> alt.Chart:
    """The chart with a parameter for each selector, showing the data of the chosen values alone."""
    for selector in selectors:
        chart = chart.add_params(alt.param(name=selector.field, value=selector.options[0][0]))
        chart = chart.transform_filter(f"datum.{selector.field} === {selector.field}")
    return chart


def base(values: Values, height: int = 260) -> alt.Chart:
    """A chart of the values, as wide as its place on the page."""
    return alt.Chart(alt.Data(values=list(values))).properties(width="container", height=height)
