"""Check that the code still gives the frozen numbers, byte for byte.

    python scripts/same_numbers.py [PART...]             # 0: the same; 1: a line for each number that moved
    python scripts/same_numbers.py --freeze [PART...]    # write the numbers again

The parts are in :data:`PARTS`; without a PART the script checks all frozen parts. Each part is computed
through the command line without kept traces, and has one file in results/frozen: a line for each answer with
its name, a few of its numbers, and a digest of its whole JSON without the fields that differ from run to run
(date, host, commit, seconds). A commit that moves a number on purpose also freezes the number again, and says
why.
"""

import argparse
import csv
import hashlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from advice_tables import PRECISION, QUESTIONS

TREE = Path(__file__).parents[1]
sys.path.append(str(TREE))

from tests.docs.blocks import blocks  # noqa: E402 (after its path)

FOLDER = TREE / "results" / "frozen"
#: the fields of an answer that differ from run to run
NOT_FROZEN = {"cpu_s", "elapsed_s", "host", "provenance", "rounds", "seconds", "time"}
#: the names that keys, or words in the text of a key, had when the digests were frozen, by today's names, so
#: that a change of a name moves no digest
OLD_KEYS = {"matmul_s": "products_s", "intra_node_s": "within_nodes_s", "inter_node_s": "across_nodes_s"}
OLD_BOUNDS = {
    "matmul": "products",
    "intra-node links": "links within a node",
    "inter-node links": "links across nodes",
}
OLD_WORK = {"matmul": "matrix product", " intra-node": " within a node", " inter-node": " between nodes"}
OLD_WORDS = {"bound": OLD_BOUNDS, "band": OLD_BOUNDS, "work": OLD_WORK, "by": OLD_WORK}
#: numbers that a line of a frozen file shows next to the digest, if the answer has them
SHOWN = ("status", "peak_memory_bytes", "step_time_s", "answer")
#: by scenario whose cells are frozen, the options that choose the cells
CELLS: dict[str, Sequence[str]] = {
    "gate": (),
    "max_seqlen": (),
    "four_d": (),
    "thousand_ranks": (),
    "lasp_scalability": ("--world-size", "16,64"),
    "dsp_scaling": ("--world-size", "8,32"),
    "megatron_goldens": ("--where", "sizes.pp=2"),
    "packed_placements": ("--world-size", "64"),
    "lasp2_scalability": ("--world-size", "32"),
}
#: the questions of scripts/advice_tables.py that take the fewest seconds; the part `advice` has the others
QUICK_QUESTIONS = ("8b-8-8k", "8b-8-128k", "tnl-64", "bert-64", "st-dit-128")


#: fields that answers without experts or documents did not have when they were frozen
OF_SOME_MODELS = ("expert_imbalance", "dropped_tokens", "routing", "padding")


def spbench(*words: str) -> str:
    """The standard output of a command that exits with 0 or 1; SystemExit for any other exit code."""
    command = [sys.executable, "-m", "spbench", *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=TREE)
    if done.returncode not in (0, 1):
        raise SystemExit(f"{' '.join(words)}: exit code {done.returncode}\n{done.stderr[-2000:]}")
    return done.stdout


def frozen(answer: Any, key: str = "") -> Any:
    """An answer under ``key``, without the fields that differ from run to run, and with old names of keys."""
    if isinstance(answer, dict):
        kept = {
            name: value
            for name, value in answer.items()
            if name not in NOT_FROZEN and not (name in OF_SOME_MODELS and not value)
        }
        return {OLD_KEYS.get(name, name): frozen(value, name) for name, value in kept.items()}
    if isinstance(answer, str):
        for new, old in OLD_WORDS.get(key, {}).items():
            answer = answer.replace(new, old)
    return [frozen(each, key) for each in answer] if isinstance(answer, list) else answer


def line(name: str, answer: Any, numbers: Any = None) -> dict[str, str]:
    """The line of a frozen file for an answer: its name, the digest, and ``numbers`` that the line shows."""
    text = json.dumps(frozen(answer), sort_keys=True)
    shown = numbers if isinstance(numbers, dict) else {}
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return {"name": name, "digest": digest, **{key: str(shown.get(key, "")) for key in SHOWN}}


def cells(scenario: str) -> Iterator[dict[str, str]]:
    """A line for the measurement of each frozen cell of a scenario."""
    with tempfile.TemporaryDirectory() as folder:
        spbench(
            "run", scenario, *CELLS[scenario], "--output", folder, "--fresh", "--quiet", "--format", "json"
        )
        for text in Path(folder, "cells.jsonl").read_text(encoding="utf-8").splitlines():
            row = json.loads(text)
            yield line(row["key"], [row["status"], row["measurement"]], row["measurement"])


