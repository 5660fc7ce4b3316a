"""Count how many job files `spbench import` reads, for the numbers of docs/import.md.

    python scripts/try_job_files.py RESULTS.csv FILE...

For docs/import.md the files are all *.yaml, *.yml, *.toml and *.sh below `examples` of each program at the
commit that the page names, and below `configs` of VeOmni, `projects` of ArcticTraining, and
`tests/functional_tests` of Megatron-LM. The script imports each file for dgx-h100 with 8, 64 and 1,024 GPUs,
until a number works or the complaint is not about the number; if the complaint asks only for a length, it
imports the file once more with LENGTH tokens. A line of RESULTS.csv has the file, the exit code, the last
line of the complaint with the first number, and the given length. The script prints the counts.
"""

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
#: words in a complaint about the number of ranks
_OF_RANKS = re.compile("GPU|ranks|replica|multiple|divi")
_ASKED = re.compile(r"--given ([\w.-]+)=(?:N|VALUE)")


def tried(file: str, answers: Sequence[str] = ()) -> tuple[int, str]:
    """The exit code of the import of a file, and the last line of its complaint; "" if there is none."""
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
    """The values of --given that answer a complaint, if the complaint asks only for lengths."""
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
