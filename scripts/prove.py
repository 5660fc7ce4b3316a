"""Note in the package that verification was green on its code, so that runs need not verify strategies first;
or beside the tests that those which cost most were.

    spbench verify --output results/verification    # or only on 2 ranks, in minutes: --world-size 2
    python scripts/prove.py [FOLDER]
    python scripts/prove.py tests

The script reads the verdicts in FOLDER (default: results/verification), and refuses code on which a case is
red or a strategy has no green case. It also writes the counts of the verdicts into the summary of
results/verification, which is committed in place of the verdicts; the nightly job keeps these whole.
With "tests" the script runs the tests of the files in tests/recorded.json. If all pass, it notes the digests
of the code there, and later default runs have only a few of these tests.
"""

import json
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from spbench.bench.files import write_whole
from spbench.bench.measure.verify import proof
from spbench.bench.verdicts import (
    CASE,
    RUN,
    SUMMARY_FILE,
    Verdict,
    as_lines,
    read_verdicts,
    values_of,
    verdicts_in,
)
from spbench.impls.registries import all_strategies

TREE = Path(__file__).parents[1]

#: the fields that the cases of a group share, of those that could run, and of those that were refused
GROUP = ("strategy", "model", "part", "dtype", "bytes", *RUN)
REFUSED_GROUP = ("strategy", "reason", *RUN)
#: what a group has no value of
OF_ONE_CASE: Verdict = {"variant": "", "batch": None, "seq_len": None, "rank": None}


def record_tests() -> None:
    sys.path.insert(0, str(TREE))  # the tests are in no package that is installed
    from tests import recorded

    record = json.loads(recorded.RECORD.read_text(encoding="utf-8"))
    files = [str(recorded.TESTS / name) for each in record.values() for name in each["files"]]
    code = {group: recorded.digest(group) for group in record}
    if subprocess.run([sys.executable, "-m", "pytest", "-n", "2", *files], cwd=TREE).returncode:
        raise SystemExit(f"not recorded: of the files in {recorded.RECORD} a test has failed")
    recorded.digest.cache_clear()
    if {group: recorded.digest(group) for group in record} != code:
        raise SystemExit("not recorded: the code was changed while its tests ran; run them again")
    for group, each in record.items():
        each["code"] = code[group]
    recorded.RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    print(f"{len(files)} files of tests are green on {', '.join(code.values())}")


def _with_ranks() -> set[str]:
    """The strategies with axes of ranks, which are compared with the single device."""
    return {name for name, cls in all_strategies().items() if cls.axes}


def write_summary(folder: Path, verdicts: Iterable[Verdict]) -> None:
    """Write the groups of these verdicts into a folder's summary, whose earlier groups of the same strategies
    and backends they replace: a line for all green cases of a strategy, model, part and precision, a line for
    all cases of a strategy that were refused for one reason, and a line for each red case. A file of hundreds
    of kilobytes then tells what a file of megabytes does.

    Raises:
        UserError: the earlier summary cannot be read.
    """
    path, groups = folder / SUMMARY_FILE, dict[tuple[str, ...], Verdict]()
    verdicts = list(verdicts)
    by = ("strategy", "backend", "device")
    renewed = {values_of(row, by) for row in verdicts}
    earlier = [
        row for row in (verdicts_in(path) if path.exists() else []) if values_of(row, by) not in renewed
    ]
    for row in earlier + verdicts:
        shared = {"unsupported": REFUSED_GROUP, "green": GROUP}.get(row["status"], (*CASE, *RUN))
        key = values_of(row, ("status", *shared))
        known = groups.setdefault(key, {**row, "cases": 0})
        worst = max(known, row, key=lambda each: each["error"] or 0.0)
        groups[key] = {
            **worst,
            "error": worst["error"] and float(f"{worst['error']:.2e}"),
            "cases": known["cases"] + row["cases"],
            "size": max(known["size"], row["size"]),
            **({} if row["status"] == "RED" else OF_ONE_CASE),
        }
    write_whole(path, as_lines(groups))


def main() -> None:
    code, folder = (
        proof.package_code(),
        Path(*sys.argv[1:]) if sys.argv[1:] else TREE / "results/verification",
    )
    verdicts = [each for each in read_verdicts(folder) if each["code"] == code]
    # runs on one code are parts of one verification, and have the time of the last
    last = {"time": max((each["time"] for each in verdicts), default="")}
    verdicts = [{**each, **last} for each in verdicts]
    counts = Counter(each["status"] for each in verdicts)
    proven = {each["strategy"] for each in verdicts if each["status"] == "green"}
    if counts["RED"] or (absent := sorted(_with_ranks() - proven)):
        why = f"{counts['RED']} cases are red" if counts["RED"] else f"no green case of {', '.join(absent)}"
        raise SystemExit(f"the code {code} is not proven: {why}")
    line = json.dumps({"code": code, "green": counts["green"], "pairs": sum("+" in name for name in proven)})
    (TREE / "bench" / "measure" / "verify" / proof.PROVEN).write_text(line + "\n", encoding="utf-8")
    write_summary(TREE / "results" / "verification", verdicts)
    print(line)


if __name__ == "__main__":
    record_tests() if sys.argv[1:] == ["tests"] else main()
