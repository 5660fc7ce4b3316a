"""Measure how many random mistakes in the code the tests notice.

    pytest --cov=bench --cov=impls --cov-context=test        # writes .coverage: which test reaches which line
    python scripts/mutations.py --sample 60 --seed 1         # 60 mistakes, one at a time
    python scripts/mutations.py --sample 60 --seed 1 --portion 10    # the next 10 of them
    python scripts/mutations.py --frozen results/frozen/mutations.jsonl   # mistakes judged before
    python scripts/mutations.py --frozen results/frozen/mutations.jsonl --turn 7    # mistakes 7, 17, 27...

A mistake changes an operator, a boundary, a constant or a condition, deletes a line, or drops an argument.
The script makes the mistake in a copy of the tree, and runs the quickest tests that reach the line and some
tests about the module, because the coverage data lack code that real ranks run. A mistake is killed if a test
fails or hangs. The script prints the share of killed mistakes by room, and a diff of each mistake that
survived: either the tests have a gap, or the changed code means the same.

Verdicts are appended to a file of JSON lines, and a mistake in this file is not run again. Such a file may be
committed and judged on later code with ``--frozen``, without coverage data: each mistake is found by its
statement, also in another place, and a killed one is run against the test that killed it. Other mistakes keep
their verdict; for code that means the same it may be set to "equivalent", with a reason ("why"), and then the
mistake does not count. Exit code 1: a mistake that was killed survives, or the statement or the test of a
mistake is gone, so that someone must replace the mistake. ``--write`` writes the file with today's places.
"""

import argparse
import ast
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from coverage import CoverageData
from mistakes import Mutation, mutations

PYTEST = ["-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=no", "-rfE"]


Row = dict[str, Any]

#: verdicts of mistakes that do not count in the share of killed mistakes
NOT_COUNTED = ("not judged", "equivalent")


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1"}


def collected_tests(tree: Path) -> set[str]:
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "--collect-only"]
    listed = subprocess.run(command, cwd=tree, env=environment(tree), capture_output=True, text=True)
    return {re.sub(r"@\w+$", "", line) for line in listed.stdout.splitlines() if "::" in line}


