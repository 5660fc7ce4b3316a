"""A program for torchrun on two hosts: cells of four ranks that never end, then one of two, into the folder
of the first argument; a file ``done`` says that all have rows."""

import sys
from pathlib import Path

from spbench.bench.cell import Cell, Sizes
from spbench.bench.sweep.results import ResultsFile
from spbench.bench.sweep.sweep import sweep
from tests.bench import fakes
from tests.bench.faulty_sweep import under_launcher


def cells() -> list[Cell]:
    content = {"model": "bert-tiny", "strategy": "ring_self_attention", "batch": 2, "seq_len": 8}
    return [
        Cell.model_validate(
            {**content, "sizes": Sizes(sp=ranks), "engine": "distributed", "variant": variant}
        )
        for ranks, variant in ((4, "hangs"), (4, "hangs too"), (2, ""))
    ]


def sweep_into(folder: Path) -> None:
    with ResultsFile(folder) as results:
        sweep(cells(), results, run=fakes.faulty)
    Path(folder, "done").write_text("done\n")


if __name__ == "__main__":
    under_launcher(lambda: sweep_into(Path(sys.argv[1])))
