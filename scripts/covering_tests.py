"""Run the default tests of the folders that mirror changed files: a hook of .pre-commit-config.yaml.

    python scripts/covering_tests.py FILE...

Of bench/tools/choose/advice.py these are tests/tools/choose; of a page, tests/docs. The whole run, which CI
makes, also has tests that reach a changed file from other folders.
"""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
#: the folder of tests for files that no folder of tests mirrors
_OF = {"docs": "docs", ".github": "ci", ".ci": "ci", "spbench": "api"}


def covering_tests(files: Iterable[str], tests: Path = ROOT / "tests") -> list[str]:
    """The folders or files of tests to run after a change of ``files``, which are paths below the root.

    A changed test stands for itself. Of other files it is the deepest folder of tests whose path ends their
    folder's path without the top "bench" or "bench/measure", and nothing where there is none.
    """
    chosen = set()
    for name in map(Path, files):
        if name.parts[0] == "tests":
            if name.name.startswith("test_"):
                chosen.add(name.as_posix())
            continue
        first = _OF.get(name.parts[0], name.parts[0]) if name.suffix != ".md" else "docs"
        parts = (first, *name.parts[1:-1])
        within = parts[1:] if first == "bench" and len(parts) > 1 else parts
        mirrors = (within[:depth] for depth in range(len(within), 0, -1))
        found = next((each for each in mirrors if tests.joinpath(*each).is_dir()), None)
        if found:
            chosen.add(f"tests/{'/'.join(found)}")
    return sorted(each for each in chosen if not any(str(up) in chosen for up in Path(each).parents))


if __name__ == "__main__":
    if folders := covering_tests(sys.argv[1:]):
        print("pytest", *folders, flush=True)
        sys.exit(
            subprocess.run([sys.executable, "-m", "pytest", "-n", "2", "-x", *folders], cwd=ROOT).returncode
        )
