"""How many job files of a folder `spbench import` reads: the count behind docs/import.md.

    python scripts/try_job_files.py RESULTS.csv FILE...

Imports each file alone with 8 GPUs, with 64 and with 1,024, until one number of them does, on dgx-h100, and
writes a line for each: the exit code and the last line of the complaint. Prints the counts.
"""

from __future__ import annotations

import csv
import io
import sys
from collections import Counter
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from spbench.bench.command_line.cli import exit_code

GPUS = (8, 64, 1024)


def tried(file: str) -> tuple[int, str]:
    """The exit code of an import, and what it complains of; "": nothing."""
    code, complaint = 2, io.StringIO()
    for gpus in GPUS:
        complaint = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(complaint):
            code = exit_code(["import", file, "--gpus", str(gpus), "--cluster", "dgx-h100"])
        if code == 0:
            return 0, ""
    return code, complaint.getvalue().strip().rpartition("\n")[2]


def main() -> int:
    results, *files = sys.argv[1:]
    counts: Counter[int] = Counter()
    with Path(results).open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["file", "exit_code", "complaint"])
        for file in files:
            code, complaint = tried(file)
            counts[code] += 1
            writer.writerow([file, code, complaint])
    print(f"{len(files)} files: {counts[0]} are a scenario")
    return 0


if __name__ == "__main__":
    sys.exit(main())
