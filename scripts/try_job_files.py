"""How many job files of a folder `spbench import` reads: the count behind docs/import.md.

    python scripts/try_job_files.py RESULTS.csv FILE...

FILE: there, all *.yaml, *.yml, *.toml and *.sh below `examples` of each program at the commit that the page
names; `configs` of VeOmni, `projects` of ArcticTraining, and `tests/functional_tests` of Megatron-LM too.
Imports each file alone with 8 GPUs, with 64 and with 1,024, until one number of them does or the complaint is
of something else, on dgx-h100. Where a length alone is asked for by name, once more with that of LENGTH.
Writes a line for each: the exit code, the last line of the complaint at the first number, and what was
answered. Prints the counts.
"""

from __future__ import annotations

import csv
import io
import re
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

from spbench.bench.command_line.cli import exit_code

GPUS, LENGTH = (8, 64, 1024), 2048
#: what a complaint of too few ranks, or too many, says
_OF_RANKS = re.compile("GPU|ranks|replica|multiple|divi")
_ASKED = re.compile(r"--given ([\w.-]+)=(?:N|VALUE)")


def tried(file: str, answers: Sequence[str] = ()) -> tuple[int, str]:
    """The exit code of an import, and what it complains of; "": nothing."""
    given = [word for answer in answers for word in ("--given", answer)]
    first = ""
    for gpus in GPUS:
        complaint = io.StringIO()
        with redirect_stdout(io.StringIO()), redirect_stderr(complaint):
            code = exit_code(["import", file, "--gpus", str(gpus), "--cluster", "dgx-h100", *given])
        if code == 0:
            return 0, ""
        last = complaint.getvalue().strip().rpartition("\n")[2]
        first = first or last
        if not _OF_RANKS.search(last):
            break
    return code, first


def lengths_asked(complaint: str) -> list[str]:
    """Answers to what a complaint asks for, if that is a length alone."""
    names = _ASKED.findall(complaint)
    return [f"{name}={LENGTH}" for name in names] if all("len" in name.lower() for name in names) else []


def main() -> int:
    results, *files = sys.argv[1:]
    counts: Counter[str] = Counter()
    with Path(results).open("w", newline="", encoding="utf-8") as out:
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow(["file", "exit_code", "complaint", "answered"])
        for file in files:
            code, complaint = tried(file)
            answers = lengths_asked(complaint)
            if answers:
                code, complaint = tried(file, answers)
            counts["answered" if answers else "alone"] += code == 0
            writer.writerow([file, code, complaint, " ".join(answers)])
    print(
        f"{len(files)} files: {counts['alone']} are a scenario, {counts['answered']} once a length is given"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
