"""What the server that the tests' ranks are forked from imports: also what every test module imports.

A server that is itself forked from a process that has collected tests forgets their modules. Ranks import
them as they need them, without pytest's own importer: some tests are of what happens then.
"""

import sys

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import spbench.bench.measure.processes.preloaded  # noqa: F401

sys.meta_path[:] = [each for each in sys.meta_path if type(each).__module__ != "_pytest.assertion.rewrite"]
for _name in [name for name in sys.modules if name.startswith("tests.") and name != __name__]:
    del sys.modules[_name]
