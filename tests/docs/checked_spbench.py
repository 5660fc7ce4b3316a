"""The command `spbench`, whose outputs must be without faults on terminals of every width."""

from spbench.bench.command_line.cli import main
from tests.terminal import outputs_checked

if __name__ == "__main__":
    with outputs_checked():
        main()
