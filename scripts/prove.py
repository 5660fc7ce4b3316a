"""Note in the package that verification was green on its code, so that runs need not verify strategies first.

    spbench verify --output results/verification    # or only on 2 ranks, in minutes: --world-size 2
    python scripts/prove.py [FOLDER]

The script reads the verdicts in FOLDER (default: results/verification), and refuses code on which a case is
red or a strategy has no green case. It also writes the counts of the verdicts into the summary of
results/verification, which is committed in place of the verdicts; the nightly job keeps these whole.
"""

import json
import sys
from collections import Counter
from pathlib import Path

from spbench.bench.measure.verify import proof
from spbench.bench.measure.verify.verdicts import read_verdicts, write_summary
from spbench.impls.registries import all_strategies

TREE = Path(__file__).parents[1]


def _with_ranks() -> set[str]:
    """The strategies with axes of ranks, which are compared with the single device."""
    return {name for name, cls in all_strategies().items() if cls.axes}


def main() -> None:
    code, folder = (
        proof.package_code(),
        Path(*sys.argv[1:]) if sys.argv[1:] else TREE / "results/verification",
    )
    verdicts = [each for each in read_verdicts(folder) if each["code"] == code]
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
    main()
