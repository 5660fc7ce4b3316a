"""The instrument: from a cell to its row. This is its door, through which ``tools`` and ``command_line`` go:
its names stand in ``__init__.pyi``, each with its module (:func:`lazy_names`)."""

from spbench.impls import lazy_names

__getattr__ = lazy_names(__name__, __file__)
