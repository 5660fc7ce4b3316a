"""What the server that the tests' ranks are forked from imports: also what every test module imports."""

import hypothesis  # noqa: F401
import pytest  # noqa: F401

import spbench.bench.measure.processes.preloaded  # noqa: F401
