"""The tests. A source distribution has the rooms only in src/spbench; there they make a checkout's links."""

from pathlib import Path

_ROOT = Path(__file__).parents[1]
for _name in ("spbench", "bench", "impls", "plots", "scenarios"):
    if not (_ROOT / _name).exists():
        (_ROOT / _name).symlink_to(f"src/spbench/{'' if _name == 'spbench' else _name}")
