"""``python -m spbench`` is the command ``spbench``."""

import sys


def main() -> None:
    """The command `spbench`. The command line is imported here, so that an interrupt during the import is
    reported like any other."""
    try:
        from spbench.bench.command_line.cli import main as run

        run()
    except KeyboardInterrupt:
        print("spbench: interrupted", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()