class Tests:
    """The choice of tests for a mutation, from coverage data with a context for each test."""

    def __init__(self, tree: Path, coverage: Path):
        self.known = collected_tests(tree)  # today's tests; the coverage data may be older
        data = CoverageData(str(coverage))
        data.read()
        self.tree = tree
        self.cost: Counter[str] = Counter()  # the number of lines that a test reaches, as its cost
        self.by_line: dict[str, dict[int, set[str]]] = {}
        for file in data.measured_files():
            reached: dict[int, set[str]] = defaultdict(set)
            for line, contexts in data.contexts_by_lineno(file).items():
                reached[line] = {re.sub(r"(@\w+)?\|\w+$", "", c) for c in contexts if c}
                self.cost.update(reached[line])
            self.by_line[file] = reached

    def of(self, mutation: Mutation, quickest: int) -> list[str]:
        """At most ``quickest`` tests that reach the mutation's statement, and half as many tests that name
        its module or a class of the module (as many, if no test reaches the statement)."""
        parsed = ast.parse((self.tree / mutation.path).read_text(encoding="utf-8"))
        statements = [
            n.lineno for n in ast.walk(parsed) if isinstance(n, ast.stmt) and n.lineno <= mutation.line
        ]
        reached = [lines for file, lines in self.by_line.items() if file.endswith(f"/{mutation.path}")]
        within = range(max(statements), mutation.line + 1)
        on_line = self.known.intersection(t for lines in reached for i in within for t in lines.get(i, ()))
        about = self._about(mutation.path, parsed) - on_line
        return self._quickest(on_line, quickest) + self._quickest(about, quickest // (2 if on_line else 1))

    def _about(self, path: str, parsed: ast.Module) -> set[str]:
        module = path.removesuffix(".py").replace("/", ".")
        classes = [n.name for n in parsed.body if isinstance(n, ast.ClassDef)]
        names = re.compile(rf"\b({'|'.join([re.escape(module), *classes])})\b")
        files = {test.split("::")[0] for test in self.cost}
        about = {f for f in files if module in self._text(f)}
        about |= {f for f in files if Path(f).name == f"test_{Path(path).name}"}  # which may run it elsewhere
        if path.startswith("impls/"):  # the coverage data lack code that ranks run
            about |= {f for f in files if f.startswith("tests/impls/") and "RankPool" in self._text(f)}
        return {t for t in self.cost if t.split("::")[0] in about or names.search(t)}

    def _text(self, file: str) -> str:
        return (self.tree / file).read_text(encoding="utf-8") if (self.tree / file).exists() else ""

    def _quickest(self, tests: Iterable[str], number: int) -> list[str]:
        """At most ``number`` of the tests, the cheapest first, from different files and functions in turn,
        because many tests of one file check the same."""
        turns: Counter[str] = Counter()
        in_turn = []
        for test in sorted(self.known.intersection(tests), key=lambda test: (self.cost[test], test)):
            file, function = test.split("::")[0], test.split("[")[0]
            in_turn.append((turns[file] + 4 * turns[function], self.cost[test], test))
            turns.update({file: 1, function: 1})
        return [test for *_, test in sorted(in_turn)[:number]]


def sampled(tree: Path, paths: Sequence[str], number: int, seed: int) -> list[Mutation]:
    """``number`` random mutations of the files below these paths, equally many of each kind if possible."""
    by_kind: dict[str, list[Mutation]] = defaultdict(list)
    for path in paths:
        for file in sorted((tree / path).rglob("*.py") if (tree / path).is_dir() else [tree / path]):
            for mutation in mutations(file.relative_to(tree).as_posix(), file.read_text(encoding="utf-8")):
                by_kind[mutation.kind].append(mutation)
    draw = random.Random(seed)
    shuffled = [draw.sample(of_kind, len(of_kind)) for _, of_kind in sorted(by_kind.items())]
    in_turn = [m for each in itertools.zip_longest(*shuffled) for m in each if m is not None]
    return in_turn[:number]


def copied(tree: Path, to: Path) -> Path:
    """A copy, in the folder ``to``, of the files of a tree that git does not ignore; links stay links."""
    listed = subprocess.run(
        ["git", "ls-files", "-coz", "--exclude-standard"], cwd=tree, check=True, capture_output=True
    )
    for name in listed.stdout.decode().split("\0"):
        if name and os.path.lexists(tree / name):
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(tree / name, to / name, follow_symlinks=False)
    return to


def run_tests(tree: Path, tests: Sequence[str], limit_s: float) -> tuple[str, str]:
    """The verdict of a run of tests: ("killed", the test that failed), ("hang", "") or ("survived", "")."""
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, *PYTEST, *tests]
    process = subprocess.Popen(command, cwd=tree, env=environment(tree), start_new_session=True, **pipes)
    try:
        output, _ = process.communicate(timeout=limit_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "hang", ""
    # a test whose module cannot be imported is named by its whole path
    said = output.replace(f"ERROR: found no collectors for {tree}/", "ERROR ")
    failed = re.search(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - .*)?$", said, re.MULTILINE)
    if process.returncode == 0:
        return "survived", ""
    # a process that a signal ends has printed nothing
    last = [f"exit code {process.returncode}", *output.strip().splitlines()][-1]
    return "killed", failed[1] if failed else last[:200]


def judged(mutation: Mutation, tree: Path, tests: Tests, quickest: int, limit_s: float) -> Row:
    """The row with the verdict on one mutation, which is made in the tree and then undone."""
    file = tree / mutation.path
    source, chosen = file.read_text(encoding="utf-8"), tests.of(mutation, quickest)
    row = {**asdict(mutation), "tests": len(chosen), "diff": mutation.diff(source)}
    if not chosen:
        return {**row, "verdict": "no test", "by": ""}
    file.write_text(mutation.applied(source), encoding="utf-8")
    try:
        verdict, by = run_tests(tree, chosen, limit_s)
    finally:
        file.write_text(source, encoding="utf-8")
    if verdict == "killed" and run_tests(tree, [by] if by in chosen else chosen, limit_s)[0] != "survived":
        verdict = "not judged"  # that test fails without the mutation too
    return {**row, "verdict": verdict, "by": by}


def is_of(row: Row, mutation: Mutation, source: str) -> bool:
    return (row["path"], row["diff"], row["text"]) == (mutation.path, mutation.diff(source), mutation.text)


def judged_again(rows: Sequence[Row], tree: Path, paths: Sequence[str], limit_s: float) -> Iterable[Row]:
    """All rows with today's places; a killed mistake has today's verdict of the same test. The verdict is
    "gone" if the statement or the test no longer exists."""
    sources = {
        f: f.read_text(encoding="utf-8") for path in paths for f in sorted((tree / path).rglob("*.py"))
    }
    collected = collected_tests(tree)
    for row in rows:
        place, name = placed_again(row, tree, sources), row["by"].split("::", 1)[-1]
        if place is None:
            yield {**row, "verdict": "gone"}
            continue
        file = tree / place.path
        row = {**row, **asdict(place), "diff": place.diff(sources[file])}
        if row["verdict"] != "killed":
            yield row
            continue
        # if the file of tests could not be imported, all tests of the file are run
        tests = sorted(test for test in collected if name in (test.split("::", 1)[-1], test.split("::")[0]))
        verdict = "gone"
        if tests:
            file.write_text(place.applied(sources[file]), encoding="utf-8")
            try:
                verdict, _ = run_tests(tree, tests, limit_s)
            finally:
                file.write_text(sources[file], encoding="utf-8")
        yield {**row, "verdict": verdict, "tests": len(tests), "by": next(iter(tests), row["by"])}


def placed_again(row: Row, tree: Path, sources: dict[Path, str]) -> Mutation | None:
    """The same mistake in today's files, None if its statement is gone. If several files have the statement,
    a file of the same name comes first, and then a place between the same lines."""

    def lines(diff: str, signs: str) -> list[str]:
        return [line[0] + line[1:].strip() for line in diff.splitlines()[2:] if line[0] in signs]

    statement, around = lines(row["diff"], "-+"), lines(row["diff"], "-+ ")
    needle = next((line[1:] for line in statement if line[0] == "-"), "")
    places: dict[tuple[bool, bool], Mutation] = {}
    for file in (file for file in sources if needle in sources[file]):
        for mutation in mutations(file.relative_to(tree).as_posix(), sources[file]):
            if (mutation.kind, mutation.text) == (row["kind"], row["text"]):
                diff = mutation.diff(sources[file])
                if lines(diff, "-+") == statement:
                    alike = file.name == Path(row["path"]).name, lines(diff, "-+ ") == around
                    places.setdefault(alike, mutation)
    return places[max(places)] if places else None


def told(rows: Sequence[Row]) -> str:
    """A text with the number of killed mistakes and of other verdicts by room, and then the survivors'
    diffs."""
    rooms: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        rooms["/".join(row["path"].split("/")[:2])][row["verdict"]] += 1
    lines = []
    for room, of in [*sorted(rooms.items()), ("all", sum(rooms.values(), Counter()))]:
        others = ", ".join(f"{n} {verdict}" for verdict, n in sorted(of.items()) if verdict != "killed")
        lines.append(
            f"{room:32} {killed(of):4} of {counted(of):4} killed" + (f" ({others})" if others else "")
        )
    shown = [row for row in rows if row["verdict"] not in ("killed", *NOT_COUNTED)]
    return "\n".join([*lines, *(f"\n{row['verdict']}, {row['tests']} tests\n{row['diff']}" for row in shown)])


def killed(verdicts: Counter[str]) -> int:
    return verdicts["killed"] + verdicts["hang"]


def counted(verdicts: Counter[str]) -> int:
    return verdicts.total() - sum(verdicts[verdict] for verdict in NOT_COUNTED)


def again(chosen: argparse.Namespace) -> int:
    """Judge all mistakes of a committed file of verdicts again, or every tenth; returns the exit code."""
    rows = [json.loads(line) for line in chosen.frozen.read_text(encoding="utf-8").splitlines()]
    rows = rows if chosen.turn is None else rows[chosen.turn % 10 :: 10]
    verdicts: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = copied(chosen.tree.resolve(), Path(folder))
        for row in judged_again(rows, tree, chosen.paths, chosen.limit):
            verdicts.append(row)
            print(row["verdict"], f"{row['path']}:{row['line']}", row["kind"], file=sys.stderr)
    print(told([row for row in verdicts if row["verdict"] != "gone"]))
    gone = sum(row["verdict"] == "gone" for row in verdicts)
    print(f"{gone} of {len(verdicts)} gone with their statement or their test")
    if chosen.write:
        chosen.frozen.write_text("".join(f"{json.dumps(row)}\n" for row in verdicts), encoding="utf-8")
    pairs = zip(rows, verdicts, strict=True)
    alive = any((was["verdict"], now["verdict"]) == ("killed", "survived") for was, now in pairs)
    return int(alive or gone > 0)


def main() -> int:
    add = (parser := argparse.ArgumentParser(epilog=__doc__)).add_argument
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    add("--sample", type=int, default=60, help="mutations in all")
    add("--portion", type=int, help="how many of them to run now; default: all")
    add("--seed", type=int, default=0)
    add("--coverage", type=Path, default=Path(".coverage"), help="data with a context for each test")
    add("--paths", nargs="+", default=["bench", "impls"], help="files and folders to change")
    add("--tree", type=Path, default=Path(__file__).resolve().parents[1])
    add("--output", type=Path, default=Path("mutations.jsonl"), help="file of verdicts")
    add("--quickest", type=int, default=25, help="tests of a line that are run")
    add("--limit", type=float, default=120.0, help="seconds for one mutation")
    add("--at-least", type=float, default=0.0, help="exit code 1 if a smaller share is killed")
    add("--frozen", type=Path, help="file of verdicts, each killed one of which is judged again")
    add("--turn", type=int, help="of --frozen: every tenth verdict, from this one on")
    add("--write", action="store_true", help="of --frozen: write all of it again")
    chosen = parser.parse_args()
    if chosen.write and chosen.turn is not None:
        parser.error("--write is for all verdicts, without --turn")
    if chosen.frozen:
        return again(chosen)
    chosen.output.touch()
    rows: list[Row] = [json.loads(line) for line in chosen.output.read_text(encoding="utf-8").splitlines()]
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree = copied(chosen.tree.resolve(), Path(folder))
        sample = sampled(tree, chosen.paths, chosen.sample, chosen.seed)
        of_sample: list[Row] = []
        todo: list[Mutation] = []
        for mutation in sample:
            source = (tree / mutation.path).read_text(encoding="utf-8")
            row = next((row for row in rows if is_of(row, mutation, source)), None)
            todo += [mutation] if row is None else []
            of_sample += [row] if row is not None else []
        tests = Tests(tree, chosen.coverage.resolve()) if todo else None
        for mutation in todo[: chosen.portion]:
            assert tests is not None
            of_sample.append(judged(mutation, tree, tests, chosen.quickest, chosen.limit))
            with chosen.output.open("a", encoding="utf-8") as file:
                file.write(json.dumps(of_sample[-1]) + "\n")
            print(
                of_sample[-1]["verdict"], f"{mutation.path}:{mutation.line}", mutation.kind, file=sys.stderr
            )
    print(told(of_sample))
    verdicts = Counter(row["verdict"] for row in of_sample)
    return int(killed(verdicts) < chosen.at_least * counted(verdicts))


if __name__ == "__main__":
    sys.exit(main())
