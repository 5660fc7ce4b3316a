"""Figures of result rows.

The figure NAME of a scenario is ``draw(rows, comparison, output) -> list of paths`` in the module NAME of
this package, ``draw_NAME = ...`` in any module of it, or an entry point NAME of the group
``spbench.figures``.
"""

from spbench.impls.discovery import FunctionModules


class NothingToDraw(ValueError):
    """No row has numbers that the figure shows; the message says which rows the figure needs."""


FIGURES = FunctionModules(__name__, "*", "draw", "figures", "spbench.figures")
