"""spbench: a benchmark and reproduction suite for sequence parallelism."""
