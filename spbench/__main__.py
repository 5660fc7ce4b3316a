"""``python -m spbench`` is the command ``spbench``."""

from spbench.bench.cli import main

if __name__ == "__main__":
    main()
