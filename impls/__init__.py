"""Strategies, models and backends, which import nothing from ``bench``. ``bench`` imports from this package
only the names in ``__init__.pyi``, which has the module of each (:mod:`spbench.impls.door`)."""

from spbench.impls.door import lazy_names

__getattr__ = lazy_names(__name__, __file__)