def imports() -> Iterator[dict[str, str]]:
    """A line for each functional test of Megatron-LM, with the imported scenario or the refusal."""
    from spbench.bench.tools.papers.megatron_cases import cases

    for case in cases():
        refusal = case.job.refusal()
        text = refusal or case.job.scenario_text()
        yield line(f"{case.case} {case.golden}", text, {"status": "refused" if refusal else "imported"})


def fits() -> Iterator[dict[str, str]]:
    """A line for the answer of each command in docs/fit.md."""
    for block in blocks(TREE / "docs" / "fit.md"):
        for command in block.commands():
            words = command.line.split()[1:]
            yield line(" ".join(words), json.loads(spbench(*words, "--format", "json", "--quiet")))


def advice(names: Sequence[str]) -> Iterator[dict[str, str]]:
    """A line for each question of scripts/advice_tables.py, with the layouts that tie as the best."""
    for name in names:
        model, cluster, gpus, length, tokens = QUESTIONS[name]
        words = ("--model", model, "--cluster", cluster, "--gpus", str(gpus), "--seq-len", str(length))
        precision = ("--set", f"precision={PRECISION.get(cluster, 'bf16')}")
        asked = (*words, "--batch-tokens", str(tokens), *precision, "--format", "csv", "--quiet")
        layouts = [*csv.DictReader(spbench("advise", *asked).splitlines())]
        best = [row for row in layouts if row["tie"] == "True"] or layouts[:1]
        yield line(name, best, best[0] | {"status": f"{len(best)} tie"} if best else {"status": "none fits"})


def verdicts() -> Iterator[dict[str, str]]:
    """A line for each verdict of `spbench verify` on four ranks in float64."""
    text = spbench("verify", "--world-size", "4", "--quiet", "--format", "csv")
    for row in csv.DictReader(text.splitlines()):
        name = " ".join(value for key, value in row.items() if key not in ("error", "where", "reason"))
        yield line(name, row.get("status", row), {"status": row.get("status", "")})


#: the functions that compute the lines of each part, by the part's name
PARTS: dict[str, Callable[[], Iterator[dict[str, str]]]] = {
    **{scenario: partial(cells, scenario) for scenario in CELLS},
    "imports": imports,
    "fit": fits,
    "advice": partial(advice, [name for name in QUESTIONS if name not in QUICK_QUESTIONS]),
    "advice_quick": partial(advice, QUICK_QUESTIONS),
    "verify": verdicts,
}


def moved(part: str, lines: Sequence[dict[str, str]]) -> Iterator[str]:
    """A text for each line of a part that is new, is gone, or differs from the frozen line."""
    with (FOLDER / f"{part}.csv").open(newline="", encoding="utf-8") as file:
        before = {each["name"]: each for each in csv.DictReader(file)}
    after = {each["name"]: each for each in lines}
    for name in sorted(before.keys() | after.keys()):
        old, new = before.get(name), after.get(name)
        if old is None or new is None:
            yield f"{name}: {'is new' if old is None else 'is gone'}"
        elif old != new:
            changes = [f"{key} {old[key]} -> {new[key]}" for key in SHOWN if old[key] != new[key]]
            yield f"{name}: {', '.join(changes) or 'other numbers than those shown'}"


def main() -> int:
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=raw)
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--freeze", action="store_true")
    asked = parser.parse_args()
    if unknown := set(asked.parts) - PARTS.keys():
        parser.error(f"no part {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    changed = 0
    for part in asked.parts or [part for part in PARTS if (FOLDER / f"{part}.csv").exists()]:
        lines = [*PARTS[part]()]
        if asked.freeze:
            FOLDER.mkdir(exist_ok=True)
            with (FOLDER / f"{part}.csv").open("w", newline="", encoding="utf-8") as file:
                writer = csv.DictWriter(file, ["name", "digest", *SHOWN], lineterminator="\n")
                writer.writeheader()
                writer.writerows(lines)
            print(f"{part}: {len(lines)} frozen", flush=True)
            continue
        differing = [*moved(part, lines)]
        changed += len(differing)
        print(f"{part}: {len(lines)} asked, {len(differing)} moved", flush=True)
        print("".join(f"  {each}\n" for each in differing), end="", flush=True)
    return min(changed, 1)


if __name__ == "__main__":
    sys.exit(main())
