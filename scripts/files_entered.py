"""Count the files and rooms of bench that a command enters, and the changes of room on the way.

    python scripts/files_entered.py run --scenario max_seqlen --world-size 8
    python scripts/files_entered.py advise --model llama3-8b --cluster dgx-h100 --gpus 8 --seq-len 8K

A file is entered when one of its functions is called, but not during an import. Changes of room are counted
along the files in the order of their first entry. The work of workers is counted by running the scenario's
cells once more in this process. Modules that all rooms use (:data:`EVERYWHERE`) are left out.
"""

import os
import sys
import threading
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from types import FrameType
from typing import Any

import spbench
from spbench.bench.command_line.cli import cli

BENCH = os.path.realpath(Path(spbench.__file__).parent / "bench") + os.sep
#: small modules that all rooms call, by name
EVERYWHERE = {"errors", "units", "counts", "setting_values"}


class Journey:
    """The files of bench in the order in which a program enters them."""

    def __init__(self) -> None:
        self.files: dict[str, None] = {}
        self._files: dict[str, str | None] = {}
        self._importing = 0

    def _file(self, code_file: str) -> str | None:
        if code_file not in self._files:
            path = os.path.realpath(code_file)
            inside = path.startswith(BENCH) and Path(path).stem not in EVERYWHERE
            self._files[code_file] = path.removeprefix(BENCH) if inside else None
        return self._files[code_file]

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        """Note the file of a called function; the signature is that of a function for sys.setprofile."""
        if event not in ("call", "return"):
            return
        if frame.f_code.co_name == "<module>":
            self._importing += 1 if event == "call" else -1
        elif event == "call" and not self._importing:
            file = self._file(frame.f_code.co_filename)
            if file is not None:
                self.files.setdefault(file)

    def changes(self) -> int:
        """The number of changes of room along the files in the order of their first entry."""
        rooms = [str(Path(file).parent) for file in self.files]
        return sum(a != b for a, b in pairwise(rooms))


def cells(words: Sequence[str]) -> None:
    """Run the cells of `spbench run WORDS` in this process."""
    given = dict(pairwise(words))
    sizes = [int(size) for size in given.get("--world-size", "").split(",") if size]
    spbench.run(given["--scenario"], world_sizes=sizes, jobs=0)


def main() -> None:
    journey = Journey()
    threading.setprofile(journey.profile)
    sys.setprofile(journey.profile)
    try:
        cli.main(sys.argv[1:], prog_name="spbench", standalone_mode=False)
        if sys.argv[1] == "run":
            cells(sys.argv[2:])
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    rooms = {str(Path(file).parent) for file in journey.files}
    count = f"{len(journey.files)} files in {len(rooms)} rooms, {journey.changes()} changes of room"
    print(f"\n{count}", *journey.files, sep="\n", file=sys.stderr)


if __name__ == "__main__":
    main()
