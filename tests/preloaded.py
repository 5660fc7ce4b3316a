"""The imports of the server from which the tests' ranks are forked: the package's, and those of all tests.

A server that is itself forked from a process that has collected tests forgets the modules of these tests.
Ranks import such a module when they need it, without pytest's importer, because some tests check that import.
"""

import sys

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import spbench.bench.measure.processes.preloaded  # noqa: F401

sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "_pytest.assertion.rewrite"]
for _name in [name for name in sys.modules if name.startswith("tests.") and name != __name__]:
    del sys.modules[_name]
