"""The fixture of loops that are shortened."""

from tests.bench.meters.shortened_loops import steps

__all__ = ["steps"]
