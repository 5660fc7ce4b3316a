"""The fixture of loops that are shortened."""

from tests.measure.trace.shortened_loops import steps

__all__ = ["steps"]
