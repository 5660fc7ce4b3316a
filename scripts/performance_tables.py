"""The tables of results/benchmarks/performance.md, from the results of pytest-benchmark.

    pytest tests/benchmarks --benchmark-only --benchmark-json results/benchmarks/performance.json
    python scripts/performance_tables.py

Prints each table between the markers that the page has around the table.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from spbench.bench.tools.papers.paper_findings import Line, markdown

FILE = Path(__file__).parents[1] / "results" / "benchmarks" / "performance.json"

Benchmarks = Sequence[Mapping[str, Any]]


def benchmarks(path: Path = FILE) -> Benchmarks:
    """The results in a file of pytest-benchmark, in the order of the run."""
    results: Benchmarks = json.loads(path.read_text(encoding="utf-8"))["benchmarks"]
    return results


def of(results: Benchmarks, test: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Pairs of parameters ("" if there are none) and result, for the benchmarks of a test function."""
    for each in results:
        name, _, parameters = each["name"].removesuffix("]").partition("[")
        if name == test:
            yield parameters, each


def median(benchmark: Mapping[str, Any]) -> str:
    """The text of a benchmark's median: in seconds, or in milliseconds below a tenth of a second."""
    seconds = benchmark["stats"]["median"]
    return f"{seconds:.2f} s" if seconds >= 0.1 else f"{seconds * 1000:.1f} ms"


def scale(results: Benchmarks) -> list[Line]:
    """The table of CPU seconds and memory by the number of ranks, with a line for each strategy."""
    table = []
    for name, each in of(results, "test_a_step_by_the_number_of_ranks"):
        about = each["extra_info"]
        by_ranks = {one["ranks"]: one for one in about["by_ranks"]}
        seconds = {n: one["trace_cpu_s"] + one["simulation_cpu_s"] for n, one in by_ranks.items()}
        table.append(
            {
                "strategy": name,
                **{f"{n:,} ranks": f"{seconds[n]:.2f} s" for n in (64, 256, 1024)},
                "peak at 1,024": f"{by_ranks[1024]['peak_rss_bytes'] / 2**20:.0f} MiB",
            }
        )
    return table


def beside(ours: Mapping[str, Any], theirs: Mapping[str, Any], names: tuple[str, str]) -> Line:
    """The line, under ``names``, with the medians of two benchmarks, and the second over the first."""
    ratio = theirs["stats"]["median"] / ours["stats"]["median"]
    return {names[0]: median(ours), names[1]: median(theirs), "ratio": f"{ratio:.1f}"}


def trackers(results: Benchmarks) -> list[Line]:
    """The table of the times to find a rank's peak, by spbench and by torch's MemTracker."""
    by_name = {tuple(name.split("-")): each for name, each in of(results, "test_peak")}
    names = ("spbench", "MemTracker")
    return [
        {"ranks": ranks} | beside(by_name["spbench", ranks], by_name["MemTracker", ranks], names)
        for ranks in ("1", "8", "64")
    ]


def times_of(*tests: str) -> Callable[[Benchmarks], list[Line]]:
    """A function that makes the table of tests' medians, with a line for each test and its parameters."""

    def table(results: Benchmarks) -> list[Line]:
        return [
            {
                "what": test.removeprefix("test_").replace("_", " "),
                "of": parameters,
                "median": median(each),
            }
            for test in tests
            for parameters, each in of(results, test)
        ]

    return table


#: the functions that make the tables, by the marker around a table in the page
TABLES = {
    "scale": scale,
    "trackers": trackers,
    "others": times_of("test_spbench", "test_tinygrad", "test_calculon"),
}


if __name__ == "__main__":
    measured = benchmarks()
    for marker, make in TABLES.items():
        print(f"<!-- {marker} -->\n{markdown(make(measured))}<!-- end -->\n")
